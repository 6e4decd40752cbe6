"""Power loss at any moment, in a model that drops any subset of what was not synced.

Whole runs into a store are recorded, system call by system call. After each prefix of them the
machine loses power: the disk keeps what was synced, and of the rest whatever it likes. In each such
state what was acknowledged must be there, nothing may be false, and the same command must finish
with the datasets of a run that was never interrupted.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_store import MadeRun, dataset_digests, make_run
from system_calls import DiskModel, File, Op, Recording, Tree

from featx.errors import FeatxError, StoreError
from featx.storage import TEMPORARY_PREFIX, AtomicFolder
from featx.storage.durability import sync_folder, write_all
from featx.store import (
    FeatureStore,
    check_store,
    listing_identity,
    repair_files,
    write_listing,
)
from featx.store.pack import pack

pytestmark = pytest.mark.usefixtures("small_reserve")

STORE = "runs/store"


@dataclass(frozen=True)
class Command:
    """One command as it would be given: a run, and how it meets the store that is there."""

    run: MadeRun
    grow: bool = False
    overwrite: bool = False
    repair: bool = False

    def give(self, root: Path, acknowledge: Callable[..., None] = lambda *_: None) -> None:
        """Carry it out, and tell what was promised on the way."""
        run = self.run
        session = run.session(root, self.grow)
        if self.repair and root.exists():
            repair_files(check_store(root))
        with session.hold(self.overwrite):
            acknowledge("started")
            run.compute_lost(session)
            for part in session.missing():
                session.commit(run.part_of(session, part, 1))
                acknowledge("part", part.start, part.stop)
            if session.is_complete and not session.is_packed:
                pack(root)
                acknowledge("whole")
                session.finish_packing()
            acknowledge("whole")


@dataclass(frozen=True)
class Scenario:
    """A store as it was made by some commands, and the command during which the power goes.

    Attributes:
        earlier: the commands before; all of it is durable.
        command: the one that is recorded.
        spoil: done to the store before it.
        lost: the rows that `spoil` costs.
    """

    command: Command
    earlier: tuple[Command, ...] = ()
    spoil: Callable[[Path], None] = lambda _: None
    lost: tuple[int, ...] = ()

    def prepare(self, root: Path) -> None:
        for command in self.earlier:
            command.give(root)
        self.spoil(root)

    def values(self, commands: Sequence[Command]) -> dict[str, np.ndarray]:
        """Layer -> the rows that commands make; the first that makes a row decides."""
        found: dict[str, np.ndarray] = {}
        for command in commands:
            for name in command.run.features:
                rows, known = command.run.expected(name), found.get(name)
                found[name] = rows if known is None else np.concatenate([known, rows[len(known) :]])
        return found


SMALL = make_run(num_rows=7, part_rows=2, shapes={"flat": (2,), "map": (2, 1, 2)}, failed=[3])
GROWN = make_run(num_rows=11, part_rows=2, shapes={"flat": (2,), "map": (2, 1, 2)}, failed=[3, 8])


def identified(run: MadeRun) -> MadeRun:
    """The listing in the fingerprint, as real runs have it."""
    return run.changed(listing=listing_identity(run.listing))


def first_rows(run: MadeRun, num_rows: int) -> MadeRun:
    return replace(
        run,
        listing=run.listing.head(num_rows),
        features={name: rows[:num_rows] for name, rows in run.features.items()},
        failures=tuple(failure for failure in run.failures if failure.row < num_rows),
    )


def only(run: MadeRun, name: str) -> MadeRun:
    """One layer of a run, as a command asks for it."""
    specs = tuple(spec for spec in run.specs if spec.name == name)
    return replace(run, specs=specs, features={name: run.features[name]}).changed(layers=[name])


def flip_a_bit(path: Path, name: str, row: int) -> None:
    with h5py.File(path) as file:
        dataset = file[name]
        info = dataset.id.get_chunk_info(row // dataset.chunks[0])
    data = bytearray(path.read_bytes())
    data[info.byte_offset] ^= 4
    path.write_bytes(data)


SMALL, GROWN = identified(SMALL), identified(GROWN)
BEFORE_GROWING = identified(first_rows(GROWN, 6))
OTHER_IMAGES = replace(SMALL, features={name: -rows for name, rows in SMALL.features.items()})
SCENARIOS = {
    "a run from nothing": Scenario(Command(SMALL)),
    "a run of streamed parts": Scenario(Command(replace(SMALL, streamed=True))),
    "rows added": Scenario(Command(GROWN, grow=True), (Command(BEFORE_GROWING),)),
    "a layer added": Scenario(Command(only(SMALL, "map")), (Command(only(SMALL, "flat")),)),
    "overwritten with other settings": Scenario(
        Command(SMALL.changed(model="other"), overwrite=True), (Command(SMALL),)
    ),
    "overwritten by other images": Scenario(
        Command(OTHER_IMAGES, overwrite=True), (Command(SMALL),)
    ),
    "a packed store repaired": Scenario(
        Command(SMALL, repair=True),
        (Command(SMALL),),
        lambda root: flip_a_bit(root / "features.h5", "features/flat", 4),
        lost=(4, 5),
    ),
}


@dataclass
class Promises:
    """What was promised up to a moment: which rows of which layers are there."""

    started: bool = False
    whole: bool = False
    rows: set[int] = field(default_factory=set)

    def add(self, what: str, *numbers: int) -> None:
        self.started = True
        self.whole = self.whole or what == "whole"
        if what == "part":
            self.rows |= set(range(*numbers))


class Checker:
    """Looks at states of the disk after a crash, each one once."""

    def __init__(self, scenario: Scenario, work: Path) -> None:
        self.scenario = scenario
        self.num_states = 0
        self._work = work
        self._seen: set[Any] = set()
        final = work / "final"
        scenario.prepare(final)
        scenario.command.give(final)
        self._final = dataset_digests(final / "features.h5")
        everything = (*scenario.earlier, scenario.command)
        self._new = scenario.values(
            [scenario.command] if scenario.command.overwrite else everything
        )
        self._old = scenario.values(scenario.earlier)

    def check(self, tree: Tree, promises: Promises) -> None:
        state = frozenset(
            (name, b"" if TEMPORARY_PREFIX in name or name.endswith(".lock") else data)
            for name, data in tree.items()
        )
        key = state, promises.started, promises.whole, frozenset(promises.rows)
        if key in self._seen:
            return
        self._seen.add(key)
        self.num_states += 1
        base = self._work / "crashed"
        materialise(tree, base)
        root = base / STORE
        self._check_readable(root, promises)
        command = self.scenario.command
        replace(command, overwrite=command.overwrite and not promises.started).give(root)
        assert dataset_digests(root / "features.h5") == self._final, "the run ends differently"

    def _check_readable(self, root: Path, promises: Promises) -> None:
        promised = promises.started or bool(self.scenario.earlier)
        if self.scenario.command.overwrite and not promises.started:
            promised = False
        try:
            # Reading a damaged chunk is an error until it is repaired, so it is read unchecked.
            store = FeatureStore(root, verify=False if self.scenario.lost else "chunks")
        except StoreError as error:
            if promised:
                raise AssertionError("what was promised cannot be opened") from error
            return
        status = store.status
        for name in store.layers:
            values = store[name][:]
            absent = np.isnan(values).reshape(len(values), -1).all(1)
            new = same_rows(values, self._new[name])
            allowed = absent | new
            if name in self._old and not (self.scenario.command.overwrite and promises.started):
                allowed |= same_rows(values, self._old[name])
            allowed[[row for row in self.scenario.lost if row < len(allowed)]] = True
            assert allowed.all(), f"{name}: false values in rows {np.flatnonzero(~allowed)}"
            for row in self._promised_rows(name, promises):
                assert new[row], f"{name}: row {row} was committed and is gone"
                assert status[row] != 255, f"row {row} was committed and has no status"
        if promises.whole:
            assert set(store.layers) == set(self._new)
            assert store.complete

    def _promised_rows(self, name: str, promises: Promises) -> set[int]:
        command = self.scenario.command
        rows: set[int] = set()
        if not command.overwrite:
            rows |= set(range(len(self._old.get(name, ())))) - set(self.scenario.lost)
        if name in command.run.features:
            rows |= promises.rows
            if promises.whole:
                rows |= set(range(len(self._new[name])))
        return rows


def same_rows(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """(N,) bool: which rows are those expected; a row beyond them is not."""
    same = np.zeros(len(values), dtype=bool)
    common = min(len(values), len(expected))
    left, right = values[:common], expected[:common]
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    same[:common] = equal.reshape(common, -1).all(1)
    return same


def materialise(tree: Tree, base: Path) -> None:
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    for name, data in tree.items():  # a folder stands before what is in it
        if data is None:
            (base / name).mkdir()
        else:
            (base / name).write_bytes(data)


def crash_states(model: DiskModel, rng: random.Random, most: int) -> Iterator[Tree]:
    """What may be there after a crash now: all of it while that is little, else at random.

    Where all is tried, the data of all unsynced files share one fate; at random each has its own.
    """
    count = 0
    for fate in (all_there, none_there, zeros, torn(rng)):
        taken: list[int] = []
        while taken is not None and count < most:
            choose = Choices(taken)
            yield model.tree(choose, fate)
            taken = choose.next()  # type: ignore[assignment]
            count += 1
    if count >= most:
        for _ in range(most):
            yield model.tree(rng.choice, lambda file: rng.choice(FATES)(rng)(file))


class Choices:
    """Makes choices in the order of a list; `next` gives the list that follows it."""

    def __init__(self, taken: Sequence[int]) -> None:
        self._taken = list(taken)
        self._sizes: list[int] = []

    def __call__(self, options: Sequence[Any]) -> Any:
        at = len(self._sizes)
        self._sizes.append(len(options))
        if at == len(self._taken):
            self._taken.append(0)
        return options[self._taken[at]]

    def next(self) -> list[int] | None:
        taken = self._taken[: len(self._sizes)]
        while taken and taken[-1] + 1 == self._sizes[len(taken) - 1]:
            taken.pop()
        return [*taken[:-1], taken[-1] + 1] if taken else None


def all_there(file: File) -> bytes:
    return file.latest


def none_there(file: File) -> bytes:
    return file.durable


def zeros(file: File) -> bytes:
    return file.durable.ljust(len(file.latest), b"\0")


SECTOR = 512


def torn(rng: random.Random) -> Callable[[File], bytes]:
    """All up to some sector is there, nothing after it."""

    def data(file: File) -> bytes:
        cut = SECTOR * rng.randrange(len(file.latest) // SECTOR + 1)
        return file.latest[:cut] + zeros(file)[cut : len(file.latest)]

    return data


def scattered(rng: random.Random) -> Callable[[File], bytes]:
    """Any sectors are there, the others are not."""

    def data(file: File) -> bytes:
        before = zeros(file)
        sectors = [
            rng.choice((file.latest, before))[at : at + SECTOR]
            for at in range(0, len(file.latest), SECTOR)
        ]
        return b"".join(sectors)

    return data


FATES: list[Callable[[random.Random], Callable[[File], bytes]]] = [
    lambda _: all_there,
    lambda _: none_there,
    lambda _: zeros,
    torn,
    scattered,
]


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of stores are made, and each is synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def record(scenario: Scenario, base: Path) -> tuple[DiskModel, list[Op]]:
    """The disk before the scenario's command, and all that the command does to it."""
    root = base / STORE
    base.mkdir(exist_ok=True)
    scenario.prepare(root)
    before = DiskModel(base)
    with Recording(base) as recording:
        scenario.command.give(root, recording.acknowledge)
    return before, recording.ops


