"""Requests to an object store that comes and goes: how long a run waits, and what it says."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator

import pytest
from faulty_proxy import Exchange, Fault, drop_request, error, faulty_proxy
from object_server import MemoryServer, S3Requests, environment, place
from waiting import eventually

from featx.errors import ObjectStoreError, StorageError
from featx.storage import s3_client, s3_outage
from featx.storage.s3_folder import S3Folder

pytestmark = pytest.mark.usefixtures("without_retry_waits")

pytest.importorskip("botocore")

BUSY = error(500, "InternalError")
THROTTLED = error(429, "TooManyRequests")
CUT_OFF = error(400, "RequestTimeout")
REFUSED = error(400, "ExpiredToken")


class Server:
    """A server whose objects all hold one byte, which answers or not.

    Attributes:
        down: True, or the number of the requests that fail next.
        made: number of requests.
    """

    def __init__(self, fault: Fault) -> None:
        self.down: bool | int = False
        self.made = 0
        self._fault = fault

    def choose(self, method: str, path: str) -> Fault:
        self.made += 1
        if not self.down:
            return _one_byte
        if self.down is not True:
            self.down -= 1
        return self._fault


def _one_byte(exchange: Exchange) -> None:
    headers = [("ETag", '"tag"'), ("Last-Modified", "Fri, 27 Nov 2026 00:00:00 GMT")]
    exchange.answer(200, headers, b"x")


def truncated(exchange: Exchange) -> None:
    exchange.answer(200, [("ETag", '"tag"')], b"x", length=2)
    exchange.drop()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(getattr(request, "param", drop_request))
    with faulty_proxy("http://nowhere", made.choose) as proxy:
        for name, value in environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        s3_client.client.cache_clear()
        yield made
        s3_client.client.cache_clear()


def size_of_object() -> int:
    """What a reader asks for: an object that has one byte."""
    return len(s3_client.read("bucket", "key")[0])


@pytest.mark.parametrize("server", [THROTTLED, CUT_OFF, truncated], indirect=True)
def test_a_server_that_limits_its_clients_is_waited_for(server: Server) -> None:
    server.down = 2 * s3_client.ATTEMPTS
    with s3_outage.waiting_limit(60):
        assert size_of_object() == 1
    assert server.made == 2 * s3_client.ATTEMPTS + 1


@pytest.mark.parametrize("server", [drop_request, BUSY], indirect=True)
def test_a_run_waits_and_says_so_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.down = s3_client.ATTEMPTS + 2
    with s3_outage.waiting_limit(60):
        assert size_of_object() == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    waits, answers = (record.getMessage() for record in caplog.records)
    assert waits.startswith("s3://bucket/key: ")
    assert "The run waits until the object store answers, at most 60 s; nothing comm" in waits
    assert answers.startswith("the object store answers again after ")


@pytest.mark.parametrize("server", [drop_request, BUSY, truncated], indirect=True)
def test_who_only_reads_is_told_at_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.down = True
    with pytest.raises(ObjectStoreError) as output:
        size_of_object()
    assert output.value.errno == errno.EAGAIN
    assert output.value.exit_code == 2
    assert server.made == s3_client.ATTEMPTS
    assert caplog.records == []


@pytest.mark.parametrize("server", [REFUSED], indirect=True)
def test_what_is_refused_is_not_waited_for(server: Server) -> None:
    server.down = True
    with (
        s3_outage.waiting_limit(60),
        pytest.raises(ObjectStoreError, match=r"refuses it \(ExpiredToken"),
    ):
        size_of_object()
    assert server.made == 1


def test_when_the_limit_is_over_nobody_waits_again(server: Server) -> None:
    server.down = True
    with s3_outage.waiting_limit(2):  # which six requests do not take on a busy machine
        began = time.monotonic()
        with pytest.raises(ObjectStoreError):
            size_of_object()
        assert 1.9 < time.monotonic() - began < 60
        made = server.made
        with pytest.raises(ObjectStoreError):
            size_of_object()
        assert server.made == made + s3_client.ATTEMPTS
        server.down = False
        assert size_of_object() == 1
        server.down = s3_client.ATTEMPTS + 2
        assert size_of_object() == 1, "after an answer the limit counts anew"


def test_heartbeats_do_not_wait(server: Server) -> None:
    server.down = True
    with s3_outage.waiting_limit(60), s3_outage.without_waiting(), pytest.raises(ObjectStoreError):
        size_of_object()


def test_a_run_that_is_stopped_waits_no_longer(server: Server) -> None:
    server.down = True
    failed: list[BaseException] = []

    def look() -> None:
        try:
            size_of_object()
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
    server.down = s3_client.ATTEMPTS + 1
    with s3_outage.waiting_limit(60):
        assert size_of_object() == 1


def silence(exchange: Exchange) -> None:
    exchange.rfile.read()  # until the client closes the connection
    exchange.drop()


@pytest.mark.parametrize("server", [silence], indirect=True)
def test_a_server_that_is_silent_does_not_hold_up_the_end_of_a_run(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a network that drops packets, where an attempt takes a minute."""
    monkeypatch.setattr(s3_client, "BEST_EFFORT_TIMEOUT_S", 0.1)
    root = place("s3://bucket/run")
    assert size_of_object() == 1
    server.down, server.made = True, 0
    began = time.monotonic()
    S3Folder(root).write_best_effort(root / "workers" / "host-1.json", "{}")
    waited_s = time.monotonic() - began
    assert waited_s < s3_client.TIMEOUT_S / 2, "without a byte it waits as long as other requests"
    eventually(lambda: server.made == s3_client.ATTEMPTS, 30)
    monkeypatch.setattr(s3_client, "TIMEOUT_S", 0.4)
    with s3_outage.waiting_limit(60):
        s3_outage.stop_waiting()
        with pytest.raises(ObjectStoreError, match="ReadTimeoutError"):
            size_of_object()
    eventually(lambda: server.made > s3_client.ATTEMPTS, 30)
    assert server.made == s3_client.ATTEMPTS + 1, "a run that was told to stop asks again"


def test_a_server_that_comes_and_goes_is_no_flood_of_lines(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_outage.waiting_limit(60):
        for _ in range(5):
            server.down = s3_client.ATTEMPTS + 1
            size_of_object()
    assert len(caplog.records) == 2


def test_in_mid_run_an_outage_is_no_mistake_of_the_user(s3_requests: S3Requests) -> None:
    s3_requests.answer = MemoryServer()
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
        size_of_object()
    assert server.made == s3_client.ATTEMPTS
