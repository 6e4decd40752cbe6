"""Disks that fail, fill up or vanish; writers, readers and packers that meet; clocks that jump."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_python, slow_except, with_path
from interruptions import files_of_at_most, on_commit
from made_store import MadeRun, dataset_digests, make_grown, make_run, temporary_files
from system_calls import Calls, watched

from featx.errors import FeatxError, RunError
from featx.store import FeatureStore, read_manifest
from featx.store.pack import pack
from featx.types import Part

pytestmark = pytest.mark.usefixtures("without_retry_waits")

TESTS = Path(__file__).resolve().parent.parent
ENVIRONMENT = with_path(TESTS)

FIRST = make_run(num_rows=6, part_rows=4, shapes={"flat": (3,)}, failed=[5]).identified()
GROWN = make_grown(FIRST, new_rows=5, part_rows=4, failed=[8])


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: very many stores are made, and each is synced."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def assert_right(run: MadeRun, root: Path, present: int = 0) -> FeatureStore:
    """No row of a store is false, and the first `present` rows are there."""
    store = FeatureStore(root)
    status = store.status
    for name in store.layers:
        expected, found = run.expected(name)[: len(store)], store[name][:]
        there = status != 255
        assert np.array_equal(found[there], expected[there], equal_nan=True)
        assert np.isnan(found[~there]).all()
        assert there[:present].all(), "a committed row is gone"
    return store


def first_run_and_growth(root: Path, streamed: bool = False) -> None:
    """A run, and a second one that adds rows; given again, the one that was interrupted."""
    manifest = read_manifest(root)
    if manifest is None or manifest.num_rows == len(FIRST.listing):
        replace(FIRST, streamed=streamed).finish(root, packed=True)
    replace(GROWN, streamed=streamed).finish(root, grow=True, packed=True)


ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EACCES)


def fail_everywhere(work: Path, lasting: bool, step: int, shift: int, streamed: bool) -> int:
    """Fail call after call of a run that packs and grows; how many failures were met.

    With `streamed`, rows go to the disk as they come, and files can always be deleted.
    """
    spare = ("unlink",) if streamed else ()
    first_run_and_growth(work / "whole")
    expected = dataset_digests(work / "whole" / "features.h5")
    for count, fail_at in enumerate(itertools.count(1, step)):
        error = ERRORS[(count + shift) % len(ERRORS)]
        root = work / "store"
        shutil.rmtree(root, ignore_errors=True)
        committed = Acknowledged()
        with watched(Calls(root, fail_at, error, spare, lasting)) as calls, committed:
            try:
                first_run_and_growth(root, streamed)
            except FeatxError as failure:
                failure.add_note(f"call {fail_at}: {calls.failed}, {calls.seen[-1]}")
                message = str(failure)
            else:
                message = None
        if message is not None:
            assert_clear(message, root, error)
        else:
            assert calls.untouched or calls.failed is not None
        assert not (streamed and lasting) or temporary_files(root) == []
        if committed.rows:
            assert_right(GROWN, root, committed.rows)
        first_run_and_growth(root, streamed)
        assert dataset_digests(root / "features.h5") == expected
        assert temporary_files(root) == []
        if calls.untouched:
            return count
    raise AssertionError("unreachable")


class Acknowledged:
    """Counts the rows, from the first on, whose commit returned."""

    def __init__(self) -> None:
        self.rows = 0

    def __enter__(self) -> Acknowledged:
        self._patch = pytest.MonkeyPatch()

        def acknowledge(part: Part) -> None:
            assert part.start == self.rows
            self.rows = part.stop

        on_commit(self._patch, acknowledge)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def assert_clear(message: str, root: Path, error: int) -> None:
    assert str(root) in message
    assert os.strerror(error) in message
    assert any(
        way in message for way in ("same command", "Raise the limit", "Choose another folder")
    ), message


@pytest.mark.parametrize("lasting", slow_except([False, True], True))
@pytest.mark.parametrize("streamed", slow_except([False, True], True))
def test_whichever_call_fails_the_run_says_so_and_resumes(
    quick: Path, lasting: bool, streamed: bool
) -> None:
    assert fail_everywhere(quick, lasting, 23, 0, streamed) > 8


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "streamed"), [(0, False), (1, False), (2, False), (0, True)])
@pytest.mark.parametrize("lasting", [False, True])
def test_every_single_call_may_fail(quick: Path, lasting: bool, shift: int, streamed: bool) -> None:
    assert fail_everywhere(quick, lasting, 1, shift, streamed) > 150


def test_short_writes_go_unnoticed(quick: Path) -> None:
    first_run_and_growth(quick / "whole")
    spare = ("open", "fsync", "close", "link", "unlink", "replace", "rename", "posix_fallocate",
             "ftruncate", "mkdir")  # fmt: skip
    with watched(Calls(quick / "store", 1, "short", spare, lasting=True)) as calls:
        first_run_and_growth(quick / "store")
    assert calls.failed == "pwrite"
    for name in ("features.h5", "samples.h5", "featx.json"):
        assert (quick / "store" / name).read_bytes() == (quick / "whole" / name).read_bytes()


LARGE = {"num_rows": 64, "part_rows": 8, "shapes": {"flat": (16_384,)}, "failed": [5, 40]}
"""Eight parts of 512 KiB."""


@pytest.mark.parametrize("limit", [100, 3000, 400_000])
def test_files_that_may_not_grow_stop_the_run_with_a_message(tmp_path: Path, limit: int) -> None:
    """SIGXFSZ would end a process; Python ignores it, and so the write fails instead."""
    run = make_run(**LARGE)
    with files_of_at_most(limit), pytest.raises(RunError) as stopped:
        run.finish(tmp_path / "store")
    assert_clear(str(stopped.value), tmp_path / "store", errno.EFBIG)
    assert "Raise the limit (ulimit -f), or copy the store" in str(stopped.value)
    assert temporary_files(tmp_path) == []
    run.finish(tmp_path / "store", packed=True)
    assert assert_right(run, tmp_path / "store").complete


SMALL_DISK = """
import json, subprocess, sys
from pathlib import Path
from featx.errors import RunError, FeatxError
from featx.store.reader import FeatureStore
from made_store import make_run, dataset_digests, pack_alone, temporary_files
place, made = Path(sys.argv[1]), make_run(**json.loads(sys.argv[2]))
disk = place / "disk"
disk.mkdir()

