"""Notes of what is being decoded: they outlive a crash, and nothing else is taken for them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import with_path
from hypothesis import given
from hypothesis import strategies as st

from featx.images import CrashList
from featx.images.crash_journal import InFlightJournal, in_flight_keys


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def keys_in_flight(folder: Path) -> set[bytes]:
    with CrashList(folder).in_flight() as keys:
        return keys


def crashed(folder: Path, *keys: bytes) -> None:
    """A process whose threads are decoding these images when it is killed."""
    program = (
        "import os, signal, sys, threading\n"
        "from pathlib import Path\n"
        "from featx.images.crash_journal import CrashList\n"
        "keys = [os.fsencode(key) for key in sys.argv[2:]]\n"
        "ready = threading.Barrier(len(keys) + 1)\n"
        "def decode(journal, key):\n"
        "    with journal.recording(b'another that is done'): pass\n"
        "    with journal.recording(key): ready.wait(), threading.Event().wait()\n"
        "with CrashList(Path(sys.argv[1])).journal() as journal:\n"
        "    for key in keys: threading.Thread(target=decode, args=(journal, key)).start()\n"
        "    ready.wait()\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder, *map(os.fsdecode, keys)], env=with_path()
    )
    assert done.returncode == -signal.SIGSEGV


def test_what_was_being_decoded_is_known_after_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    keys = {b"cat/a b.jpg", "häm\udcff.png".encode("utf-8", "surrogateescape"), b"k" * 1022}
    crashed(folder, *keys)
    with pytest.raises(ZeroDivisionError), CrashList(folder).in_flight():
        raise ZeroDivisionError  # it is not known yet what they are
    assert keys_in_flight(folder) == keys
    assert files(folder) == []
    assert keys_in_flight(folder) == set()


def test_the_journal_of_a_living_process_is_kept(tmp_path: Path) -> None:
    with CrashList(tmp_path).journal() as journal:
        assert journal is not None
        with journal.recording(b"a"):
            assert in_flight_keys(next(tmp_path.iterdir())) == {b"a"}
            assert keys_in_flight(tmp_path) == set()
            assert len(files(tmp_path)) == 1
    assert files(tmp_path) == []


def test_folders_made_for_the_journal_are_removed_with_it(tmp_path: Path) -> None:
    crash_list = CrashList(tmp_path / "runs" / "store")
    with crash_list.journal():
        assert (tmp_path / "runs" / "store").is_dir()
    assert files(tmp_path) == []
    with crash_list.journal():
        (tmp_path / "runs" / "mine").touch()
    assert files(tmp_path / "runs") == ["mine"]


def test_a_folder_that_cannot_be_had_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    crash_list = CrashList(tmp_path / "file" / "store")
    with crash_list.journal() as journal:
        assert journal is None
    crash_list.add(b"a")
    assert b"a" in crash_list
    with CrashList(None).journal() as journal:
        assert journal is None
    with CrashList(None).in_flight() as keys:
        assert keys == set()


def test_a_full_disk_has_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is reserved: a write into a mapped file without any would be SIGBUS."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with CrashList(tmp_path).journal():
        [path] = tmp_path.iterdir()
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    monkeypatch.setattr(os, "posix_fallocate", full)
    with CrashList(tmp_path / "new").journal() as journal:
        assert journal is None
    assert files(tmp_path) == []


def test_more_threads_than_slots_and_keys_longer_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featx.images.crash_journal._NUM_SLOTS", 3)
    journal = InFlightJournal(tmp_path / "journal")
    barrier = threading.Barrier(6)

    def decode(number: int) -> int:
        with journal.recording(b"long" * 2000 if number == 0 else b"%d" % number):
            barrier.wait(10)
            found = len(in_flight_keys(tmp_path / "journal"))
            barrier.wait(10)
            return found

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(decode, range(6))) == [3] * 6
    journal.close()
    with journal.recording(b"late"):  # a thread that was left behind
        assert files(tmp_path) == []


@pytest.mark.slow
@given(content=st.binary(max_size=9000))
def test_any_bytes_can_be_read_as_a_journal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "journal"
    path.write_bytes(content)
    assert all(0 < len(key) <= 1022 for key in in_flight_keys(path))


def test_what_is_dangerous_is_remembered(tmp_path: Path) -> None:
    crash_list = CrashList(tmp_path)
    keys = [b"a.gif", b"\xff/\xfe.gif", "ü.gif".encode()]
    for key in [*keys, *keys]:
        crash_list.add(key)
    again = CrashList(tmp_path)
    assert all(key in again for key in keys)
    assert b"b.gif" not in again
    assert files(tmp_path) == [".crash-list"]
    for damage in (b"", b"{", b"[1]", b"3", b"\xff"):
        (tmp_path / ".crash-list").write_bytes(damage)
        assert keys[0] not in CrashList(tmp_path)


def test_each_thread_has_its_own_entry_of_the_journal(tmp_path: Path) -> None:
    """Many threads, many images: at every moment each is recorded once, in the end none."""
    journal = InFlightJournal(tmp_path / "journal")
    keys = [b"%05d" % number for number in range(60)]

    def decode(key: bytes) -> bool:
        with journal.recording(key):
            return key in in_flight_keys(tmp_path / "journal")

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(decode, keys))
        assert in_flight_keys(tmp_path / "journal") == set()
    journal.close()
