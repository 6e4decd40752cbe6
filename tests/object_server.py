"""A real S3 server on this machine (moto's), buckets on it, and a watch on featx's requests."""

# ruff: noqa: N803 - parameters as botocore names them
from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from featx.storage import S3Path, parse_path, s3_client
from featx.store import FeatureStore, layout, read_heartbeats


@contextlib.contextmanager
def running_server(log: Path) -> Iterator[str]:
    """moto's server as long as the block runs; yields its URL. Skips where a package is missing."""
    for package in ("moto", "botocore", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        running = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            eventually(lambda: answers(url), 120, running, lambda: "moto's server does not answer")
            yield url
        finally:
            running.terminate()
            running.wait(30)


def environment(url: str) -> dict[str, str]:
    """What leads AWS' tools to a server."""
    return {
        "AWS_ACCESS_KEY_ID": "id-of-a-tester",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-tester",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError as error:  # it wants credentials
        error.close()
        return error.code < 500
    except OSError:
        return False
    return True


def place(text: str) -> S3Path:
    """A place in a bucket."""
    found = parse_path(text)
    assert isinstance(found, S3Path)
    return found


def num_parts(out: str) -> int:
    """The parts of a store that are there, in a bucket or on a disk."""
    return len(list((parse_path(out) / layout.PARTS).glob(layout.PART_GLOB)))


def worker_pids(out: str, kind: str) -> list[int]:
    """Processes of workers that write a store: of those called worker, actor or 'task 3'."""
    records = [record for record in read_heartbeats(parse_path(out)) if record.is_alive]
    return [
        record.values["pid"] for record in records if record.values["what"].startswith(f"{kind} ")
    ]


def rows_of(store: FeatureStore) -> dict[str, Any]:
    """All that a store says of its rows, wherever it lies and in however many files."""
    return {
        **{layer: store[layer][:].tobytes() for layer in store.layers},
        "keys": store.keys.tolist(),
        "labels": store.labels.tolist(),
        "status": store.status.tolist(),
    }


def upload(folder: Path, where: str) -> S3Path:
    """Copy a folder's files, as a user would copy a store to a bucket."""
    root = place(where)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            s3_client.write(
                root.bucket, f"{root.key}/{path.relative_to(folder)}", path.read_bytes()
            )
    return root


class MemoryServer:
    """What a server answers, without one: for tests of thousands of requests.

    It is an answer of `S3Requests`; test_object_writing compares its answers with the server's.
    """

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], tuple[bytes, str, float]] = {}

    def __call__(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return dict(getattr(self, f"_{operation}")(**parameters))

    def _found(self, bucket: str, key: str, etag: str | None = None) -> tuple[bytes, str, float]:
        if (bucket, key) not in self._objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        if etag not in (None, self._objects[bucket, key][1]):
            raise s3_client.PreconditionFailedError(errno.EEXIST, "another one", key)
        return self._objects[bucket, key]

    def _put_object(
        self,
        Bucket: str,
        Key: str,
        Body: bytes,
        IfNoneMatch: str | None = None,
        IfMatch: str | None = None,
    ) -> dict[str, Any]:
        if IfMatch is not None:
            self._found(Bucket, Key, IfMatch)
        if IfNoneMatch == "*" and (Bucket, Key) in self._objects:
            raise s3_client.PreconditionFailedError(errno.EEXIST, "it is there", Key)
        etag = f'"{hashlib.md5(Body).hexdigest()}"'
        self._objects[Bucket, Key] = Body, etag, time.time()
        return {"ETag": etag}

    def _get_object(
        self, Bucket: str, Key: str, Range: str = "", IfMatch: str | None = None
    ) -> dict[str, Any]:
        data, etag, modified = self._found(Bucket, Key, IfMatch)
        found: dict[str, Any] = {"ETag": etag, "LastModified": _date(modified)}
        if Range:
            first, last = map(int, Range.removeprefix("bytes=").split("-"))
            if first >= len(data):
                raise s3_client.InvalidRangeError(errno.EINVAL, "no such range", Key)
            found["ContentRange"] = f"{Range}/{len(data)}"
            data = data[first : last + 1]
        return {**found, "Body": data, "ContentLength": len(data)}

    def _head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        found = self._get_object(Bucket, Key)
        del found["Body"]
        return found

    def _delete_object(self, Bucket: str, Key: str, IfMatch: str | None = None) -> dict[str, Any]:
        if IfMatch is not None:
            self._found(Bucket, Key, IfMatch)
        self._objects.pop((Bucket, Key), None)
        return {}

    def _copy_object(
        self, Bucket: str, Key: str, CopySource: dict[str, str], CopySourceIfMatch: str
    ) -> dict[str, Any]:
        data, _, _ = self._found(CopySource["Bucket"], CopySource["Key"], CopySourceIfMatch)
        return self._put_object(Bucket, Key, data)

    def _list_objects_v2(self, Bucket: str, Prefix: str, MaxKeys: int = 1000) -> dict[str, Any]:
        found = [
            {"Key": key, "Size": len(data), "ETag": etag, "LastModified": _date(modified)}
            for (bucket, key), (data, etag, modified) in sorted(self._objects.items())
            if bucket == Bucket and key.startswith(Prefix)
        ]
        return {"Contents": found[:MaxKeys]}


def _date(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


@dataclass
class S3Requests:
    """Stands for `s3_client.request` in this process.

    Attributes:
        answer: called with the operation and the parameters of each request; at first, it asks the
            server.
    """

    answer: Callable[..., dict[str, Any]]

    def __call__(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return self.answer(operation, **parameters)


@dataclass
class RequestLog:
    """The requests that were made, and how many bytes came."""

    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    bytes_read: int = 0

    def clear(self) -> None:
        self.requests.clear()
        self.bytes_read = 0

    def count(self, operation: str) -> int:
        return sum(name == operation for name, _ in self.requests)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server."""
    with running_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a bucket that is empty at first; the environment leads to its server."""
    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)
    s3_client.client.cache_clear()
    name = f"bucket-{time.monotonic_ns()}"
    s3_client.request("create_bucket", Bucket=name)
    client = s3_client.client
    yield name
    client.cache_clear()


@pytest.fixture
def s3_requests(monkeypatch: pytest.MonkeyPatch) -> S3Requests:
    """The requests of this process to object stores, whose answers a test may choose."""
    requests = S3Requests(s3_client.request)
    monkeypatch.setattr(s3_client, "request", requests)
    return requests


@pytest.fixture
def watch(s3_requests: S3Requests) -> RequestLog:
    """Sees every request of this process."""
    seen, request = RequestLog(), s3_requests.answer

    def watched(operation: str, **parameters: Any) -> dict[str, Any]:
        seen.requests.append((operation, parameters))
        answer = request(operation, **parameters)
        seen.bytes_read += len(answer.get("Body", b""))
        return answer

    s3_requests.answer = watched
    return seen
