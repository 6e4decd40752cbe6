"""Runs into a bucket whose server answers with errors, too late, in part, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import run_python
from faulty_proxy import FAULTS, Fault, FaultyProxy, error, faulty_proxy, random_faults
from object_server import place, rows_of
from tiny_model import COMMAND, extract, write_images

import featx
from featx.errors import RunError, StoreError
from featx.storage import s3_client
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
