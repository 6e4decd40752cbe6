"""A store's life at random: written, killed, damaged, repaired, packed, grown, read all the time.

The model is a table of rows and layers. Whatever happens, a reader gives the model's value, or NaN
where the status is not ok, or an error; only flipped bytes may pass it, and `verify` finds those.
What is committed and not damaged is never lost, and in the end the packed file is that of a store
which nothing ever happened to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from made_store import MadeRun, dataset_digests, joined, make_added, make_grown, make_run

from featx.errors import StoreError, StoreLockedError, StoreMismatchError
from featx.storage import AtomicFolder
from featx.store import (
    FeatureStore,
    Run,
    check_store,
    listing_identity,
    load_manifest,
    missing_parts,
    repair_files,
)
from featx.store.committed_parts import remove_parts
from featx.store.pack import pack
from featx.types import Status, StoreHeader

READING = (StoreError, KeyError, RuntimeError, ValueError)
"""What a reader raises on a damaged file; all but the first are to become the first."""


def cut(path: Path, where: float) -> None:
    os.truncate(path, int(path.stat().st_size * where))


def zero(path: Path, where: float) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, where: float) -> None:
    path.unlink()


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x41
    path.write_bytes(data)


def flip_value(path: Path, where: float) -> None:
    """A bit of a feature, under its old checksum; past HDF5, for readers have the file open."""
    with h5py.File(path, "r") as file:
        dataset = file["features"][next(iter(file["features"]))]
        info = dataset.id.get_chunk_info(int(where * (dataset.id.get_num_chunks() - 1)))
    with path.open("r+b") as raw:
        raw.seek(info.byte_offset + 1)
        raw.write(b"\x41")


DAMAGES: list[Callable[[Path, float], None]] = [cut, zero, delete, flip, flip_value]


class StoreLife(RuleBasedStateMachine):
    """One store, the job that it is at, and what its rows should be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="featx-life-"))
        self.root = self.folder / "store"
        first = make_run(13, 4, {"flat": (3,), "map": (2, 2)}, failed=[2, 9]).identified()
        self.job, self.grow = first, False
        self.jobs = [first]
        self.table = first
        self.started = False
        self.flipped = False
        self.damaged: set[str] = set()
        self.readers: list[FeatureStore] = []

    def teardown(self) -> None:
        self.finish_all()
        if self.started:
            pack(self.root)
            whole = self.folder / "whole"
            for job in self.jobs:
                job.finish(whole, grow=job.listing is not self.jobs[0].listing)
            pack(whole)
            ours, theirs = (dataset_digests(r / "features.h5") for r in (self.root, whole))
            # Of a row that failed in two runs, a packed file that is taken apart knows one reason.
            for found in (ours, theirs):
                for name in ("failures/message", "failures/error"):
                    del found[name]
            assert ours == theirs
        shutil.rmtree(self.folder)

    # -- what the store should be ------------------------------------------------------------

    def holds(self, store: FeatureStore) -> list[str]:
        """In what a reader differs from the model."""
        wrong = []
        num_rows = len(store)
        status = store.status
        if num_rows > len(self.table.listing):
            return ["rows"]
        allowed = self.table.status()[:num_rows]
        if not ((status == allowed) | (status == Status.ABSENT) | (status == 0)).all():
            wrong.append("status")
        if store.keys.tolist() != [os.fsdecode(k) for k in self.table.listing.keys[:num_rows]]:
            wrong.append("keys")
        if store.labels.tolist() != self.table.listing.labels[:num_rows].tolist():
            wrong.append("labels")
        for name in store.layers:
            found, expected = store[name][:], self.table.features[name][:num_rows]
            right = (found == expected).reshape(num_rows, -1).all(1)
            blank = np.isnan(found).reshape(num_rows, -1).all(1) & (status != 0)
            if not (right | blank).all():
                wrong.append(name)
        return wrong

    def forget_flips(self) -> None:
        """A reader that has a file open reads on what was flipped in it."""
        if self.flipped:
            self.readers.clear()
        self.flipped = False

    def committed(self) -> dict[str, bytes]:
        return {
            path.name: path.read_bytes()
            for path in (self.root / "parts").glob("part-*.h5")
            if path.name not in self.damaged
        }

    # -- the writers --------------------------------------------------------------------------

    def work(self, job: MadeRun, at_most: int | None, grow: bool) -> bool:
        """The command, stopped after some parts; False where it was refused as it should be."""
        before = self.committed()
        try:
            with job.session(self.root, grow).hold() as session:
                self.started = True
                job.compute_lost(session)
                for part in session.missing()[:at_most]:
                    session.commit(job.builder(part))
        except StoreMismatchError as error:
            # The packed file of earlier runs is gone, and this is not the command that made it.
            if "is not complete" not in str(error):
                raise
            return False
        if (self.root / "parts").exists():
            now = self.committed()
            lost = {name for name in before if name in now and now[name] != before[name]}
            assert not lost, f"{lost} were changed"
        return True

    @rule(count=st.integers(0, 3))
    def extract(self, count: int) -> None:
        """Some parts; then the process is gone."""
        self.work(self.job, count, self.grow)

    @rule()
    def leave_half_a_file(self) -> None:
        if (self.root / "parts").is_dir():
            (self.root / "parts" / ".tmp-part-000001.h5.7.7").write_bytes(b"half")

    @precondition(lambda self: self.started)
    @rule(keep_parts=st.booleans())
    def pack(self, keep_parts: bool) -> None:
        """Refused as long as rows are missing; killed before the parts go, or not."""
        try:
            pack(self.root)
        except StoreError:
            return
        if not keep_parts:
            remove_parts(AtomicFolder(self.root))

    @precondition(lambda self: self.started)
    @rule()
    def second_writer(self) -> None:
        with (
            contextlib.suppress(StoreMismatchError),
            self.job.session(self.root, self.grow).hold(),
            pytest.raises(StoreLockedError),
            self.job.session(self.root).hold(),
        ):
            pytest.fail("two writers")

    @precondition(lambda self: self.started and (self.root / "featx.json").exists())
    @rule()
    def changed_settings(self) -> None:
        other = self.job.changed(size=[1, 1])
        with pytest.raises(StoreMismatchError), other.session(self.root, True).hold():
            pytest.fail("rows of two models in one store")

    def is_whole(self) -> bool:
        return self.started and not self.damaged and check_store(self.root).complete

    @precondition(lambda self: len(self.jobs) < 4)
    @rule(rows=st.sampled_from([1, 4, 6]), part_rows=st.sampled_from([4, 8]))
    def add_rows(self, rows: int, part_rows: int) -> None:
        if self.is_whole():
            # The command that resumes it must look like the first run's; see test_runs.
            self.table = make_grown(self.table, rows, 4, failed=[len(self.table.listing)])
            self.begin_job(self.table, grow=True)

    @precondition(lambda self: len(self.jobs) < 4)
    @rule()
    def add_layers(self) -> None:
        if self.is_whole():
            name = f"more{len(self.jobs)}"
            added = make_added(self.table, {name: (2,)}, part_rows=4, failed=[2], seed=9)
            self.table = joined(self.table, added)
            self.begin_job(added, grow=False)

    def begin_job(self, job: MadeRun, grow: bool) -> None:
        self.job, self.grow = job, grow
        self.jobs.append(job)
        assert self.work(job, 0, grow)

    # -- harm ---------------------------------------------------------------------------------

    @precondition(lambda self: self.started)
    @rule(
        which=st.integers(0, 50),
        where=st.floats(0, 0.99),
        harm=st.sampled_from(DAMAGES),
    )
    def damage(self, which: int, where: float, harm: Callable[[Path, float], None]) -> None:
        paths = [path for path in sorted(self.root.rglob("*")) if path.is_file()]
        paths = [
            path
            for path in paths
            if path.suffix in (".h5", ".json")
            and path.name != "damaged.json"
            and not path.name.startswith(".")
            and path.name not in self.damaged
        ]
        # One manifest must be left in some file, and one listing.
        if len(paths) < 4 or len(self.damaged) > 1:
            return
        path = paths[which % len(paths)]
        if path.name in ("featx.json", "samples.h5") and self.damaged:
            return
        if harm is flip_value and "features" not in path.name and "part" not in path.name:
            return
        if harm is zero:
            # One that has looked at the file takes the zeros that it finds there for values.
            self.readers.clear()
        harm(path, where)
        self.damaged.add(path.name)
        self.flipped |= harm in (flip, flip_value)

    @precondition(lambda self: self.started and not self.damaged)
    @rule(one=st.integers(0, 9), two=st.integers(0, 9))
    def swap_parts(self, one: int, two: int) -> None:
        parts = sorted((self.root / "parts").glob("part-*.h5"))
        if len(parts) < 3 or parts[one % len(parts)] == parts[two % len(parts)]:
            return
        first, second = parts[one % len(parts)], parts[two % len(parts)]
        a, b = first.read_bytes(), second.read_bytes()
        first.unlink(), second.unlink()
        first.write_bytes(b), second.write_bytes(a)
        self.damaged |= {first.name, second.name}

    @precondition(lambda self: self.started and not self.damaged)
    @rule(which=st.integers(0, 9))
    def foreign_part(self, which: int) -> None:
        parts = sorted((self.root / "parts").glob("part-*.h5"))
        if len(parts) < 3:
            return
        path = parts[which % len(parts)]
        other = make_run(13, 4, {"flat": (3,), "map": (2, 2)}, seed=3).identified()
        other.finish(self.folder / "other")
        path.unlink()
        shutil.copy(self.folder / "other" / "parts" / "part-000001.h5", path)
        self.damaged.add(path.name)

    # -- the checker --------------------------------------------------------------------------

    @precondition(lambda self: self.started)
    @rule()
    def verify(self) -> None:
        report = check_store(self.root)
        named = {damage.path.name for damage in report.damages}
        assert named <= self.damaged, f"{named - self.damaged} are as they were"
        if not self.damaged:
            assert not report.damages

    @precondition(lambda self: self.started)
    @rule(resume=st.booleans())
    def repair(self, resume: bool) -> None:
        before = self.committed()
        repair_files(check_store(self.root))
        now = self.committed()
        # A kill after packing leaves parts whose rows features.h5 has, too.
        if not (self.root / "features.h5").exists() or "features.h5" in self.damaged:
            assert {name: now.get(name) for name in before} == before, "a good part was taken away"
        report = check_store(self.root)
        self.damaged &= {damage.path.name for damage in report.damages}
        self.forget_flips()
        if resume:
            self.finish_all()

    # -- the readers --------------------------------------------------------------------------

    @precondition(lambda self: self.started and len(self.readers) < 3)
    @rule()
    def open_and_keep(self) -> None:
        with contextlib.suppress(*READING):
            self.readers.append(FeatureStore(self.root))

    @invariant()
    def no_reader_is_told_anything_false(self) -> None:
        if not self.started:
            return
        fresh = []
        with contextlib.suppress(*READING):
            fresh = [FeatureStore(self.root)]
        for store in [*self.readers, *fresh]:
            wrong: list[str] = []
            with contextlib.suppress(*READING):
                wrong = self.holds(store)
            if wrong:
                assert self.flipped, f"{wrong} are wrong"
                if store in fresh:
                    assert check_store(self.root).damages, (
                        f"{wrong} are wrong and verify is content"
                    )
        if not fresh:
            assert self.damaged, "a sound store cannot be opened"

    # -- the end ------------------------------------------------------------------------------

    def finish_all(self) -> None:
        """Repair and the commands of all runs again: the store is as if nothing had happened."""
        if not self.started:
            return
        repair_files(check_store(self.root))
        self.damaged = set()
        self.forget_flips()
        for _ in range(len(self.jobs) + 1):
            manifest, _ = load_manifest(self.root)
            assert manifest is not None
            lacking = missing_parts(self.root, manifest)
            for run, _ in lacking:
                specs = tuple(spec for spec in self.table.specs if spec.name in run.names)
                job = replace(self.table, specs=specs, features={
                    spec.name: self.table.features[spec.name] for spec in specs},
                    header=self.header_of(run), part_rows=run.grid.part_rows,
                    failures=self.failures_of(run.names))  # fmt: skip
                with job.session(self.root, True).hold() as session:
                    job.compute_lost(session)
                    for part in session.missing():
                        session.commit(job.builder(part))
        self.work(self.jobs[-1], None, self.grow)
        report = check_store(self.root)
        assert report.complete, report.as_dict()
        assert self.holds(FeatureStore(self.root)) == []

    def header_of(self, run: Run) -> StoreHeader:
        """Of the command that resumes a run: it sees the rows of today."""
        listing = listing_identity(self.table.listing)
        return replace(run.header, fingerprint={**run.header.fingerprint, "listing": listing})

    def failures_of(self, names: frozenset[str]) -> Any:
        jobs = [job for job in self.jobs if names & set(job.features)]
        return {f.row: f for job in reversed(jobs) for f in job.failures}.values()


def live(examples: int, steps: int, derandomize: bool) -> None:
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate],  # shrinking a life takes longer than reading one
        suppress_health_check=list(HealthCheck),
    )
    run_machine(StoreLife, settings=profile)


@pytest.mark.slow
def test_a_short_life() -> None:
    live(examples=12, steps=15, derandomize=True)


@pytest.mark.slow
def test_long_lives() -> None:
    live(examples=60, steps=30, derandomize=False)
