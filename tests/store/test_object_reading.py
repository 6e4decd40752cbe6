"""Stores in an object store: the same rows as on the disk, and no more bytes than it takes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_proxy import Exchange, faulty_proxy
from made_store import MadeRun, make_added, make_run
from object_server import RequestLog, S3Requests, environment, upload

from featx.errors import ConfigError, ObjectStoreError, StoreError
from featx.storage import S3Path, parse_path, s3_client
from featx.store import FeatureStore, check_store, store_status

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("without_retry_waits"),
]  # of botocore's own


def check_rows(store: FeatureStore, run: MadeRun) -> None:
    """Every way to rows gives what the run has."""
    count = len(run.listing)
    rng = np.random.default_rng(3)
    assert store.keys.tolist() == [key.decode() for key in run.listing.keys.tolist()]
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert store.status.tolist() == run.status().tolist()
    assert [failure["row"] for failure in store.failures] == [f.row for f in run.failures]
    assert store.classes == run.listing.classes
    for name in store.layers:
        expected = run.expected(name)
        mixed = rng.integers(0, count, 40)
        for index in (slice(None), slice(3, 17), mixed, 5, -1, rng.random(count) < 0.3):
            np.testing.assert_array_equal(store[name][index], expected[index])


@pytest.mark.parametrize(
    ("codec", "packed"),
    [
        ("zstd", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(["none", "gzip", "zstd"], [False, True])
            if case != ("zstd", True)
        ),
    ],
)
def test_rows_are_those_on_the_disk(tmp_path: Path, bucket: str, packed: bool, codec: str) -> None:
    run = make_run(61, 8, codec=codec, failed=(4, 30)).identified()
    run.copied(tmp_path / "run", packed=packed)
    upload(tmp_path / "run", f"s3://{bucket}/some/run")
    store = FeatureStore(f"s3://{bucket}/some/run")
    assert store.complete
    check_rows(store, run)
    assert repr(store).startswith(f"<FeatureStore s3://{bucket}/some/run: 61 rows, 59 ok, 2 failed")
    if packed:
        check_rows(FeatureStore(f"s3://{bucket}/some/run/features.h5"), run)


@pytest.mark.slow
def test_a_store_with_layers_that_were_added(tmp_path: Path, bucket: str) -> None:
    run = make_run(40, 8).identified()
    run.copied(tmp_path / "run", packed=True)
    added = make_added(run, {"late": (7,)})
    added.finish(tmp_path / "run", packed=False)
    upload(tmp_path / "run", f"s3://{bucket}/run")
    store = FeatureStore(f"s3://{bucket}/run")
    assert store.layers == ("flat", "late", "map")
    np.testing.assert_array_equal(store["late"][[9, 3]], added.features["late"][[9, 3]])
    np.testing.assert_array_equal(store["flat"][[9, 3]], run.features["flat"][[9, 3]])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_a_random_batch_reads_a_small_share_of_the_bytes(
    tmp_path: Path, bucket: str, watch: RequestLog, packed: bool
) -> None:
    run = make_run(8192, 1024, {"wide": (2048,)}).identified()
    run.copied(tmp_path / "run", packed=packed)
    root = upload(tmp_path / "run", f"s3://{bucket}/run")
    total = sum(entry.size for _, entry in root.objects())
    assert total > 64 << 20
    watch.clear()
    store = FeatureStore(root)
    opening = watch.bytes_read
    assert opening < 1 << 20
    rows = np.random.default_rng(0).integers(0, 8192, 64)
    found = store["wide"][rows]
    np.testing.assert_array_equal(found, run.features["wide"][rows])
    # 64 rows are 512 KiB; neighbours within 64 KiB of each other come by one request.
    assert watch.bytes_read < total / 10
    watch.clear()
    store["wide"][rows]
    assert watch.bytes_read < 64 * (2048 * 4 + (64 << 10))
    ranges = [values["Range"] for name, values in watch.requests if name == "get_object"]
    assert len(ranges) == len(watch.requests) <= 64
    watch.clear()
    store["wide"][100:164]
    assert 0 <= watch.bytes_read - 64 * 2048 * 4 < 1 << 10
    assert len(watch.requests) == 1


def _one_row(store: FeatureStore, pipe: Any) -> None:
    pipe.send(store["flat"][7])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_other_processes_read_too(tmp_path: Path, bucket: str, method: Any) -> None:
    run = make_run(21, 8).identified()
    run.copied(tmp_path / "run", packed=True)
    upload(tmp_path / "run", f"s3://{bucket}/run")
    store = FeatureStore(f"s3://{bucket}/run")
    store["flat"][3]
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_one_row, args=(store, theirs))
    child.start()
    assert ours.poll(60)
    np.testing.assert_array_equal(ours.recv(), run.features["flat"][7])
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(store["flat"][9], run.features["flat"][9])
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(again["flat"][2], run.features["flat"][2])


@pytest.mark.slow
@pytest.mark.parametrize("honours", [True, False])
def test_an_object_that_was_replaced_is_refused(
    tmp_path: Path, bucket: str, s3_requests: S3Requests, honours: bool
) -> None:
    if not honours:  # a server that ignores the condition of a GET returns the bytes that are there
        request = s3_requests.answer

        def careless(operation: str, **parameters: Any) -> dict[str, Any]:
            parameters.pop("IfMatch", None)
            return request(operation, **parameters)

        s3_requests.answer = careless
    run = make_run(8192, 1024, {"wide": (128,)}).identified()
    run.copied(tmp_path / "run", packed=True)
    root = upload(tmp_path / "run", f"s3://{bucket}/run")
    store = FeatureStore(root)
    store["wide"][0]
    other = make_run(8192, 1024, {"wide": (128,)}, seed=5).identified()
    other.copied(tmp_path / "other", packed=True)
    s3_client.write(bucket, "run/features.h5", (tmp_path / "other" / "features.h5").read_bytes())
    with pytest.raises(StoreError, match=r"features\.h5: it was replaced|cannot read .*replaced"):
        store["wide"][4000]


@pytest.mark.slow
def test_verify_finds_a_flipped_byte_and_no_damage_where_the_server_fails(
    tmp_path: Path, bucket: str, s3_requests: S3Requests
) -> None:
    run = make_run(400, 32, {"wide": (256,)}).identified()
    run.copied(tmp_path / "run")
    root = upload(tmp_path / "run", f"s3://{bucket}/run")
    assert check_store(root).complete
    # Answers that fail are no damage, whichever of them it is.
    request, made, last = s3_requests.answer, [0], [10**6]

    def failing(operation: str, **parameters: Any) -> dict[str, Any]:
        made[0] += 1
        if made[0] > last[0]:
            raise OSError(5, "the server fails", "s3://there")
        return request(operation, **parameters)

    s3_requests.answer = failing
    assert check_store(root).complete
    count, made[0] = made[0], 0
    for last[0] in [*range(20), *range(20, count, 7)]:
        made[0] = 0
        with pytest.raises((StoreError, OSError)):
            check_store(root)
    last[0] = 10**6
    path = tmp_path / "run" / "parts" / "part-000003.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    s3_client.write(bucket, "run/parts/part-000003.h5", bytes(data))
    found = check_store(root)
    assert [damage.path.name for damage in found.damages] == ["part-000003.h5"]
    s3_client.delete(bucket, "run/parts/part-000005.h5")
    assert check_store(root).missing == ["part-000005.h5"]


@pytest.mark.slow
def test_status_lists_parts_and_asks_for_none(
    tmp_path: Path, bucket: str, watch: RequestLog
) -> None:
    run = make_run(160, 8).identified()
    run.write(tmp_path / "run", parts=range(18))
    root = upload(tmp_path / "run", f"s3://{bucket}/run")
    watch.clear()
    status = store_status(root)
    assert (status.parts_done, status.parts) == (18, 20)
    assert not status.complete
    assert len(watch.requests) < 15


@pytest.mark.slow
def test_long_lists_come_in_pieces_and_names_may_be_odd(
    tmp_path: Path, bucket: str, s3_requests: S3Requests
) -> None:
    run = make_run(400, 8).identified()
    run.copied(tmp_path / "run")
    root = upload(tmp_path / "run", f"s3://{bucket}/rün 1 + 2%41")
    request, pages = s3_requests.answer, []

    def short(operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "list_objects_v2":
            pages.append(parameters)
            parameters.setdefault("MaxKeys", 7)
        return request(operation, **parameters)

    s3_requests.answer = short
    check_rows(FeatureStore(str(root)), run)
    assert len(pages) >= 8
    assert len(list(root.objects())) == 50 + 4


def test_what_is_no_store_is_reported(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=rf"there is no store at s3://{bucket}/nothing"):
        FeatureStore(f"s3://{bucket}/nothing")
    s3_client.write(bucket, "some/file.txt", b"text")
    with pytest.raises(StoreError, match="holds no store"):
        FeatureStore(f"s3://{bucket}/some")
    s3_client.write(bucket, "some/empty.h5", b"")
    for name in ("empty.h5", "file.txt"):
        with pytest.raises(StoreError, match=name):
            FeatureStore(f"s3://{bucket}/some/{name}")
    with pytest.raises(StoreError, match="no such bucket"):
        FeatureStore("s3://no-such-bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3_client.client.cache_clear()
    with pytest.raises(StoreError, match=r"EndpointConnectionError.*127\.0\.0\.1:9"):
        FeatureStore(f"s3://{bucket}/run")


def test_without_credentials_it_says_so(
    s3_server: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    s3_client.client.cache_clear()
    with pytest.raises(StoreError, match=r"NoCredentialsError.*set AWS_ACCESS_KEY_ID and"):
        FeatureStore("s3://bucket/run")
    s3_client.client.cache_clear()


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (404, "NoSuchKey", FileNotFoundError, "No such file"),
        (412, "PreconditionFailed", s3_client.PreconditionFailedError, "PreconditionFailed"),
        (403, "AccessDenied", ObjectStoreError, r"the server refuses it \(AccessDenied: why\)"),
        (400, "ExpiredToken", ObjectStoreError, r"the server refuses it \(ExpiredToken: why\)"),
        (404, "NoSuchBucket", ObjectStoreError, r"there is no such bucket \(NoSuchBucket: why\)"),
        (500, "InternalError", ObjectStoreError, "InternalError: why"),
    ],
)
def test_what_a_server_answers_is_reported(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, kind: type[OSError], said: str
) -> None:
    pytest.importorskip("botocore")

    def refuse(exchange: Exchange) -> None:
        body = (
            f"<Error><Code>{code}</Code><Message>why.</Message>"
            "<AWSAccessKeyId>the-id-of-somebody</AWSAccessKeyId></Error>"
        )
        exchange.answer(status, [("Content-Type", "application/xml")], body.encode())

    with faulty_proxy("http://nowhere", lambda method, path: refuse) as server:
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        s3_client.client.cache_clear()
        with pytest.raises(kind, match=said) as output:
            s3_client.read("bucket", "some/key")
        s3_client.client.cache_clear()
    assert output.value.errno is not None, "it would count as damage of a file"
    assert "the-id-of-somebody" not in str(output.value)


def test_places() -> None:
    place = parse_path("s3://bucket/run/")
    assert isinstance(place, S3Path)
    part = place / "parts" / "part-000001.h5"
    assert (str(part), part.bucket, part.key) == (
        "s3://bucket/run/parts/part-000001.h5", "bucket", "run/parts/part-000001.h5",
    )  # fmt: skip
    assert parse_path(part) is part
    assert parse_path(Path("s3://bucket/run")) == place
    assert pickle.loads(pickle.dumps(part)) == part
    assert not isinstance(parse_path("runs/s3:bucket"), S3Path)
    with pytest.raises(OSError, match="this operation needs a disk"):
        os.stat(part)  # noqa: PTH116 - what a stranger to S3Path would do
    for wrong in ("gs://bucket/run", "s3://bucket", "s3://bucket/", "s3://bucket/../run"):
        with pytest.raises(ConfigError):
            parse_path(wrong)
    with pytest.raises(ConfigError) as refused:
        parse_path("s3://me:password@bucket/run")
    assert "password" not in str(refused.value).replace("user name, password", "")