def lose_power_everywhere(
    scenario: Scenario,
    work: Path,
    most: int,
    seed: int = 0,
    is_left_out: Callable[[Op], bool] = lambda op: False,
) -> int:
    """Try crash states after every operation of a scenario; how many different ones there were.

    A write into a file under a temporary name changes nothing that anybody reads: it is passed over
    where few states are tried.

    Args:
        scenario: the commands.
        work: an empty folder.
        most: maximum number of states after each operation.
        seed: of their choice.
        is_left_out: whether the run is taken for one without this operation.
    """
    model, ops = record(scenario, work / "recorded")
    ops = [op for op in ops if not is_left_out(op)]
    checker, promises, rng = Checker(scenario, work), Promises(), random.Random(seed)
    for number, op in enumerate(ops):
        model.apply(op)
        if op[0] == "ack":
            promises.add(*op[1:])
        if most < MANY and op[0] in ("write", "size", "grow") and TEMPORARY_PREFIX in op[1]:
            continue
        try:
            for tree in crash_states(model, rng, most):
                checker.check(tree, promises)
        except Exception as error:
            last = [str(one)[:150] for one in ops[max(0, number - 3) : number + 1]]
            error.add_note(f"after operation {number}; the last were {last}")
            raise
    return checker.num_states


MANY = 64


