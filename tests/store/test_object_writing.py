"""Stores written in an object store: killed or failed at every request, and by two at once."""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_proxy import Fault, error, faulty_proxy
from made_store import MadeRun, make_added, make_run
from object_server import MemoryServer, RequestLog, S3Requests, place, upload

from featx.errors import ObjectStoreError, RunError, StoreError, StoreLockedError
from featx.storage import S3Path, parse_path, prefetch_files, s3_client, s3_file
from featx.storage.s3_folder import S3Folder
from featx.store import (
    DamageRecord,
    FeatureStore,
    Heartbeat,
    PartBuilder,
    check_store,
    layout,
    read_heartbeats,
    repair_files,
)
from featx.store.part_files import inspect_parts

pytestmark = pytest.mark.usefixtures("two_retries")

RUN = make_run(21, 8, failed=(4, 17)).identified()


class KilledError(BaseException):
    """The process is gone: nobody catches it."""


class Faulty:
    """A client whose request number `at` fails, once or from then on.

    Args:
        request: the real one.
        at: counted from 1; 0 lets all pass.
        kind: 'kill' before the request or 'late kill' after it; 'refused', or 'unheard' where it
            is done and the answer is lost; 'down' fails that one and all that follow.
    """

    def __init__(self, request: Callable[..., dict[str, Any]], at: int, kind: str) -> None:
        self._request, self._at, self._kind = request, at, kind
        self.made = 0
        self.hit = ""

    def __call__(self, operation: str, **parameters: Any) -> dict[str, Any]:
        self.made += 1
        now = self.made == self._at or (self._kind == "down" and 0 < self._at < self.made)
        if now:
            self.hit = self.hit or f"{operation} {parameters.get('Key')}"
        if now and self._kind in ("late kill", "unheard"):
            self._request(operation, **parameters)
        if now and "kill" in self._kind:
            raise KilledError
        if now:
            raise ObjectStoreError(errno.EIO, "the server fails", "s3://there")
        return self._request(operation, **parameters)


@pytest.fixture
def two_retries(set_retries: Callable[[int], None]) -> None:
    set_retries(2)


def check_store_of(run: MadeRun, root: Path) -> None:
    """All rows are there, sound, and those of the run."""
    report = check_store(root)
    assert report.complete, (report.missing, report.damages)
    store = FeatureStore(root)
    for name, values in run.features.items():
        assert store[name][:].tobytes() == run.expected(name).astype(values.dtype).tobytes()
    assert store.status.tolist() == run.status().tolist()


def finish(run: MadeRun, root: Path) -> None:
    """What the main job does with a store."""
    with run.session(root).hold() as session:
        session.write_config("model: toy\n")
        run.compute_lost(session)
        for part in session.missing():
            session.commit(run.builder(part))
        session.write_failures()
        session.write_summary({"rows": len(run.listing)})


@pytest.fixture
def places(s3_requests: S3Requests) -> Iterator[S3Path]:
    """Ever new places in a bucket."""
    s3_requests.answer = MemoryServer()
    return (place(f"s3://memory/run-{number}") for number in range(10**6))


@pytest.fixture
def finished(places: Iterator[S3Path]) -> S3Path:
    """A store of RUN that is done."""
    root = next(places)
    finish(RUN, root)
    return root


