"""Runs into a bucket whose server answers with errors, too late, in part, or not at all."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python, with_path
from faulty_proxy import (
    FAULTS,
    Exchange,
    Fault,
    FaultyProxy,
    drop_request,
    error,
    faulty_proxy,
    random_faults,
)
from made_shards import images, write_shards, write_tar
from object_server import place, rows_of, upload
from tiny_model import COMMAND, write_images
from tiny_model import extract_six_parts as extract
from waiting import wait_until

import featx
from featx.errors import RunError, StoreError
from featx.storage import s3_client, s3_outage
from featx.store import check_store

pytestmark = pytest.mark.usefixtures("in_tmp_path", "cache_folder")

TESTS = Path(__file__).parent


@pytest.fixture
def proxy(bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the server of `bucket`; the environment leads to it."""
    with faulty_proxy(s3_server) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        s3_client.client.cache_clear()
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "delayed answer"])
@pytest.mark.usefixtures("without_retry_waits")
def test_a_share_of_all_answers_is_spoilt_and_the_rows_are_the_same(
    tmp_path: Path, bucket: str, proxy: FaultyProxy, kind: str
) -> None:
    photos = write_images(tmp_path / "photos", 9)
    near = extract(str(photos), layers=["conv", "pool"])
    proxy.set_faults(random_faults([FAULTS[kind]], 0.3))
    out = f"s3://{bucket}/run"
    extract(str(photos), out=out)
    far = extract(str(photos), layers=["conv", "pool"], out=out)
    assert rows_of(far) == rows_of(near)
    proxy.set_faults(lambda method, path: None)
    assert check_store(place(out)).complete
    assert not list(place(out).glob("damaged.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["ExpiredToken", "AccessDenied", "InvalidAccessKeyId", "RequestTimeTooSkewed"]
)
def test_credentials_that_expire_in_mid_run_end_it_at_once(
    tmp_path: Path, bucket: str, proxy: FaultyProxy, code: str
) -> None:
    photos = write_images(tmp_path / "photos", 13)
    near = extract(str(photos))
    out, parts = f"s3://{bucket}/run", []

    def choose(method: str, path: str) -> Fault | None:
        parts.extend([path] if method == "PUT" and "/parts/" in path else [])
        return error(400 if code == "ExpiredToken" else 403, code) if len(parts) > 2 else None

    proxy.set_faults(choose)
    message = rf"{code}.*Nothing committed is lost. When the object store accepts the request"
    with pytest.raises(RunError, match=message) as ended:
        extract(str(photos), out=out)
    assert ended.value.exit_code == 1
    proxy.set_faults(lambda method, path: None)
    assert rows_of(extract(str(photos), out=out)) == rows_of(near)


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "RequestTimeTooSkewed"])
def test_a_server_that_refuses_everything_is_told_before_the_run(
    photos: Path, bucket: str, proxy: FaultyProxy, code: str
) -> None:
    proxy.set_faults(lambda method, path: error(403, code))
    with pytest.raises(StoreError, match=f"s3://{bucket}/run.*: the server refuses it") as ended:
        extract(str(photos), out=f"s3://{bucket}/run")
    assert ended.value.exit_code == 2
    proxy.set_faults(lambda method, path: None)
    assert not list(place(f"s3://{bucket}/run").objects())


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["null", "2"])
def test_the_command_survives_faults_of_every_kind(
    photos: Path, bucket: str, proxy: FaultyProxy, workers: str
) -> None:
    near = extract(str(photos))
    proxy.set_faults(random_faults(list(FAULTS.values()), 0.2))
    out = f"s3://{bucket}/run"
    command = [*COMMAND, "data=folder", f"data.root={photos}", f"executor.workers={workers}"]
    done = run_python("-m", "featx", *command, f"out={out}", path=[TESTS], timeout=500)
    assert "Traceback" not in done.stderr
    proxy.set_faults(lambda method, path: None)
    assert rows_of(featx.open(out)) == rows_of(near)


