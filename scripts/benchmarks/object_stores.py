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
def served(log: Path) -> Iterator[None]:
    """moto's server with an empty bucket, which the environment leads to as long as this runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url,
    }  # fmt: skip
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        running = subprocess.Popen(command, stdout=output, stderr=output)
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
            running.terminate()
            running.wait(30)


def bucket(arguments: argparse.Namespace) -> None:
    """Seconds of a resume that finds all parts: looked at one by one, and fetched ahead."""
    from featx.storage import s3_client, s3_file
    from featx.storage.s3_path import parse_path
    from featx.store.session import StoreSession

    ahead, request = s3_file._NUM_PREFETCHED_FILES, s3_client.request
    run, listing = make_run(arguments.parts * 64, (1280,), part_rows=64)
    with tempfile.TemporaryDirectory() as name, served(Path(name) / "log"):
        root = parse_path(f"s3://{BUCKET}/run")
        with (session := StoreSession(root, run, listing)).hold():
            write_parts(session)
        for wait_ms in arguments.wait_ms:
            made: list[str] = []

            def asked(
                operation: str, _made: list[str] = made, _s: float = wait_ms / 1000, **rest: Any
            ) -> dict[str, Any]:
                _made.append(operation)
                time.sleep(_s)
                return request(operation, **rest)

            s3_client.request = asked
            took: dict[int, list[float]] = {1: [], ahead: []}
            for _ in range(arguments.runs):
                for s3_file._NUM_PREFETCHED_FILES, seconds in took.items():
                    made.clear()
                    begun = time.perf_counter()
                    with (session := StoreSession(root, run, listing)).hold():
                        assert session.whole
                    seconds.append(time.perf_counter() - begun)
            print(f"{arguments.parts} parts, {len(made)} requests of {wait_ms:g} ms and moto's own")
            for files, seconds in took.items():
                middle = statistics.median(seconds)
                text = "one by one" if files == 1 else f"{files} files ahead"
                print(f"  {text:15} {middle:6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


def add_commands(add: Add) -> None:
    """The command of scripts/benchmark that is measured here."""
    one = add("bucket", bucket)
    one.add_argument("--parts", type=int, default=500, help="of 64 rows of 1280 float16")
    one.add_argument("--wait-ms", nargs="+", type=float, default=[0, 30], help="for each request")
    one.add_argument("--runs", type=int, default=3)