def test_a_store_is_written_found_again_and_read(
    bucket: str, tmp_path: Path, watch: RequestLog
) -> None:
    root = place(f"s3://{bucket}/run")
    finish(RUN, root)
    check_store_of(RUN, root)
    names = [path.key.removeprefix(f"{root.key}/") for path, _ in root.objects()]
    # What is created is created with a condition.
    created = [v for n, v in watch.requests if n == "put_object" and "part-" in v["Key"]]
    assert [values["IfNoneMatch"] for values in created] == ["*"] * 3
    assert names == [
        ".hydra/config.yaml", ".lock", "failures.csv", "featx.json", "parts/part-000000.h5",
        "parts/part-000001.h5", "parts/part-000002.h5", "samples.h5", "summary.json",
    ]  # fmt: skip
    # Byte for byte what a disk has.
    RUN.write(tmp_path / "run")
    for name in ("featx.json", "samples.h5", *(f"parts/{layout.part_name(i)}" for i in range(3))):
        assert (root / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
    assert (root / "failures.csv").read_text().count("\n") == 3  # a line break is an escape
    watch.clear()
    with RUN.session(root).hold() as session:
        assert session.is_complete
        assert session.num_failed == 2
        assert session.stored_bytes() == sum(
            entry.size for path, entry in root.objects() if "/parts/" in path.key
        )


def test_what_stands_for_a_server_answers_as_one(bucket: str) -> None:
    servers = s3_client.request, MemoryServer()

    def both(operation: str, **parameters: Any) -> None:
        answers = []
        for ask in servers:
            try:
                answer = ask(operation, Bucket=bucket, **parameters)
                kept = ("Body", "ETag", "ContentLength", "ContentRange")
                found = {name: answer[name] for name in kept if name in answer}
                listed = [(o["Key"], o["Size"], o["ETag"]) for o in answer.get("Contents", [])]
                answers.append(
                    (found if operation in ("get_object", "head_object") else {}, listed)
                )
            except OSError as error:
                answers.append((type(error).__name__, []))
        found, expected = answers
        if isinstance(found[0], dict) and isinstance(found[0].get("ContentRange"), str):
            found[0].pop("ContentRange"), expected[0].pop("ContentRange")
        assert found == expected, (operation, parameters)

    one, other = (f'"{hashlib.md5(data).hexdigest()}"' for data in (b"one", b"other"))
    for _ in range(2):
        both("put_object", Key="a/b", Body=b"one", IfNoneMatch="*")
        both("put_object", Key="a/c", Body=b"one", IfMatch=one)
        both("put_object", Key="a/b", Body=b"other", IfMatch=other)
        for span in ("bytes=0-1", "bytes=1-99", "bytes=3-9"):
            both("get_object", Key="a/b", Range=span)
        both("get_object", Key="a/b", IfMatch=other)
        both("get_object", Key="a/b", IfMatch=one)
        both("get_object", Key="a", IfMatch=one)
        both("head_object", Key="a/b")
        both("head_object", Key="a")
        both("put_object", Key="a/b", Body=b"other", IfMatch=one)
        source = {"Bucket": bucket, "Key": "a/b"}
        both("copy_object", Key="d", CopySource=source, CopySourceIfMatch=other)
        both("list_objects_v2", Prefix="a/")
        both("list_objects_v2", Prefix="", MaxKeys=1)
        both("delete_object", Key="a/b", IfMatch=one)
        both("delete_object", Key="d")
        both("delete_object", Key="never")
        both("delete_object", Key="a/b", IfMatch=other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "late kill", "refused", "unheard", "down"])
def test_whatever_fails_at_any_request_the_same_command_resumes(
    s3_requests: S3Requests, kind: str
) -> None:
    for at in range(1, 200):
        root, request = parse_path("s3://memory/run"), MemoryServer()
        s3_requests.answer = faulty = Faulty(request, at, kind)
        ended = False
        try:
            finish(RUN, root)
            ended = True
        except (KilledError, StoreError, RunError):
            pass
        s3_requests.answer = request  # the same objects, and nothing fails
        if ended:
            check_store_of(RUN, root)
        elif root.is_dir():
            _check_what_is_there(root)
        finish(RUN, root)
        check_store_of(RUN, root)
        assert not (root / layout.DAMAGED).exists(), faulty.hit
        if faulty.made < at:
            break
    assert 25 < at < 199


def _check_what_is_there(root: Path) -> None:
    """A reader finds no store, or one whose rows are right as far as they go."""
    try:
        store = FeatureStore(root)
    except StoreError as error:
        assert "holds no store" in str(error)  # noqa: PT017 - what it says is what matters
        return
    there = store.status != 255
    for name in store.layers:
        np.testing.assert_array_equal(store[name][there], RUN.expected(name)[there])


class Counted:
    """Requests for parts that are under way at once; each takes a moment."""

    def __init__(self, request: Callable[..., dict[str, Any]]) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._now = self.most = 0
        self.keys: list[str] = []

    def __call__(self, operation: str, **parameters: Any) -> dict[str, Any]:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.keys.append(parameters.get("Key", ""))
        try:
            time.sleep(0.005)
            return self._request(operation, **parameters)
        finally:
            with self._lock:
                self._now -= 1


