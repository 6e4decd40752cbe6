"""Worker pool: claims, reports and losses, with workers that are only numbers."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from object_server import MemoryServer, place
from stub_worker import StubTask, stub_spec

from featx.config import Config
from featx.errors import RunError, StoreError, TooManyFailuresError
from featx.pipeline import Interrupted, RunOutcome
from featx.pipeline.executors import EXECUTORS
from featx.pipeline.executors.job_folder import (
    SPEC,
    PartClaims,
    WorkerError,
    WorkerReport,
    dump_spec,
    inherited_parts,
    read_spec,
    ready_path,
    result_path,
)
from featx.pipeline.executors.worker import run_worker
from featx.pipeline.executors.worker_pool import MAX_DEATHS, WorkerPool
from featx.storage import AtomicFolder, s3_client, s3_outage
from featx.types import Failure, Part, Status

PARTS = [Part(index, 4 * index, 4 * index + 4) for index in range(5)]


class FakeSession:
    """Write session in memory; `found` are parts that a worker has committed."""

    num_rows = 20
    lock = 0

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = AtomicFolder(root)
        self.found: dict[int, list[Failure]] = {}
        self.committed_parts: list[int] = []
        self.failures: list[Failure] = []

    @property
    def num_committed(self) -> int:
        return 4 * len(self.committed_parts)

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    def record_commit(self, part: Part, failures: Sequence[Failure]) -> None:
        self.committed_parts.append(part.index)
        self.failures += failures

    def committed_by_others(self, parts: Sequence[Part]) -> Iterator[tuple[Part, list[Failure]]]:
        for part in parts:
            if part.index in self.found:
                yield part, self.found[part.index]


class FakeTask(StubTask):
    """Part task whose committed parts are those that the session has found."""

    session: Any

    def uncommitted(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if part.index not in self.session.found]


class FakePool(WorkerPool):
    """Executor without processes: each event is a function that a look at the workers calls.

    Attributes:
        events: what happens, one event per look; it returns workers that have ended.
        started: numbers of all workers.
        graces: seconds that workers had to end.
    """

    poll_s = 0.0

    def __init__(
        self, root: Path, max_failures: float = 0.5, num_workers: int = 2, num_committed: int = 0
    ) -> None:
        self.store = FakeSession(root)
        self.store.committed_parts = [0] * num_committed
        task = FakeTask(SimpleNamespace(), root, root)  # type: ignore[arg-type]
        object.__setattr__(task, "session", self.store)
        spec = stub_spec(root, PARTS, Config(max_failures=max_failures), task)
        made: Any = self.store
        super().__init__(spec, made, root / "jobs", num_workers)
        self.events: deque[Callable[[], Mapping[int, str] | None]] = deque()
        self.started: list[int] = []
        self.graces: list[float] = []

    def name(self, number: int) -> str:
        return f"worker {number}"

    def start(self, numbers: Sequence[int]) -> None:
        self.started += numbers

    def ended(self) -> Mapping[int, str]:
        return self.events.popleft()() or {}

    def end_workers(self, grace_s: float) -> None:
        self.graces.append(grace_s)

    def claims(self, number: int) -> list[int]:
        """Parts that a worker claims until none is left."""
        claims, found = PartClaims(self.spec, number), []
        while claims.has_unclaimed():
            found += [part.index for part in claims.parts()]
        return found

    def claim(self, number: int) -> int:
        return next(PartClaims(self.spec, number).parts()).index

    def report(self, number: int, **given: Any) -> None:
        self.is_ready(number)
        result_path(self.spec, number).write_text(WorkerReport(**given).to_json())

    def all_report(self, **given: Any) -> Mapping[int, str]:
        for number in self.workers:
            self.report(number, **given)
        return dict.fromkeys(self.workers, "has ended")

    def is_ready(self, number: int) -> None:
        ready_path(self.spec, number).write_text(WorkerReport().to_json())


@pytest.fixture
def pool(tmp_path: Path) -> FakePool:
    return FakePool(tmp_path)


@pytest.mark.parametrize("num_committed", [0, 1])
def test_rows_that_are_there_are_not_to_be_overwritten_for_more_workers(
    tmp_path: Path, num_committed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    FakePool(tmp_path, num_workers=6, num_committed=num_committed)
    shown = capsys.readouterr().err
    assert "20 rows in 5 parts: 1 worker has no work." in shown
    assert ("overwrite=true" in shown) == (num_committed == 0)


def run(pool: FakePool, *events: Callable[[], Mapping[int, str] | None]) -> RunOutcome:
    """After these events all is committed, and all workers report."""

    def finish() -> Mapping[int, str]:
        pool.store.found |= {part.index: [] for part in PARTS}
        return pool.all_report()

    pool.events += [*events, finish]
    return pool.run()


def test_a_run_ends_with_its_last_part_and_leaves_nothing_behind(
    pool: FakePool, tmp_path: Path
) -> None:
    outcome = run(pool)
    assert sorted(pool.store.committed_parts) == [0, 1, 2, 3, 4]
    assert pool.started == [0, 1]
    assert pool.graces == [0.0]
    assert outcome.metrics.bytes_read == 0
    assert list(tmp_path.iterdir()) == []


def test_each_part_is_claimed_once_and_neighbours_stay_together(pool: FakePool) -> None:
    def look() -> None:
        first, second = PartClaims(pool.spec, 0), PartClaims(pool.spec, 1)
        assert next(first.parts()).index == 0
        assert next(second.parts()).index == 2
        assert next(first.parts()).index == 1
        assert pool.claims(1) == [3, 4]
        assert pool.claims(0) == []

    run(pool, look)


def test_the_last_parts_are_not_claimed_ahead(pool: FakePool) -> None:
    def look() -> None:
        assert [part.index for part in PartClaims(pool.spec, 0).parts()] == [0, 1, 2]

    run(pool, look)


def test_a_committed_part_is_not_claimed(pool: FakePool) -> None:
    def look() -> None:
        pool.store.found[0] = []
        assert pool.claims(0) == [1, 2, 3, 4]

    run(pool, look)


def test_the_parts_of_lost_workers_are_inherited_by_their_replacements(
    pool: FakePool, capfd: pytest.CaptureFixture[str]
) -> None:
    def lose_both() -> Mapping[int, str]:
        assert (pool.claim(1), pool.claim(0), pool.claim(0)) == (2, 0, 1)
        pool.store.found[0] = []
        pool.is_ready(0)
        return {0: "was killed", 1: "was killed"}

    def look() -> None:
        assert pool.started == [0, 1, 2, 3]
        missing = PARTS[1:]
        inherited = [
            [part.index for part in inherited_parts(pool.spec, number, missing)]
            for number in (2, 3)
        ]
        assert inherited == [[1], [2]]

    outcome = run(pool, lose_both, look)
    output = capfd.readouterr().err
    assert "worker 0 was killed in part 1 (rows 4 to 7); another one takes its place" in output
    assert "worker 1 was killed before it had a part; another one takes its place" in output
    assert outcome.metrics.bytes_read is None, "what the lost ones read is not known"
    assert outcome.metrics.bottleneck is None
    assert set(outcome.metrics.seconds.values()) == {None}


@pytest.mark.parametrize("owner", ["", "0"])
def test_a_part_whose_owner_is_gone_is_computed_by_another_in_the_end(
    pool: FakePool, owner: str
) -> None:
    """It died before it wrote its number; or it was given up, was alive and has claimed more."""

    def lose() -> Mapping[int, str]:
        return {0: "was killed"}

    def look() -> None:
        assert inherited_parts(pool.spec, 2, PARTS) == []
        (pool.spec.folder / "claims" / "4").write_text(owner)

    def end(*numbers: int) -> Callable[[], Mapping[int, str]]:
        def event() -> Mapping[int, str]:
            for number in numbers:
                pool.store.found |= {index: [] for index in pool.claims(number)}
                pool.report(number)
            return dict.fromkeys(numbers, "has ended")

        return event

    pool.events += [lose, look, end(2), end(1), end(3)]
    pool.run()
    assert pool.started == [0, 1, 2, 3]
    assert sorted(pool.store.committed_parts) == [0, 1, 2, 3, 4]


def test_three_losses_at_one_part_end_the_run_and_others_do_not_count(pool: FakePool) -> None:
    def lose(number: int, commits: int | None = None) -> Callable[[], Mapping[int, str]]:
        def event() -> Mapping[int, str]:
            if commits is not None:
                pool.store.found[commits] = []
            if number == 0:
                assert (pool.claim(0), pool.claim(0)) == (0, 1)
            pool.is_ready(number)
            return {number: "was killed"}

        return event

    pool.events += [lose(0), lose(2, commits=0), lose(4), lose(6)]
    with pytest.raises(RunError) as failed:
        pool.run()
    assert str(failed.value).startswith(
        f"worker 6 was killed in part 1 (rows 4 to 7), the {MAX_DEATHS}rd worker that did."
    )
    assert pool.graces == [5.0, 0.0]


def test_workers_that_end_between_two_parts_are_replaced_without_a_limit(pool: FakePool) -> None:
    """As Slurm preempts tasks again and again."""
    preempt = partial(pool.all_report, num_parts=1, ended_by="SIGTERM")
    run(pool, *[preempt] * 4)
    assert pool.started == list(range(10))


def test_workers_that_leave_parts_out_end_the_run(pool: FakePool) -> None:
    """It never waits for ever, even if somebody deletes what is committed."""
    pool.events += [pool.all_report] * 10
    with pytest.raises(RunError, match="left parts out"):
        pool.run()


@pytest.mark.parametrize(
    ("kind", "expected"), [("StoreError", StoreError), ("ValueError", RunError)]
)
def test_an_error_keeps_its_class_and_names_worker_and_part(
    pool: FakePool, kind: str, expected: type[Exception]
) -> None:
    def fail() -> Mapping[int, str]:
        pool.report(1, error=WorkerError(kind, "what", "its traceback", "part 3 (rows 12 to 15)"))
        return {1: "has ended"}

    pool.events.append(fail)
    with pytest.raises(expected, match=r"worker 1, part 3 \(rows 12 to 15\): .*what") as failed:
        pool.run()
    assert failed.value.__notes__ == ["its traceback"]


def test_parts_that_were_found_first_count_for_failures_but_not_for_the_speed(
    pool: FakePool,
) -> None:
    failure = Failure(1, b"1", Status.EMPTY, "ImageFault", "empty")
    rates: list[float] = []

    def find(index: int, *failures: Failure) -> Callable[[], None]:
        def event() -> None:
            if pool.store.committed_parts:
                rates.append(pool.progress.now().images_per_second)
            pool.store.found[index] = list(failures)

        return event

    run(pool, find(0, failure), find(1), find(2))
    assert pool.store.num_failed == 1
    assert rates[0] == 0 < rates[1]


@pytest.mark.parametrize(
    ("ready_at", "found", "expected"),
    [
        (20.0, {25.0: 1, 30.0: 5}, 20 / 10),
        # As with Slurm, where the driver sees parts and not their workers.
        (None, {30.0: 2, 40.0: 4, 50.0: 5}, 12 / 20),
        (None, {30.0: 5}, 20 / 20),  # since they were distributed: less than the speed
    ],
)
def test_rows_count_that_were_computed_while_the_clock_ran(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ready_at: float | None,
    found: dict[float, int],
    expected: float,
) -> None:
    """`found` is the number of parts that are there at a time."""
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pool = FakePool(tmp_path)

    def look(at: float, num_parts: int) -> Callable[[], Mapping[int, str]]:
        def event() -> Mapping[int, str]:
            now[0] = at
            pool.store.found |= {part.index: [] for part in PARTS[:num_parts]}
            if num_parts == 0:
                pool.is_ready(0)
            if num_parts < len(PARTS):
                return {}
            return pool.all_report(seconds={"model": 5.0}, underflow_rows={"flat": 1})

        return event

    if ready_at is not None:
        pool.events.append(look(ready_at, 0))
    pool.events += [look(*each) for each in found.items()]
    outcome = pool.run()
    assert outcome.metrics.images_per_second == expected
    assert outcome.metrics.bottleneck is not None
    assert outcome.metrics.seconds["model"] == 10.0
    assert outcome.underflow_rows == {"flat": 2}


def test_too_many_failures_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part takes 100 s, so that minutes of work are left."""
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pool = FakePool(tmp_path, max_failures=0)
    failure = Failure(0, b"0", Status.EMPTY, "ImageFault", "empty")

    def commit() -> None:
        now[0] += 100
        pool.store.found.update({0: [failure]})

    pool.events += [lambda: pool.is_ready(0), lambda: None, commit]
    with pytest.raises(TooManyFailuresError):
        pool.run()
    assert pool.store.committed_parts == [0], "the part is recorded before the run ends"


