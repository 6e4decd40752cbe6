"""Scheduler: the bookkeeping of parts and workers, with workers that are only names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from featx.config import Config
from featx.errors import RunError, TooManyFailuresError
from featx.pipeline import Interrupted
from featx.pipeline.executors import EXECUTORS
from featx.pipeline.executors.scheduler import MAX_DEATHS, Scheduler
from featx.pipeline.executors.worker_stats import PartResult
from featx.types import Failure, Part, Status

PARTS = [Part(index, 4 * index, 4 * index + 4) for index in range(5)]


class FakeSession:
    """Write session in memory."""

    num_rows = 20
    disk = SimpleNamespace(root=Path("store"))

    def __init__(self) -> None:
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


class FakeExecutor(Scheduler[str]):
    """Executor without processes: each event is a function that it calls in turn.

    Attributes:
        events: what happens, one event per call of `handle_events`.
        ended: workers that were alive when they were ended.
    """

    def __init__(self, session: FakeSession, max_failures: float = 0.5) -> None:
        spec: Any = SimpleNamespace(config=Config(max_failures=max_failures))
        made: Any = session
        super().__init__(spec, made, PARTS, num_workers=2)
        self.told_failures: list[int] = []
        heartbeat: Any = SimpleNamespace(set_failures=self.told_failures.append)
        self.heartbeat = heartbeat
        self.events: deque[Callable[[], object]] = deque()
        self.ended: list[str] | None = None

    def start(self) -> None:
        self.add_worker("a")
        self.add_worker("b")

    def handle_events(self) -> None:
        self.events.popleft()()

    def end_workers(self) -> None:
        self.ended = self.workers

    def give(self, worker: str) -> Part | None:
        part = self.next_part()
        if part is not None:
            self.assign(worker, part)
        return part

    def commit(
        self, part: Part, failures: Sequence[Failure] = (), is_earlier: bool = False
    ) -> None:
        self.part_committed(PartResult(part, failures, {}, 1.0, 0.5), is_earlier)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def pool(session: FakeSession) -> FakeExecutor:
    return FakeExecutor(session)


def test_a_run_ends_with_its_last_part_and_ends_its_workers(
    pool: FakeExecutor, session: FakeSession
) -> None:
    for worker in ("a", "b", "a", "b", "a"):
        pool.events.append(lambda worker=worker: pool.commit(pool.give(worker) or PARTS[0]))
    pool.work()
    assert session.committed_parts == [0, 1, 2, 3, 4]
    assert not pool.is_work_left()
    assert pool.missing() == []
    assert pool.ended == ["a", "b"]
    assert pool.collector.num_committed == 20
    assert pool.collector.has_started


def test_parts_that_were_found_first_count_for_failures_but_not_for_the_speed(
    pool: FakeExecutor,
) -> None:
    failure = Failure(1, b"1", Status.EMPTY, "ImageFault", "empty")
    rates: list[float] = []

    def find() -> None:
        pool.commit(PARTS[0], [failure], is_earlier=True)
        rates.append(pool.progress.now().images_per_second)
        pool.commit(PARTS[1])
        rates.append(pool.progress.now().images_per_second)
        raise RunError("enough")

    pool.events.append(find)
    with pytest.raises(RunError, match="enough"):
        pool.work()
    assert pool.told_failures == [1, 1]
    assert rates[0] == 0 < rates[1]


def test_a_part_belongs_to_its_worker_until_it_is_committed(pool: FakeExecutor) -> None:
    def give_two() -> None:
        pool.give("a")
        pool.give("a")
        assert pool.parts_of("a") == PARTS[:2]
        assert pool.num_queued == 3
        pool.commit(PARTS[0])
        assert pool.parts_of("a") == PARTS[1:2]
        assert pool.missing() == PARTS[1:]

    def end() -> None:
        assert pool.remove_worker("a") == PARTS[1:2]
        assert pool.workers == ["b"]
        raise RunError("enough")

    pool.events += [give_two, end]
    with pytest.raises(RunError, match="enough"):
        pool.work()
    assert pool.ended == ["b"]


def test_parts_of_a_dead_worker_come_next_or_last(pool: FakeExecutor) -> None:
    first, second = pool.next_part(), pool.next_part()
    assert [first, second] == PARTS[:2]
    pool.put_back(PARTS[:2])
    assert pool.next_part() == PARTS[0]
    pool.put_back(PARTS[:1], last=True)
    assert pool.num_queued == 4
    assert [pool.next_part() for _ in range(6)] == [*PARTS[1:], PARTS[0], None]


def test_queued_parts_are_taken_together_without_those_that_are_committed(
    pool: FakeExecutor,
) -> None:
    """As by Slurm, where a task of a dead driver may commit parts of the queue."""

    def look() -> None:
        pool.put_back([PARTS[0]], last=True)
        pool.commit(PARTS[3])  # by a worker that the scheduler does not know
        assert pool.take_queued() == [PARTS[0], PARTS[1], PARTS[2], PARTS[4]]
        assert pool.take_queued() == []
        raise RunError("enough")

    assert pool.next_part() == PARTS[0]
    pool.events.append(look)
    with pytest.raises(RunError, match="enough"):
        pool.work()


def test_deaths_count_by_part(pool: FakeExecutor) -> None:
    assert not pool.has_deaths(PARTS)
    assert pool.count_death(PARTS[:2]) == 1
    assert pool.count_death(PARTS[1:3]) == 2
    assert pool.count_death(PARTS[1:2]) == MAX_DEATHS
    assert pool.count_death(PARTS[3:4]) == 1
    assert [pool.has_deaths([part]) for part in PARTS] == [True, True, True, True, False]


def test_deaths_without_a_part_count_together(pool: FakeExecutor) -> None:
    assert [pool.count_death([]) for _ in range(3)] == [1, 2, 3]
    assert not pool.has_deaths(PARTS)


def test_the_clock_starts_with_the_first_worker_that_is_ready(pool: FakeExecutor) -> None:
    times = []

    def ready() -> None:
        assert not pool.collector.has_started
        pool.worker_ready()
        times.append(pool.collector.started_at)
        pool.worker_ready()
        times.append(pool.collector.started_at)
        raise RunError("enough")

    pool.events.append(ready)
    with pytest.raises(RunError):
        pool.work()
    assert times[0] == times[1] > 0


def test_too_many_failures_end_the_run(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featx.pipeline.row_failures.EARLY_STOP_S", 0.0)
    pool = FakeExecutor(session, max_failures=0)
    failures = [Failure(0, b"0", Status.EMPTY, "ImageFault", "empty")]
    pool.events.append(lambda: pool.commit(PARTS[0], failures))
    with pytest.raises(TooManyFailuresError):
        pool.work()
    assert session.committed_parts == [0], "the part is recorded before the run ends"
    assert pool.ended == ["a", "b"]


def test_a_signal_ends_the_run_after_the_event(pool: FakeExecutor, session: FakeSession) -> None:
    import os
    import signal

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pool.commit(PARTS[0])

    pool.events.append(interrupted)
    with pytest.raises(Interrupted):
        pool.work()
    assert session.committed_parts == [0]
    assert pool.ended == ["a", "b"]


def test_executors_register_themselves() -> None:
    assert EXECUTORS.names() == ("local", "ray", "slurm")
    assert EXECUTORS.get("slurm").extra == "slurm"
    assert EXECUTORS.get("local").extra is None
    assert all(member.help.endswith(".") for member in EXECUTORS)
