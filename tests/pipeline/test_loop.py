"""The loop over parts: one is committed while the next is computed, and nothing of it is lost."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tiny_model import KEYS, extract, run_job

from featx.config import Config
from featx.engine import BatchParallelism
from featx.errors import ConfigError, RunError
from featx.images.decoder_channels import LoaderTimes
from featx.pipeline import Interrupted, Rows, RunObserver, run_parts
from featx.storage import s3_outage
from featx.types import Batch, Part

pytestmark = pytest.mark.usefixtures("in_tmp_path")

DISK: Any = None  # is for profile=true alone
PARTS = [Part(0, 0, 4), Part(1, 4, 8), Part(2, 8, 12)]


class Images:
    """Batches of two rows without images."""

    times = LoaderTimes()
    warnings: ClassVar[dict[str, int]] = {}
    num_decoders = 1

    def start_counting(self) -> None:
        pass

    def batches(self, parts: list[Part], batch_size: int) -> Iterator[tuple[Part, Batch]]:
        for part in parts:
            for start in range(part.start, part.stop, batch_size):
                yield part, Batch(torch.zeros(batch_size), start, batch_size, [])


class NotingSink:
    """Notes what happens when; `commit` and `add` are what these do beside that."""

    num_rows = 12
    num_failed = 0
    seconds: dict[str, float] = {}  # noqa: RUF012 - nobody writes to it

    def __init__(
        self,
        commit: Callable[[int], object] = lambda index: None,
        add: Callable[[int], object] = lambda start: None,
    ) -> None:
        self.committed: list[int] = []
        self.taken: list[int] = []
        self.add = add
        self._commit = commit

    @property
    def num_committed(self) -> int:
        return 4 * len(self.committed)

    def missing(self) -> list[Part]:
        return PARTS

    def compute(self, engine: Any, batch: Batch) -> Rows:
        return Rows({"first": batch.start}, [])

    def begin_part(self, part: Part) -> NotingPart:
        return NotingPart(part, self)

    def commit(self, rows: NotingPart) -> None:
        self._commit(rows.part.index)
        self.committed.append(rows.part.index)


@dataclass
class NotingPart:
    part: Part
    sink: NotingSink

    def add(self, batch: Batch, rows: Rows) -> None:
        self.sink.add(batch.start)
        self.sink.taken.append(rows.features["first"])


def context() -> Any:
    engine = SimpleNamespace(
        compute=SimpleNamespace(batch_size=2), device=torch.device("cpu"), model_seconds=0.0,
        copy_seconds=0.0, own_stream=contextlib.nullcontext,
    )  # fmt: skip
    config = Config()
    return SimpleNamespace(
        engine=engine,
        batch_rows=2,
        loader=Images(),
        config=config,
        parallelism=BatchParallelism(1, 1, False, {}),
        model_s=0.01,
        start_seconds={"trial": 0.5},
    )


def test_the_start_ends_with_the_first_batch() -> None:
    work = NotingSink(lambda index: time.sleep(0.2), lambda start: time.sleep(0.05))
    start = run_parts(context(), work, DISK).start_seconds
    assert list(start) == ["trial", "first batch"]
    assert start["trial"] == 0.5
    assert 0.05 <= start["first batch"] < 0.2


def test_the_next_part_is_computed_meanwhile() -> None:
    computing = threading.Event()
    work = NotingSink(
        lambda index: None if index else _wait(computing),
        lambda start: start >= 4 and computing.set(),  # the first commit continues only now
    )
    run_parts(context(), work, DISK)
    assert work.committed == [0, 1, 2]


def test_parts_are_committed_in_order_and_never_two_at_once() -> None:
    at_work: list[int] = []

    def commit(index: int) -> None:
        assert not at_work
        at_work.append(index)
        time.sleep(0.02)
        at_work.clear()

    work = NotingSink(commit)
    figures = run_parts(context(), work, DISK)
    assert work.committed == [0, 1, 2]
    assert figures.seconds["write"] >= 0.06


def test_a_worker_on_a_disk_that_is_cut_short_commits_the_part_that_is_whole() -> None:
    begun = threading.Event()

    def commit(index: int) -> None:
        begun.set()
        time.sleep(0.5)

    def interrupt_twice(start: int) -> None:
        if start == 4:
            _wait(begun)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    work = NotingSink(commit, interrupt_twice)
    with s3_outage.waiting_limit(), pytest.raises(Interrupted):
        run_parts(context(), work, DISK)
    assert work.committed == [0]


def test_a_commit_that_fails_ends_the_run_before_the_next_part_is_whole() -> None:
    computing, failed = threading.Event(), threading.Event()

    def fail(index: int) -> None:
        _wait(computing)
        failed.set()
        raise RunError("the disk is full")

    def slowly(start: int) -> None:
        if start >= 4:
            computing.set()
            _wait(failed)
            time.sleep(0.05)

    work = NotingSink(fail, slowly)
    with pytest.raises(RunError, match="disk is full"):
        run_parts(context(), work, DISK)
    assert work.taken == [0, 2, 4]


def test_the_last_commit_counts() -> None:
    def fail(index: int) -> None:
        if index == 2:
            raise RunError("the disk is full")

    work = NotingSink(fail)
    with pytest.raises(RunError, match="disk is full"):
        run_parts(context(), work, DISK)
    assert work.committed == [0, 1]


def test_a_part_that_is_whole_is_committed_whatever_ends_the_run() -> None:
    started = threading.Event()

    def commit(index: int) -> None:
        started.set()
        time.sleep(0.1)

    def interrupted(start: int) -> None:
        if start == 4:
            _wait(started)
            os.kill(os.getpid(), signal.SIGTERM)

    work = NotingSink(commit, interrupted)
    with pytest.raises(Interrupted):
        run_parts(context(), work, DISK)
    assert work.committed == [0]
    assert threading.active_count() == 1 or not [
        thread for thread in threading.enumerate() if thread.name.startswith("featx-commit")
    ]


class PartObserver(RunObserver):
    wants_parts = True

    def __init__(self, work: NotingSink) -> None:
        self.output: list[tuple[int, int]] = []
        self._work = work

    def part_committed(self, part: Part, seconds: Mapping[str, float]) -> None:
        self.output.append((part.index, len(self._work.committed)))


def test_observers_are_told_of_committed_parts_only() -> None:
    work = NotingSink(lambda index: time.sleep(0.02))
    observer = PartObserver(work)
    run_parts(context(), work, DISK, observer)
    assert observer.output == [(0, 1), (1, 2), (2, 3)]


def _wait(event: threading.Event) -> None:
    assert event.wait(10), "nothing happened for ten seconds"


# profile=true: a trace of all threads that Perfetto and Chrome can open


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append(event)
    return found


@pytest.mark.slow
def test_the_stages_of_a_run_in_their_threads(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = extract(photos, profile=True, batch_size=1, part_rows=4)
    found = spans(Path("store/trace.json.gz"))
    assert len(found["batch"]) == 8
    assert {"wait for images", "commit a part", "aten::conv2d"} <= set(found)
    threads = {name: {event["tid"] for event in found[name]} for name in ("batch", "commit a part")}
    assert len(threads["batch"]) == 1
    assert not threads["batch"] & threads["commit a part"]
    assert "trace.json.gz opens in https://ui.perfetto.dev" in capsys.readouterr().err
    plain = extract(photos, out="plain", batch_size=1, part_rows=4)
    assert (store["conv"][:] == plain["conv"][:]).all()
    assert not Path("plain/trace.json.gz").exists()


def test_a_run_that_is_too_short_says_so(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extract(photos, profile=True, batch_size=16, part_rows=16)
    assert "no trace was written" in capsys.readouterr().err
    assert not Path("store/trace.json.gz").exists()


def test_a_trace_that_cannot_be_written_costs_no_row(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "gone")
    store = extract(photos, profile=True)
    assert store.complete
    assert "no trace was written: [Errno 2] No such file" in capsys.readouterr().err
    assert not Path("store/trace.json.gz").exists()


def test_statistics_too(photos: Path) -> None:
    assert run_job("stats", **{**KEYS, "data": str(photos), "profile": True}) == 0
    assert spans(Path("store/trace.json.gz"))["batch"]


def test_it_belongs_to_jobs_that_run() -> None:
    with pytest.raises(ConfigError, match="profile has an effect with job=attribute, job=extract"):
        run_job("layers", profile=True)