@pytest.fixture
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model copies a file for every write into it."""
    monkeypatch.setattr("featx.store.pack.HEADROOM_BYTES", 1 << 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_crash_state_of_very_many_loses_or_falsifies_a_row(name: str) -> None:
    with quick_folder() as work:
        assert lose_power_everywhere(SCENARIOS[name], work, most=MANY, seed=1) > 30


@pytest.fixture
def streamed_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings go straight to the disk, however small they are."""
    streamed = functools.partial(write_listing, streamed_bytes=0)
    for module in ("session", "committed_parts"):
        monkeypatch.setattr(f"featx.store.{module}.write_listing", streamed)


@pytest.mark.slow
@pytest.mark.usefixtures("streamed_listing")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_crash_state_with_a_streamed_listing_loses_or_falsifies_a_row(name: str) -> None:
    with quick_folder() as work:
        assert lose_power_everywhere(SCENARIOS[name], work, most=4, seed=2) > 20


NAMING = ("link", "rename", "unlink", "mkdir")


def newest(history: Sequence[Any]) -> Any:
    return history[-1]


def durable(history: Sequence[Any]) -> Any:
    return history[0]


def gone(history: Sequence[Any]) -> Any:
    """What was deleted is deleted, what is new is lost."""
    return None if None in history else history[0]