def mount(*options):
    subprocess.run(["mount", *options, str(disk)], check=True, capture_output=True)

def attempt(what):
    try:
        what()
    except RunError as error:
        report.append(str(error))
        assert temporary_files(disk) == []
    else:
        report.append("done")

try:
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
except subprocess.CalledProcessError as error:
    sys.exit(f"NO MOUNT {error.stderr}")
root, report = disk / "store", []
attempt(lambda: made.finish(root))
present = FeatureStore(root).num_rows_present
mount("-o", "remount,size=6m")
attempt(lambda: made.finish(root))
attempt(lambda: pack_alone(root))
parts = len(list((root / "parts").iterdir()))
mount("-o", "remount,size=64m")
attempt(lambda: made.finish(root, packed=True))
whole = made.finish(place / "whole", packed=True)
same = dataset_digests(root / "features.h5") == dataset_digests(whole / "features.h5")
print(json.dumps({"report": report, "present": present, "parts": parts, "same": same}))
"""


def with_mounts(text: str, *arguments: Any) -> dict[str, Any]:
    """What a script says that mounts; in a mount namespace of its own, which vanishes with it."""
    separate = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    done = subprocess.run(
        [*separate, sys.executable, "-c", text, *map(str, arguments)],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False,
    )  # fmt: skip
    if "NO MOUNT" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.slow
def test_a_disk_of_four_mebibytes_fills_up_and_is_made_larger(tmp_path: Path) -> None:
    said = with_mounts(SMALL_DISK, tmp_path, json.dumps(LARGE))
    full, done, not_packed, packed = said["report"]
    for message in (full, not_packed):
        assert "No space left on device" in message
        assert str(tmp_path / "disk" / "store") in message
        assert "the same command" in message
    assert (done, packed) == ("done", "done")
    assert 0 < said["present"] < 64
    assert said["parts"] == 8, "packing that failed took parts with it"
    assert said["same"]


VANISHING = """
import json, subprocess, sys
from pathlib import Path
from featx.errors import FeatxError
from made_store import make_run, dataset_digests
place = Path(sys.argv[1])
made = make_run(num_rows=29, part_rows=8, failed=[2, 17, 20], damaged=[5, 21])
real, seen = place / "real", place / "seen"
real.mkdir()
seen.mkdir()

