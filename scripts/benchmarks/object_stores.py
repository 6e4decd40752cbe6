"""Stores in a bucket: requests to moto's S3 server on this machine, also with a wait for each."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.commands import Add
from benchmarks.synthetic_stores import make_run, write_parts

BUCKET = "measured"


@contextlib.contextmanager
def run_s3_server(log: Path) -> Iterator[None]:
    """Run moto's server with an empty bucket, and let the environment variables of AWS name it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url,
    }  # fmt: skip
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            for _ in range(300):
                with contextlib.suppress(urllib.error.URLError):
                    urllib.request.urlopen(url, timeout=10).close()
                    break
                time.sleep(0.1)
            from featx.storage import s3_client

            s3_client.request("create_bucket", Bucket=BUCKET)
            yield
        finally:
            server.terminate()
            server.wait(30)


def bucket(arguments: argparse.Namespace) -> None:
    """Seconds of a resume that finds all parts: read one by one, and read ahead."""
    from featx.storage import parse_path, s3_client, s3_file
    from featx.store import StoreSession

    ahead, request = s3_file.NUM_PREFETCHED_FILES, s3_client.request
    run, listing = make_run(arguments.parts * 64, (1280,), part_rows=64)
    with tempfile.TemporaryDirectory() as name, run_s3_server(Path(name) / "log"):
        root = parse_path(f"s3://{BUCKET}/run")
        with (session := StoreSession(root, run, listing)).hold():
            write_parts(session)
        for wait_ms in arguments.wait_ms:
            operations: list[str] = []

            def counted_request(
                operation: str,
                _operations: list[str] = operations,
                _wait_s: float = wait_ms / 1000,
                **rest: Any,
            ) -> dict[str, Any]:
                _operations.append(operation)
                time.sleep(_wait_s)
                return request(operation, **rest)

            s3_client.request = counted_request
            seconds_of: dict[int, list[float]] = {1: [], ahead: []}
            for _ in range(arguments.runs):
                for s3_file.NUM_PREFETCHED_FILES, seconds in seconds_of.items():
                    operations.clear()
                    started_at = time.perf_counter()
                    with (session := StoreSession(root, run, listing)).hold():
                        assert session.is_complete
                    seconds.append(time.perf_counter() - started_at)
            requests = f"{len(operations)} requests of {wait_ms:g} ms and moto's own"
            print(f"{arguments.parts} parts, {requests}")
            for files, seconds in seconds_of.items():
                median = statistics.median(seconds)
                text = "one by one" if files == 1 else f"{files} files ahead"
                print(f"  {text:15} {median:6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("bucket", bucket)
    command.add_argument("--parts", type=int, default=500, help="of 64 rows of 1280 float16")
    command.add_argument(
        "--wait-ms", nargs="+", type=float, default=[0, 30], help="for each request"
    )
    command.add_argument("--runs", type=int, default=3)
