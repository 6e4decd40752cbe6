"""Requests to an object store that comes and goes: how long a run waits, and what it says."""

from __future__ import annotations

import errno
import logging
import threading
import time
from typing import Any

import pytest
from object_server import MemoryServer, place

from featx.errors import ObjectStoreError, StorageError
from featx.storage import s3_client, s3_outage
from featx.storage.s3_folder import S3Folder

pytestmark = pytest.mark.usefixtures("without_retry_waits")

botocore = pytest.importorskip("botocore.exceptions")


class Server:
    """Answers requests, or not: `down` is True, or counts the requests that fail next.

    Args:
        error: raised while it is down.
    """

    def __init__(self, error: Exception) -> None:
        self.down: bool | int = False
        self.made = 0
        self._error = error

    def head_object(self, **parameters: Any) -> dict[str, Any]:
        self.made += 1
        if self.down:
            if self.down is not True:
                self.down -= 1
            raise self._error
        return {"ContentLength": 1, "ETag": "etag", "LastModified": _Date()}


class _Date:
    def timestamp(self) -> float:
        return 0.0


UNREACHABLE = botocore.EndpointConnectionError(endpoint_url="http://there")
BUSY = botocore.ClientError(
    {"Error": {"Code": "InternalError"}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "HeadObject"
)
THROTTLED = botocore.ClientError(
    {"Error": {"Code": "TooManyRequests"}, "ResponseMetadata": {"HTTPStatusCode": 429}},
    "PutObject",
)
THROTTLED_HEAD = botocore.ClientError(
    {"Error": {"Code": "429"}, "ResponseMetadata": {"HTTPStatusCode": 429}}, "HeadObject"
)
CUT_OFF = botocore.ClientError(
    {"Error": {"Code": "RequestTimeout"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "PutObject"
)
REFUSED = botocore.ClientError(
    {"Error": {"Code": "ExpiredToken"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "HeadObject"
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Server:
    made = Server(getattr(request, "param", UNREACHABLE))
    monkeypatch.setattr(s3_client, "client", lambda process: made)
    monkeypatch.setattr(s3_outage, "_outage", s3_outage.Outage())
    monkeypatch.setattr(s3_outage, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(s3_client, "_MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(s3_client.random, "uniform", lambda low, high: 0.05)
    return made


@pytest.mark.parametrize("server", [THROTTLED, THROTTLED_HEAD, CUT_OFF], indirect=True)
def test_a_server_that_limits_its_clients_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client.time, "sleep", lambda seconds: None)
    server.down = 2 * s3_client.ATTEMPTS
    with s3_outage.waiting_limit(60):
        assert s3_client.head("bucket", "key").size == 1
    assert server.made == 2 * s3_client.ATTEMPTS + 1


@pytest.mark.parametrize("server", [UNREACHABLE, BUSY], indirect=True)
def test_a_run_waits_and_says_so_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.down = 5
    with s3_outage.waiting_limit(60):
        assert s3_client.head("bucket", "key").size == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    waits, answers = (record.getMessage() for record in caplog.records)
    assert waits.startswith("s3://bucket/key: ")
    assert "The run waits until the object store answers, at most 60 s; nothing comm" in waits
    assert answers.startswith("the object store answers again after ")


@pytest.mark.parametrize("server", [UNREACHABLE, BUSY], indirect=True)
def test_who_only_reads_is_told_at_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.down = True
    with pytest.raises(ObjectStoreError) as output:
        s3_client.head("bucket", "key")
    assert output.value.errno == errno.EAGAIN
    assert output.value.exit_code == 2
    assert server.made == 1
    assert caplog.records == []


@pytest.mark.parametrize("server", [REFUSED], indirect=True)
def test_what_is_refused_is_not_waited_for(server: Server) -> None:
    server.down = True
    with (
        s3_outage.waiting_limit(60),
        pytest.raises(ObjectStoreError, match=r"refuses it \(ExpiredToken"),
    ):
        s3_client.head("bucket", "key")
    assert server.made == 1


def test_when_the_limit_is_over_nobody_waits_again(server: Server) -> None:
    server.down = True
    with s3_outage.waiting_limit(0.3):
        began = time.monotonic()
        with pytest.raises(ObjectStoreError):
            s3_client.head("bucket", "key")
        assert 0.25 < time.monotonic() - began < 5
        made = server.made
        with pytest.raises(ObjectStoreError):
            s3_client.head("bucket", "another")
        assert server.made == made + 1
        server.down = False
        assert s3_client.head("bucket", "key").size == 1
        server.down = 3
        assert s3_client.head("bucket", "key").size == 1, "after an answer the limit counts anew"


def test_heartbeats_do_not_wait(server: Server) -> None:
    server.down = True
    with s3_outage.waiting_limit(60), s3_outage.without_waiting(), pytest.raises(ObjectStoreError):
        s3_client.head("bucket", "key")


def test_a_run_that_is_stopped_waits_no_longer(server: Server) -> None:
    server.down = True
    failed: list[BaseException] = []

    def look() -> None:
        try:
            s3_client.head("bucket", "key")
        except ObjectStoreError as error:
            failed.append(error)

    with s3_outage.waiting_limit(60):
        thread = threading.Thread(target=look)
        thread.start()
        time.sleep(0.1)
        assert not failed
        s3_outage.stop_waiting()
        thread.join(10)
    assert failed
    server.down = 2
    with s3_outage.waiting_limit(60):
        assert s3_client.head("bucket", "key").size == 1


def test_a_server_that_comes_and_goes_is_no_flood_of_lines(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_outage.waiting_limit(60):
        for _ in range(20):
            server.down = 2
            s3_client.head("bucket", "key")
    assert len(caplog.records) == 2


def test_in_mid_run_an_outage_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "request", MemoryServer())
    root = place("s3://bucket/run")
    with (
        pytest.raises(StorageError, match="When the object store accepts the request") as output,
        S3Folder(root).lock(root / ".lock"),
    ):
        raise ObjectStoreError(errno.EAGAIN, "no answer", "s3://bucket/run/parts")
    assert output.value.exit_code == 1
    assert "s3://bucket/run/parts" in str(output.value)


def test_runs_that_end_in_another_order_leave_no_patience(server: Server) -> None:
    """Two runs in threads of one process, of which the first one ends first."""
    server.down = True
    first, second = s3_outage.waiting_limit(60), s3_outage.waiting_limit(60)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    with pytest.raises(ObjectStoreError):
        s3_client.head("bucket", "key")
    assert server.made == 1