def test_a_signal_ends_the_run_and_records_what_is_committed(pool: FakePool) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pool.store.found[0] = []

    pool.events.append(interrupt)
    with pytest.raises(Interrupted):
        pool.run()
    assert pool.store.committed_parts == [0]
    assert pool.graces == [5.0, 0.0]


def test_executors_register_themselves() -> None:
    assert EXECUTORS.names() == ("local", "ray", "slurm")
    assert EXECUTORS.get("ray").extra == "ray"
    assert EXECUTORS.get("local").extra is None
    assert all(member.help.endswith(".") for member in EXECUTORS)


def test_a_worker_takes_the_current_folder_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths lead to the same files where `ray start` was given in another folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / SPEC).write_bytes(dump_spec(SimpleNamespace()))  # type: ignore[arg-type]
    os.chdir(tmp_path)
    read_spec(tmp_path)
    assert Path.cwd() == folder
    os.chdir(tmp_path)
    folder.rmdir()
    read_spec(tmp_path)  # on a machine that lacks the folder
    assert Path.cwd() == tmp_path


def test_a_worker_that_begins_while_the_object_store_is_away_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a task that Slurm starts during an outage."""
    exceptions = pytest.importorskip("botocore.exceptions")
    answers: list[dict[str, Any]] = []

    def list_objects_v2(**parameters: Any) -> dict[str, Any]:
        answers.append({})
        if len(answers) <= s3_client.ATTEMPTS:
            raise exceptions.EndpointConnectionError(endpoint_url="http://nowhere")
        return answers[-1]

    client = SimpleNamespace(list_objects_v2=list_objects_v2)
    monkeypatch.setattr(s3_client, "client", lambda *_: client)
    monkeypatch.setattr(s3_client, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(s3_outage, "CURRENT", s3_outage.Outage())
    root = place("s3://bucket/run")
    spec = stub_spec(root, (), Config(), StubTask(SimpleNamespace(), root, tmp_path))  # type: ignore[arg-type]
    object.__setattr__(spec, "folder", tmp_path)
    report = run_worker(spec, 0, "cuda")
    assert report.error is None, report.error
    assert len(answers) > s3_client.ATTEMPTS


def test_a_worker_that_outlives_its_run_leaves_nothing_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an actor that is alive on a node that Ray has lost."""
    monkeypatch.setattr(s3_client, "request", MemoryServer())
    root = place("s3://bucket/run")
    spec = stub_spec(root, (), Config(), StubTask(SimpleNamespace(), root, tmp_path))  # type: ignore[arg-type]
    object.__setattr__(spec, "folder", root / "jobs" / "0123abcd")
    assert run_worker(spec, 0, "cuda").error is None
    assert not list(root.objects())