def mount():
    subprocess.run(["mount", "--bind", str(real), str(seen)], check=True, capture_output=True)

try:
    mount()
except subprocess.CalledProcessError as error:
    sys.exit(f"NO MOUNT {error.stderr}")
message = None
try:
    session = made.session(seen / "store")
    with session.hold():
        session.commit(made.builder(session.missing()[0]))
        subprocess.run(["umount", "-l", str(seen)], check=True)
        session.commit(made.builder(session.missing()[0]))
except FeatxError as error:
    message = str(error)
stray = [str(path) for path in seen.rglob("*")]
mount()
with made.session(seen / "store").hold() as session:
    missing = [part.index for part in session.missing()]
made.finish(seen / "store", packed=True)
whole = made.finish(place / "whole", packed=True)
same = dataset_digests(seen / "store" / "features.h5") == dataset_digests(whole / "features.h5")
print(json.dumps({"message": message, "stray": stray, "missing": missing, "same": same}))
"""


def test_a_mount_that_vanishes_in_the_middle_stops_the_run(tmp_path: Path) -> None:
    said = with_mounts(VANISHING, tmp_path)
    assert "No such file or directory" in said["message"]
    assert "When the disk works again, give the same command again" in said["message"]
    assert said["stray"] == [], "rows were written where the mount had been"
    assert said["missing"] == [1, 2, 3]
    assert said["same"]


def test_a_folder_that_is_moved_away_stops_the_run_which_resumes_where_it_is(
    tmp_path: Path,
) -> None:
    run = make_run(num_rows=29, part_rows=8, failed=[2, 17, 20], damaged=[5, 21])
    with run.session(tmp_path / "store").hold() as session:
        session.commit(run.builder(session.missing()[0]))
        (tmp_path / "store").rename(tmp_path / "moved")
        builder = run.builder(session.missing()[0])
        with pytest.raises(RunError, match=r"No such file or directory.*same command"):
            session.commit(builder)
    assert not (tmp_path / "store").exists()
    run.finish(tmp_path / "moved", packed=True)
    assert assert_right(run, tmp_path / "moved").complete


def test_without_hard_links_runs_end_as_with_them(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_run_and_growth(quick / "whole")

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    root = quick / "store"
    FIRST.finish(root)
    (root / "parts" / "part-000001.h5").write_bytes(b"spoilt")
    first_run_and_growth(root)
    assert (root / "features.h5").read_bytes() == (quick / "whole" / "features.h5").read_bytes()
    assert temporary_files(quick) == []


RNG = random.Random(0)
CLOCKS: dict[str, Callable[[], float]] = {
    "stands still": lambda: 1_700_000_000.0,
    "jumps": lambda: RNG.choice([0.0, 1.0, 1e9, 4e9]),
}


@pytest.mark.slow
@pytest.mark.parametrize("clock", CLOCKS)
def test_a_clock_that_jumps_confuses_nothing(
    quick: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    first_run_and_growth(quick / "whole")
    root, now = quick / "store", CLOCKS[clock]
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", now)
        patch.setattr(time, "time_ns", lambda: int(now() * 1e9))
        patch.setattr(time, "monotonic_ns", lambda: int(now() * 1e9))
        for content in (b"one", b"two", b"three"):
            FIRST.finish(root)
            (root / "parts" / "part-000000.h5").write_bytes(content)
        first_run_and_growth(root)
    assert (root / "features.h5").read_bytes() == (quick / "whole" / "features.h5").read_bytes()


WRITER = """
import fcntl, sys
from pathlib import Path
from featx.errors import FeatxError, StoreLockedError
from made_store import make_run
import featx.storage.durability
featx.storage.durability.RETRY_WAITS_S = ()
if sys.argv[1] == "no locks":
    fcntl.flock = lambda *_: None
