"""An S3 server that ignores the conditions of requests: npm's s3rver, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import free_ports
from object_server import answers
from waiting import eventually

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}
"""The only credentials that it knows."""


@contextlib.contextmanager
def running_s3rver(folder: Path) -> Iterator[str]:
    """A server with the bucket `bucket`, as long as the block runs; yields its URL.

    Skips where its program is not installed.
    """
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    (folder / "data").mkdir(parents=True)
    command = [
        _program(), "--directory", str(folder / "data"), "--address", "127.0.0.1", "--port",
        str(port), "--no-vhost-buckets", "--configure-bucket", "bucket",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(url), 60, process, (folder / "log").read_text)
        yield url
    finally:
        process.kill()
        process.wait()


def _program() -> str:
    """The program `s3rver`: on PATH, or beside the modules of NODE_PATH."""
    folders = [f"{folder}/.bin" for folder in os.environ.get("NODE_PATH", "").split(os.pathsep)]
    found = shutil.which("s3rver", path=os.pathsep.join([os.environ["PATH"], *folders]))
    if found is None:
        pytest.skip("s3rver: not found; npm install s3rver, and NODE_PATH=node_modules")
    return found