@pytest.mark.slow
def test_a_resume_fetches_parts_in_parallel(s3_requests: S3Requests) -> None:
    # Each part has several blocks, and its metadata at both ends.
    run = make_run(256, 4, failed=(9, 200), shapes={"flat": (9000,)}).identified()
    root, memory = parse_path("s3://memory/run"), MemoryServer()
    s3_requests.answer = memory
    finish(run, root)
    s3_requests.answer = counted = Counted(memory)
    with run.session(root).hold() as session:
        assert session.is_complete
        assert session.failures == list(run.failures)
    assert 4 < counted.most <= s3_client.CONNECTIONS
    parts = [key for key in counted.keys if "/parts/part-" in key]
    assert {parts.count(key) for key in parts} == {2}  # no block twice
    found = [(part.index, problem) for part, problem, _ in inspect_parts(
        root, session.manifest, list(session.manifest.runs[0].parts())
    )]  # fmt: skip
    assert found == [(index, None) for index in range(64)]


def test_no_more_is_fetched_than_is_soon_looked_at(s3_requests: S3Requests) -> None:
    memory = MemoryServer()
    for number in range(200):
        memory("put_object", Bucket="memory", Key=f"run/{number:03d}", Body=b"x" * 100)
    s3_requests.answer = counted = Counted(memory)
    paths = [parse_path(f"s3://memory/run/{number:03d}") for number in range(200)]
    files = prefetch_files(paths)
    for number in range(3):
        opened = next(files)
        assert opened is not None
        assert opened().pread(3, 0) == b"xxx"
        time.sleep(0.08)
        assert len(counted.keys) <= 1 + number + s3_file.NUM_PREFETCHED_FILES
    files.close()
    before = len(counted.keys)
    time.sleep(0.08)
    assert len(counted.keys) <= before + s3_client.CONNECTIONS
    assert list(prefetch_files([Path("a"), Path("b")])) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_what_cannot_be_fetched_now_is_no_damage(s3_requests: S3Requests, number: int) -> None:
    run = make_run(160, 4, shapes={"flat": (9000,)}).identified()
    root, memory = parse_path("s3://memory/run"), MemoryServer()
    s3_requests.answer = memory
    finish(run, root)

    def failing(operation: str, **parameters: Any) -> dict[str, Any]:
        if "part-000020" in parameters.get("Key", ""):
            raise ObjectStoreError(number, "the server fails", "s3://there")
        return memory(operation, **parameters)

    s3_requests.answer = failing
    with pytest.raises(StoreError, match=r"part-000020.h5: s3://there: the server fails"):
        finish(run, root)
    s3_requests.answer = memory
    assert not (root / layout.DAMAGED).exists()
    finish(run, root)
    check_store_of(run, root)


def test_two_writers_at_once_spoil_nothing(places: Iterator[S3Path]) -> None:
    root = next(places)
    with RUN.session(root).hold() as one, RUN.session(root).hold() as other:
        for part in one.missing():
            first, second = (one, other) if part.index % 2 else (other, one)
            first.commit(RUN.builder(part))
            second.commit(RUN.builder(part))
        assert one.is_complete
        assert other.is_complete
        assert one.failures == other.failures == list(RUN.failures)
        for session in (one, other):
            session.write_failures()
    check_store_of(RUN, root)


def test_two_writers_cannot_undo_the_rows_of_each_other(finished: S3Path) -> None:
    """Both replace a part that they have read as it was at first, as refresh=true does."""
    path = finished / layout.PARTS / layout.part_name(1)
    with RUN.session(finished).hold() as one, RUN.session(finished).hold() as other:
        part = RUN.as_run().parts()[1]
        etag, rows = one.etag(part), one.read_part(part)
        for values in rows.features.values():
            values[0] += 1
        refreshed = PartBuilder(part, RUN.specs)
        refreshed.add(part.start, rows.features, rows.failures, rows.images)
        other.replace(refreshed, etag)
        written = path.read_bytes()
        with pytest.raises(RunError, match=r"part-000001\.h5 was changed by another process"):
            one.replace(RUN.builder(part), etag)
        assert path.read_bytes() == written
        one.replace(refreshed, etag)  # what is there already
        one.replace(RUN.builder(part), one.etag(part))
    check_store_of(RUN, finished)