made = make_run(num_rows=13, part_rows=2, failed=[2, 7])
print("ready", flush=True)
for line in sys.stdin:
    try:
        made.finish(Path(line.strip()), packed=True)
    except StoreLockedError:
        print("locked", flush=True)
    except FeatxError as error:
        print("failed", str(error).replace("\\n", " "), flush=True)
    else:
        print("done", flush=True)
"""


def race(work: Path, locks: str, rounds: int) -> list[list[str]]:
    """Two processes begin and write the same store at the same moment, again and again."""
    run = make_run(num_rows=13, part_rows=2, failed=[2, 7])
    expected = dataset_digests(run.finish(work / "whole", packed=True) / "features.h5")
    command = [sys.executable, "-c", WRITER, locks]
    outcomes = []
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=ENVIRONMENT,
                )
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for number in range(rounds):
            root = work / str(number)
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write(f"{root}\n")
                writer.stdin.flush()
            outcome = [writer.stdout.readline().strip() for writer in writers if writer.stdout]
            outcomes.append(outcome)
            assert_right(run, root)
            run.finish(root, packed=True)
            assert dataset_digests(root / "features.h5") == expected
            assert assert_right(run, root).complete
            assert temporary_files(root) == []
            shutil.rmtree(root)
    return outcomes


def test_of_two_writers_exactly_one_is_let_in(quick: Path) -> None:
    outcomes = race(quick, "locks", rounds=6)
    for outcome in outcomes:
        assert "done" in outcome
        assert set(outcome) <= {"done", "locked"}
    assert any("locked" in outcome for outcome in outcomes), "they never met"


@pytest.mark.slow
def test_where_locks_do_nothing_two_writers_lose_and_falsify_no_row(quick: Path) -> None:
    for outcome in race(quick, "no locks", rounds=60):
        for word in outcome:
            assert word == "done" or "same command" in word or "featx.open" in word, word


READER = '''
import sys
from pathlib import Path
import h5py
import numpy as np
import featx
from made_store import make_grown, make_run
root, stop = Path(sys.argv[1]), Path(sys.argv[2])
first = make_run(num_rows=21, part_rows=2, failed=[5])
grown = make_grown(first.identified(), new_rows=9, part_rows=2, failed=[23])
reads, before, kept = 0, 0, featx.open(root)

def check(store):
    status = store.status
    there = status != 255
    for name in store.layers:
        found, expected = store[name][:], grown.expected(name)[: len(store)]
        assert np.array_equal(found[there], expected[there], equal_nan=True), f"{name} is false"
    return int(there.sum())

def check_or_open_again(store):
    """A store opened before it was packed and then grown is refused, and says what to do."""
    try:
        return check(store), store
    except featx.errors.StoreError as error:
        assert "Open it again" in str(error), error
        store = featx.open(root)
        return check(store), store

print("ready", flush=True)
while not stop.exists():
    now, _ = check_or_open_again(featx.open(root))
    assert now >= before, f"{before} rows were there, now {now}"
    before = now
    _, kept = check_or_open_again(kept)
    if reads % 5 == 0:
        kept.refresh()
    reads += 1
print(reads, before, flush=True)
'''


@pytest.mark.slow
def test_a_reader_during_writing_never_fails_and_never_reads_a_false_value(quick: Path) -> None:
    first = make_run(num_rows=21, part_rows=2, failed=[5]).identified()
    grown = make_grown(first, new_rows=9, part_rows=2, failed=[23])
    for number in range(12):
        root, stop = quick / f"store{number}", quick / f"stop{number}"
        first.finish(root, at_most=1)
        command = [sys.executable, "-c", READER, str(root), str(stop)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        ) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            while not (root / "features.h5").exists():
                first.finish(root, at_most=1)
                if not part_is_missing(first, root):
                    first.finish(root, packed=True)
            while part_is_missing(grown, root):
                grown.finish(root, grow=True, at_most=1)
            grown.finish(root, grow=True, packed=True)
            stop.touch()
            said, errors = reader.communicate(timeout=60)
        assert errors == "", errors[-2000:]
        reads, present = map(int, said.split())
        assert reads > 3
        assert present >= 21


def part_is_missing(run: MadeRun, root: Path) -> bool:
    with run.session(root, grow=True).hold() as session:
        return bool(session.missing())


PACKING = """
import sys
from pathlib import Path
from featx.store.pack import pack
from made_store import make_run
made, root = make_run(num_rows=77, part_rows=4, failed=[2, 17, 70]), Path(sys.argv[1])
with made.session(root).hold() as session:
    for part in session.missing():
        session.commit(made.builder(part))
    print("packing", flush=True)
    pack(root)
    session.finish_packing()