@pytest.fixture
def shards(
    tmp_path: Path, bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Images in the bucket, behind the proxy; requests are repeated soon."""
    monkeypatch.setattr(s3_client, "FIRST_PAUSE_S", 0.01)
    upload(write_shards(tmp_path / "shards", 24), f"s3://{bucket}/shards")
    return {"name": "webdataset", "root": f"s3://{bucket}/shards"}


def failing_reads(fault: Fault, first: int, stop: float) -> Callable[[str, str], Fault | None]:
    """Choose a fault for the reads of shards from number `first` to `stop`."""
    reads: list[str] = []

    def choose(method: str, path: str) -> Fault | None:
        reads.extend([path] if method == "GET" and path.endswith(".tar") else [])
        return fault if path.endswith(".tar") and first <= len(reads) < stop else None

    return choose


def silence(exchange: Exchange) -> None:
    time.sleep(2.5)
    exchange.drop()


@pytest.mark.parametrize(
    "fault", [drop_request, error(503, "SlowDown"), pytest.param(silence, marks=pytest.mark.slow)]
)
def test_images_in_a_bucket_are_waited_for_in_an_outage(
    tmp_path: Path,
    proxy: FaultyProxy,
    shards: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    """Longer than data.timeout_s; decoders say it once."""
    monkeypatch.setattr(s3_client, "TIMEOUT_S", 2.0)
    near = extract({"name": "webdataset", "root": str(tmp_path / "shards")}, out="near")
    data = {**shards, "timeout_s": 0.5, "workers": 2}
    proxy.set_faults(failing_reads(fault, 20, 30))
    far = extract(data)
    assert far.ok.all()
    assert rows_of(far) == rows_of(near)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    waits, answers = (record.getMessage() for record in caplog.records)
    assert "The run waits until the object store answers, at most 600 s" in waits
    assert answers.startswith("the object store answers again after ")


def test_an_outage_of_images_that_lasts_ends_the_run_which_is_resumed(
    proxy: FaultyProxy,
    shards: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_outage, "MAX_OUTAGE_S", 0.5)
    proxy.set_faults(failing_reads(drop_request, 20, float("inf")))
    with pytest.raises(RunError, match=r"reading train-.*closed.*\. Nothing committed") as ended:
        extract(shards)
    assert ended.value.exit_code == 1
    assert len(caplog.records) == 1, "an answer is logged, or each decoder logs"
    proxy.set_faults(lambda method, path: None)
    assert extract(shards).ok.all()


def test_images_that_are_refused_in_mid_run_end_it_at_once(
    proxy: FaultyProxy, shards: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    proxy.set_faults(failing_reads(error(403, "AccessDenied"), 20, float("inf")))
    with pytest.raises(RunError, match=r"reading train-.*the server refuses it \(AccessDenied"):
        extract(shards)
    assert caplog.records == []


@pytest.mark.slow
def test_ctrl_c_ends_a_comparison_of_images_that_waits(
    tmp_path: Path, bucket: str, proxy: FaultyProxy, shards: dict[str, Any]
) -> None:
    """With refresh=true, images are read by threads before the run has begun."""
    command = [sys.executable, "-m", "featx", *COMMAND, "data=webdataset", "refresh=true"]
    log = tmp_path / "log"
    extract(shards)
    files = images(tmp_path / "loose", 24)
    changed = {name: files[name] for name in sorted(files)[16:32]} | {"0009.png": files["0000.png"]}
    tar = write_tar(tmp_path / "changed.tar", changed)
    s3_client.write(bucket, "shards/train-001.tar", tar.read_bytes())

    def choose(method: str, path: str) -> Fault | None:
        return drop_request if "the bytes are compared" in log.read_text() else None

    proxy.set_faults(choose)
    with log.open("w") as output:
        running = subprocess.Popen(
            [*command, f"data.root={shards['root']}"], env=with_path(TESTS), stderr=output
        )
    try:
        wait_until(lambda: "The run waits until" in log.read_text(), running)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130, log.read_text()
    finally:
        running.kill()
        running.wait()