def test_two_writers_cannot_undo_the_damage_that_each_other_has_recorded(
    finished: S3Path,
) -> None:
    folder = S3Folder(finished)
    first, second, both = (
        DamageRecord(frozenset(names)) for names in (["a.h5"], ["b.h5"], ["a.h5", "b.h5"])
    )
    none = DamageRecord.read(finished)
    first.write(folder, none)
    for stale in (second, both):
        with pytest.raises(RunError, match=r"damaged\.json was changed by another process"):
            stale.write(folder, none)
    first.write(folder, none)  # what is there already
    read = DamageRecord.read(finished)
    both.write(folder, read)
    with pytest.raises(RunError, match=r"damaged\.json was changed by another process"):
        DamageRecord().write(folder, read)
    assert DamageRecord.read(finished).files == {"a.h5", "b.h5"}
    DamageRecord().write(folder, DamageRecord.read(finished))
    emptied = DamageRecord.read(finished)
    assert emptied.content, "a DELETE could follow a record of another process"
    first.write(folder, emptied)
    DamageRecord().write(folder, emptied)  # of a driver that has seen no damage
    assert DamageRecord.read(finished).files == {"a.h5"}


def test_two_writers_repair_a_store_at_once(finished: S3Path) -> None:
    for index in (0, 2):
        part = finished / layout.PARTS / layout.part_name(index)
        s3_client.write(part.bucket, part.key, part.read_bytes()[: 1000 * index] or b"no part")
    with RUN.session(finished).hold() as one, RUN.session(finished).hold() as other:
        lost = [part for part in RUN.as_run().parts() if part.index in (0, 2)]
        assert one.lost_rows() == other.lost_rows() != []
        for part, session in zip(lost, (one, other), strict=True):
            session.replace(RUN.builder(part), session.etag(part))
        for part, session in zip(lost, (other, one), strict=True):
            session.replace(RUN.builder(part), session.etag(part))
    assert not DamageRecord.read(finished).is_due
    check_store_of(RUN, finished)


def meanwhile(s3_requests: S3Requests, condition: str, other: Callable[[], object]) -> None:
    """Let another process act just before the next conditional write of a manifest."""
    request = s3_requests.answer

    def overtaken(operation: str, **parameters: Any) -> dict[str, Any]:
        if condition in parameters and parameters["Key"].endswith(f"/{layout.MANIFEST}"):
            s3_requests.answer = request
            other()
        return request(operation, **parameters)

    s3_requests.answer = overtaken


@pytest.mark.slow
def test_two_that_begin_at_once_are_one_run_or_one_of_them_is_reported(
    places: Iterator[S3Path], s3_requests: S3Requests
) -> None:
    root = next(places)
    meanwhile(s3_requests, "IfNoneMatch", lambda: RUN.write(root))
    finish(RUN, root)
    check_store_of(RUN, root)
    root = next(places)
    other = RUN.changed(precision="bf16")
    meanwhile(s3_requests, "IfNoneMatch", lambda: other.write(root))
    with pytest.raises(StoreError, match=r"(created|written) by another process"):
        finish(RUN, root)
    check_store_of(other, root)


def test_a_part_that_the_store_does_not_have_moves_when_a_repair_is_asked_for(
    finished: S3Path,
) -> None:
    """Another process may have added a run whose parts this one does not know."""
    part = finished / layout.PARTS / layout.part_name(99)
    data = (finished / layout.PARTS / layout.part_name(1)).read_bytes()
    for content in (data, b"another"):
        s3_client.write(part.bucket, part.key, content)
        finish(RUN, finished)
        assert part.read_bytes() == content
        report = check_store(finished)
        assert [damage.path for damage in report.damages] == [part]
        repair_files(report)
        assert check_store(finished).damages == []
    aside = [finished / f"{part.name}{ending}" for ending in (".damaged", ".2.damaged")]
    assert [path.read_bytes() for path in aside] == [data, b"another"]
    check_store_of(RUN, finished)


@pytest.mark.parametrize("condition", ["IfNoneMatch", "IfMatch"])
def test_a_server_that_ignores_a_condition_is_refused(
    places: Iterator[S3Path], s3_requests: S3Requests, condition: str
) -> None:
    request = s3_requests.answer

    def careless(operation: str, **parameters: Any) -> dict[str, Any]:
        parameters.pop(condition, None)
        return request(operation, **parameters)

    s3_requests.answer = careless
    root = next(places)
    with pytest.raises(StoreError, match=f"ignores {condition} of a PUT"):
        finish(RUN, root)
    assert not list(root.objects())