"""


def kill_while_packing(work: Path, wait_s: float, overwrite: bool) -> None:
    """A run is killed while it packs, and a new command comes at once."""
    run = make_run(num_rows=77, part_rows=4, failed=[2, 17, 70])
    root = work / "store"
    with subprocess.Popen(
        [sys.executable, "-c", PACKING, str(root)], stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"packing\n"
        time.sleep(wait_s)
        killed.send_signal(signal.SIGKILL)
    if overwrite:
        run = replace(run, features={name: -rows for name, rows in run.features.items()})
    with run.session(root).hold(overwrite) as session:
        for part in session.missing():
            session.commit(run.builder(part))
        if not session.is_packed:
            pack(root)
            session.finish_packing()
    assert assert_right(run, root).complete
    whole = run.finish(work / "whole", packed=True)
    assert dataset_digests(root / "features.h5") == dataset_digests(whole / "features.h5")
    assert not (root / "parts").exists()
    assert temporary_files(root) == []
    shutil.rmtree(root)
    shutil.rmtree(whole)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_moment_of_packing_spoils_no_later_run(quick: Path, overwrite: bool) -> None:
    rng = random.Random(0)
    for _ in range(15):
        kill_while_packing(quick, rng.uniform(0, 0.1), overwrite)


def test_a_packed_file_of_another_run_costs_no_part(quick: Path) -> None:
    """An orphan of an earlier run may give its features.h5 the name after this run has begun."""
    other = FIRST.changed(model="other").finish(quick / "other", packed=True)
    root = quick / "store"
    with FIRST.session(root).hold() as session:
        for part in session.missing():
            session.commit(FIRST.builder(part))
        shutil.copy(other / "features.h5", root / "features.h5")
        with contextlib.suppress(FeatxError):
            pack(root)
            session.finish_packing()
    with FIRST.session(root).hold() as session:
        assert session.missing() == [], "committed rows are gone"


FAILING_READ = """
import errno, io, os, sys
from pathlib import Path
import featx.store.hdf5_files as files
from featx.errors import StoreError
from made_store import make_run

class Failing(io.FileIO):
    def readinto(self, buffer):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

made, root = make_run(), Path(sys.argv[1])
made.finish(root)
files.ErrorRecordingFile.__bases__ = (Failing,)
try:
    made.finish(root)
except StoreError as error:
    print(error)
    sys.exit(7)
"""


def test_a_disk_that_cannot_be_read_ends_the_process_with_a_message_not_a_signal(
    tmp_path: Path,
) -> None:
    done = run_python("-c", FAILING_READ, tmp_path / "store", path=[TESTS], code=7)
    assert "Input/output error" in done.stdout


def test_a_part_that_goes_between_the_look_and_the_open_is_read_from_the_packed_file(
    quick: Path, on_open: list[Callable[[str], None]]
) -> None:
    root = FIRST.finish(quick / "store")
    store = FeatureStore(root)

    def packed_meanwhile(path: str) -> None:
        if "/parts/" in path:
            on_open.clear()
            FIRST.finish(root, packed=True)

    on_open.append(packed_meanwhile)
    assert np.array_equal(store["flat"][:], FIRST.expected("flat"), equal_nan=True)
    assert not on_open, "no part was opened"