def kill_then_lose_power(scenario: Scenario, work: Path) -> int:
    """Kill the command after each change of a name, resume it, and lose the power then.

    What the killed process left behind is there for the next one to see, but not durable.
    """
    before, ops = record(scenario, work / "recorded")
    checker = Checker(scenario, work)
    for killed_at in [at for at, op in enumerate(ops, 1) if op[0] in NAMING]:
        model, promises = copy.deepcopy(before), Promises()
        for op in ops[:killed_at]:
            model.apply(op)
            if op[0] == "ack":
                promises.add(*op[1:])
        base = work / "killed"
        materialise(model.tree(newest, all_there), base)
        command = scenario.command
        with Recording(base) as recording:
            replace(command, overwrite=command.overwrite and not promises.started).give(
                base / STORE, recording.acknowledge
            )
        for op in recording.ops:
            model.apply(op)
            if op[0] == "ack":
                promises.add(*op[1:])
            if op[0] in ("ack", "unlink") and TEMPORARY_PREFIX not in op[1]:
                try:
                    for choose in (durable, gone):
                        checker.check(model.tree(choose, none_there), promises)
                except Exception as error:
                    last = [str(one)[:150] for one in ops[max(0, killed_at - 3) : killed_at]]
                    error.add_note(f"killed after {last}, then at {str(op)[:150]}")
                    raise
    return checker.num_states


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_and_then_a_power_loss_lose_nothing(name: str) -> None:
    with quick_folder() as work:
        assert kill_then_lose_power(SCENARIOS[name], work) > 5


FOUND = (AssertionError, FeatxError, OSError, RuntimeError)
"""What a state that breaks a promise shows itself by: a check of ours, or a file that is broken."""


SYNCS: dict[str, Callable[[str], bool]] = {
    "folder": lambda path: TEMPORARY_PREFIX not in path,
    "part": lambda path: TEMPORARY_PREFIX in path and "features.h5" not in path,
    "packed file": lambda path: TEMPORARY_PREFIX in path and "features.h5" in path,
}
"""What is synced -> whether a path is one of these."""


@pytest.mark.slow
@pytest.mark.parametrize("synced", SYNCS)
def test_the_model_finds_what_a_missing_sync_loses(synced: str) -> None:
    """Else the tests above would prove nothing."""
    recorded: list[Op] = []

    def is_left_out(op: Op) -> bool:
        left_out = op[0] == "sync" and SYNCS[synced](op[1])
        recorded.extend([op] * left_out)
        return left_out

    with quick_folder() as work, pytest.raises(FOUND):
        lose_power_everywhere(SCENARIOS["a run from nothing"], work, 2, is_left_out=is_left_out)
    assert recorded


@pytest.mark.slow
def test_the_model_finds_what_a_name_given_too_early_falsifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name comes first, the sync after it: what a crash leaves under the name is half."""

    def hasty(disk: AtomicFolder, path: Path, data: bytes | memoryview) -> bool:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
        os.close(descriptor)
        sync_folder(path.parent)
        return True

    monkeypatch.setattr(AtomicFolder, "publish", hasty)
    with quick_folder() as work, pytest.raises(FOUND):
        lose_power_everywhere(SCENARIOS["a run from nothing"], work, most=4)