@pytest.mark.slow
def test_layers_are_added_when_the_answer_to_the_change_is_lost(
    finished: S3Path, s3_requests: S3Requests
) -> None:
    """botocore repeats such a request, and the server refuses the second one."""
    request, lost = s3_requests.answer, []

    def unheard(operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "put_object" and "featx.json" in parameters["Key"]:
            lost.append(request(operation, **parameters))
        return request(operation, **parameters)

    s3_requests.answer = unheard
    added = make_added(RUN, {"late": (7,)})
    finish(added, finished)
    assert len(lost) == 1
    assert FeatureStore(finished)["late"][:].tobytes() == added.features["late"].tobytes()
    assert check_store(finished).complete


@pytest.mark.slow
def test_a_server_that_asks_for_patience_is_asked_again(
    s3_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = place(f"s3://{bucket}/run")
    puts: list[str] = []
    slept: list[float] = []

    def two_of_three(method: str, path: str) -> Fault | None:
        puts.extend([path] if method == "PUT" else [])
        is_refused = method == "PUT" and len(puts) % 3
        return error(409, "ConditionalRequestConflict") if is_refused else None

    with faulty_proxy(s3_server, two_of_three) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3_client.client.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", slept.append)
            finish(RUN, root)
        check_store_of(RUN, root)
    assert len(puts) >= 3 * 9
    assert len(slept) == 2 * len(puts) / 3


@pytest.mark.slow
def test_overwrite_waits_until_nobody_writes(
    finished: S3Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Heartbeat(S3Folder(finished), "driver"):
        [record] = read_heartbeats(finished)
        assert record.is_alive
        with (
            pytest.raises(StoreLockedError, match=r"written by driver .*Stop it"),
            RUN.session(finished).hold(overwrite=True),
        ):
            pass
        with caplog.at_level(logging.WARNING), RUN.session(finished).hold():
            pass
        assert "is also being written by driver" in caplog.text
    assert not read_heartbeats(finished)
    other = RUN.changed(precision="bf16")
    with other.session(finished).hold(overwrite=True) as session:
        assert len(session.missing()) == 3
    finish(other, finished)
    check_store_of(other, finished)


def test_what_workers_of_a_killed_driver_shared_is_deleted(finished: S3Path) -> None:
    """Actors of Ray share it in the bucket; the folder of a driver that is alive stays."""
    disk, jobs = S3Folder(finished), finished / layout.JOBS
    claim, mine = jobs / "0123abcd" / "claims" / "3", jobs / "mine" / "notes"
    for path in (claim, mine):
        disk.create(path, "1")
    with Heartbeat(disk, "driver"), RUN.session(finished).hold():
        assert claim.exists()
    with RUN.session(finished).hold():
        assert not claim.exists()
        assert mine.exists()


@pytest.mark.slow
def test_layers_are_added_by_one_at_a_time(finished: S3Path, s3_requests: S3Requests) -> None:
    first = make_added(RUN, {"late": (7,)})
    second = make_added(RUN, {"later": (3,)}, seed=2)
    meanwhile(s3_requests, "IfMatch", lambda: finish(first, finished))
    with pytest.raises(StoreError, match="was changed by another process"):
        finish(second, finished)
    store = FeatureStore(finished)
    assert store.layers == ("flat", "late", "map")
    assert check_store(finished).complete
    finish(second, finished)
    store = FeatureStore(finished)
    assert store.layers == ("flat", "late", "later", "map")
    assert store["later"][:].tobytes() == second.features["later"].tobytes()
    assert check_store(finished).complete


def test_a_packed_store_that_was_copied_there_resumes(
    places: Iterator[S3Path], tmp_path: Path
) -> None:
    root = next(places)
    upload(RUN.copied(tmp_path / "run", packed=True), str(root))
    with RUN.session(root).hold() as session:
        assert session.is_complete
        assert session.is_packed
    added = make_added(RUN, {"late": (7,)})
    finish(added, root)
    store = FeatureStore(root)
    assert store.complete
    assert store["late"][:].tobytes() == added.features["late"].tobytes()
    assert store["flat"][:].tobytes() == RUN.expected("flat").tobytes()
