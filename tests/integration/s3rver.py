"""An S3 server that ignores the conditions of requests: npm's s3rver, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import free_ports

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
        deadline = time.monotonic() + 60
        while not _answers(url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "s3rver does not answer"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def _program() -> str:
    """The program `s3rver`: on PATH, or beside the modules of NODE_PATH."""
    folders = [f"{folder}/.bin" for folder in os.environ.get("NODE_PATH", "").split(os.pathsep)]
    found = shutil.which("s3rver", path=os.pathsep.join([os.environ["PATH"], *folders]))
    if found is None:
        pytest.skip("s3rver: not found; npm install s3rver, and NODE_PATH=node_modules")
    return found
