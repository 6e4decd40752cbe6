"""Every system call of a commit: their order, and what is left when one of them fails."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_store import temporary_files
from processes import killed_at_sync
from system_calls import Calls, watched

from featx.errors import FeatxError, RunError, StoreError, StoreLockedError
from featx.storage import AtomicFolder, ReservedFile, exclusive_lock
from featx.storage.durability import with_retries

pytestmark = pytest.mark.usefixtures("without_retry_waits")

CONTENT = bytes(range(256)) * 40


def test_publish_writes_syncs_links_and_syncs_the_folder_in_this_order(tmp_path: Path) -> None:
    target = tmp_path / "part.h5"
    with watched(Calls(tmp_path)) as calls:
        assert AtomicFolder(tmp_path).publish(target, CONTENT)
    assert target.read_bytes() == CONTENT
    names = [name for name, _ in calls.seen]
    assert names == [
        "open", "pwrite", "fsync", "close", "link", "unlink", "open", "fsync", "close"
    ]  # fmt: skip
    temporary = calls.seen[0][1]
    assert temporary != str(target)
    assert {subject for _, subject in calls.seen[:6]} == {temporary}
    assert {subject for _, subject in calls.seen[6:]} == {str(tmp_path)}


def test_publish_keeps_what_is_there_and_syncs_its_name(tmp_path: Path) -> None:
    """The first writer may have died between its link and its sync."""
    target = tmp_path / "part.h5"
    target.write_bytes(b"first")
    with watched(Calls(tmp_path)) as calls:
        assert not AtomicFolder(tmp_path).publish(target, CONTENT)
    assert target.read_bytes() == b"first"
    assert ("fsync", str(tmp_path)) in calls.seen
    assert temporary_files(tmp_path) == []


def test_replace_syncs_before_it_renames(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    target.write_bytes(b"old")
    with watched(Calls(tmp_path)) as calls:
        AtomicFolder(tmp_path).replace(target, b"new")
    assert target.read_bytes() == b"new"
    names = [name for name, _ in calls.seen]
    assert names.index("fsync") < names.index("close") < names.index("replace")
    assert calls.seen[-2] == ("fsync", str(tmp_path))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_publish_whatever_call_fails_leaves_all_or_nothing(tmp_path: Path, error: int) -> None:
    ended: list[str | None] = []
    messages: list[str] = []
    for fail_at in range(1, 40):
        root = tmp_path / str(fail_at)
        root.mkdir()
        target = root / "part.h5"
        disk = AtomicFolder(root)
        # An unlink that fails leaves its file behind whatever we do; it has a test of its own.
        with watched(Calls(root, fail_at, error, spare=("unlink",))) as calls:
            try:
                disk.publish(target, CONTENT)
            except RunError as failure:
                ended.append(calls.failed)
                messages.append(str(failure))
            else:
                assert target.read_bytes() == CONTENT, f"{calls.failed} failed unnoticed"
                assert calls.untouched
        assert not target.exists() or target.read_bytes() == CONTENT
        assert temporary_files(root) == []
        disk.publish(target, CONTENT)
        assert target.read_bytes() == CONTENT
        if calls.untouched:
            break
    else:
        pytest.fail("no run ended untouched")
    assert ended == ["open", "pwrite", "fsync", "close", "link", "open", "fsync", "close"]
    for message in messages:
        assert "part.h5" in message
        assert os.strerror(error) in message
        assert "Nothing committed is lost" in message
        assert ("Free some space" in message) == (error == errno.ENOSPC)


def test_unlink_that_fails_is_an_error_and_the_file_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "part.h5"
    fail_at = 6
    with (
        watched(Calls(tmp_path, fail_at, errno.EIO)) as calls,
        pytest.raises(RunError, match="Input/output error"),
    ):
        AtomicFolder(tmp_path).publish(target, CONTENT)
    assert calls.failed == "unlink"
    assert target.read_bytes() == CONTENT


def test_an_interrupt_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            AtomicFolder(tmp_path).publish(tmp_path / "part.h5", CONTENT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_a_rename_commits_and_never_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_link(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    target = tmp_path / "part.h5"
    assert AtomicFolder(tmp_path).publish(target, CONTENT)
    assert not AtomicFolder(tmp_path).publish(target, b"second")
    assert target.read_bytes() == CONTENT
    assert temporary_files(tmp_path) == []


def test_a_write_that_writes_nothing_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(RunError, match="No space left"):
        AtomicFolder(tmp_path).publish(tmp_path / "part.h5", CONTENT)


def test_new_folders_are_synced_up_to_the_one_that_was_there(tmp_path: Path) -> None:
    """Else a crash could take a whole store whose files are all synced."""
    deep = tmp_path / "runs" / "textiles" / "resnet18"
    with watched(Calls(tmp_path)) as calls:
        AtomicFolder(deep).make_folder(deep)
    synced = [subject for name, subject in calls.seen if name == "fsync"]
    assert synced == [str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "textiles")]


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot create the folder"):
        AtomicFolder(tmp_path).make_folder(tmp_path / "file" / "store")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(StoreError, match="link is a link to no folder"):
        AtomicFolder(tmp_path).make_folder(tmp_path / "link")


def test_a_folder_on_a_full_disk_is_a_run_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(RunError, match=r"creating .*store failed: No space left.*Free some space"):
        AtomicFolder(tmp_path).make_folder(tmp_path / "store")


def test_a_folder_of_another_user_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(StoreError, match=f"cannot write to {tmp_path}: this user may not"):
        AtomicFolder(tmp_path).make_folder(tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EROFS, "When this user may write there"), (errno.EISDIR, "Move away what has this")],
)
def test_the_remedy_fits_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=remedy):
        AtomicFolder(tmp_path).replace(tmp_path / "result.json", CONTENT)


@pytest.mark.parametrize("method", ["remove", "set_aside"])
def test_a_disk_that_fails_while_clearing_up_is_a_run_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    path = tmp_path / "part.h5"
    path.write_bytes(b"x")

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = AtomicFolder(tmp_path)
    disk.make_folder(tmp_path / "q")
    monkeypatch.setattr(os, "unlink", failing)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(RunError, match="Input/output error"):
        disk.remove(path) if method == "remove" else disk.set_aside(path, tmp_path / "q")


def test_files_set_aside_replace_none_of_those_before(tmp_path: Path) -> None:
    disk, path = AtomicFolder(tmp_path), tmp_path / "part.h5"
    for content in (b"one", b"two", b"three"):
        path.write_bytes(content)
        assert disk.set_aside(path, tmp_path).read_bytes() == content
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {
        "part.h5.damaged": b"one",
        "part.h5.2.damaged": b"two",
        "part.h5.3.damaged": b"three",
    }


class TestReservedFile:
    def test_it_behaves_as_a_file_of_its_logical_size(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
        file = ReservedFile(descriptor, 100)
        assert os.fstat(descriptor).st_size == 100
        assert file.write(b"0123456789") == 10
        assert file.tell() == 10
        assert file.seek(-4, os.SEEK_END) == 6
        assert file.read(100) == b"6789"
        assert file.seek(2) == 2
        assert file.read(3) == b"234"
        assert file.seek(1, os.SEEK_CUR) == 6
        assert file.truncate(8) == 8
        assert file.read(100) == b"67"
        file.finish()
        os.close(descriptor)
        assert (tmp_path / "f").read_bytes() == b"01234567"

    def test_writing_past_the_reservation_is_a_full_disk(self, tmp_path: Path) -> None:
        target = tmp_path / "f"
        with (
            pytest.raises(RunError, match="10 bytes were reserved, 12 are needed"),
            AtomicFolder(tmp_path).reserve_file(target, 10) as file,
        ):
            file.write(bytes(12))
        assert list(tmp_path.iterdir()) == []

    def test_an_error_of_the_block_passes_unchanged(self, tmp_path: Path) -> None:
        """A StoreError is an OSError too, and must not be reported as a disk that fails."""
        with (
            pytest.raises(StoreError, match=r"^of another run$"),
            AtomicFolder(tmp_path).reserve_file(tmp_path / "f", 10),
        ):
            raise StoreError("of another run")
        assert list(tmp_path.iterdir()) == []


HOLD = """
import sys, pathlib
from featx.storage import exclusive_lock
with exclusive_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.kill()


def test_a_held_store_is_refused_and_the_message_names_the_process(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with another_holder(lock) as holder:
        with pytest.raises(StoreLockedError) as refused, exclusive_lock(lock):
            pytest.fail("two hold the lock")
        assert f"pid {holder.pid} on " in str(refused.value)
        assert "choose another out=DIR" in str(refused.value)
        assert json.loads(lock.read_text())["pid"] == holder.pid, "the refused one wrote into it"


def test_a_killed_holder_leaves_the_store_free(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with another_holder(lock) as holder:
        holder.kill()
        holder.wait()
        with exclusive_lock(lock):
            assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_the_lock_is_free_after_an_exception(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), exclusive_lock(tmp_path / ".lock"):
            raise ZeroDivisionError
    with exclusive_lock(tmp_path / ".lock"):
        pass
    assert (tmp_path / ".lock").read_bytes() == b""


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES, "cannot write to {}/.lock: Permission denied"),
        (errno.EROFS, "cannot write to {}/.lock: Read-only file system"),
        (errno.ENOSPC, "creating {}/.lock failed: No space left on device.*Free some space"),
    ],
)
def test_a_folder_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    """As root no folder is read-only, so the system call says it."""

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(FeatxError, match=expected.format(tmp_path)),
        exclusive_lock(tmp_path / ".lock"),
    ):
        pass


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreError, match="cannot be locked"), exclusive_lock(tmp_path / ".lock"):
        pytest.fail("written without a lock")


KILLED = {
    "replace_unlocked": "disk.replace_unlocked(path, b'half')",
    "streamed": "with disk.stream_file(path) as file: file.write(b'half')",
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", KILLED)
def test_what_a_killed_writer_left_goes_and_a_living_one_keeps_its_file(
    tmp_path: Path, how: str
) -> None:
    """Jobs that lock no folder tell the two apart by a lock on the temporary file itself."""
    path, disk = tmp_path / "report [1].html", AtomicFolder(tmp_path)
    code = "from pathlib import Path; from featx.storage.local_folder import AtomicFolder; "
    code += f"path = Path({str(path)!r}); disk = AtomicFolder(path.parent)\n{KILLED[how]}"
    killed_at_sync(code, path.name)
    [dead] = temporary_files(tmp_path)
    other = tmp_path / ".tmp-another.html.1.2"
    other.touch()
    with disk.stream_file(path) as file:
        file.write(b"first")
        assert not dead.exists()
        disk.replace_unlocked(path, b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert temporary_files(tmp_path) == [other]


@pytest.fixture
def one_failed_sync(
    set_retries: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The first sync of a folder fails with EIO; those that follow are listed."""
    set_retries(1)
    synced: list[int] = []
    has_failed: list[int] = []
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if is_folder and not has_failed:
            has_failed.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if is_folder:
            synced.append(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return synced


@pytest.mark.parametrize(
    "call",
    ["publish", "replace", "replace_unlocked", "begin_file", "reserve_file", "stream_file",
     "set_aside", "make_folder", "lock"],
)  # fmt: skip
def test_a_sync_of_a_folder_that_fails_once_is_repeated_and_changes_no_answer(
    tmp_path: Path, one_failed_sync: list[int], call: str
) -> None:
    disk, path = AtomicFolder(tmp_path), tmp_path / "part.h5"
    if call == "set_aside":
        path.write_bytes(b"damaged")
        assert disk.set_aside(path, tmp_path).read_bytes() == b"damaged"
        assert not path.exists()
    elif call == "publish":
        assert disk.publish(path, CONTENT)
    elif call in ("replace", "replace_unlocked"):
        getattr(disk, call)(path, CONTENT)
    elif call == "begin_file":
        file = disk.begin_file(path)
        file.write(CONTENT, 0)
        assert file.finish(lambda: None)
    elif call == "reserve_file":
        with disk.reserve_file(path, len(CONTENT)) as reserved:
            reserved.write(CONTENT)
    elif call == "stream_file":
        with disk.stream_file(path) as stream:
            stream.write(CONTENT)
    elif call == "make_folder":
        disk.make_folder(tmp_path / "made")
        assert (tmp_path / "made").is_dir()
    else:
        with disk.lock(tmp_path / ".lock"):
            pass
    if path.exists():
        assert path.read_bytes() == CONTENT
    assert one_failed_sync
    assert temporary_files(tmp_path) == []


def test_a_forked_process_that_outlives_the_run_does_not_hold_its_lock(tmp_path: Path) -> None:
    """As of the process pool that a data set opens in its first read."""
    lock, (read_end, write_end), (is_running, runs) = tmp_path / ".lock", os.pipe(), os.pipe()
    with exclusive_lock(lock) as descriptor:
        child = os.fork()
        if not child:
            os.close(write_end)
            os.write(runs, b"!")
            os.read(read_end, 1)
            is_closed = f"/proc/self/fd/{descriptor}"
            os._exit(int(os.path.exists(is_closed)))  # noqa: PTH110
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert os.read(is_running, 1) == b"!"  # the kernel may run the child after this process
    with exclusive_lock(lock):
        pass
    for end in (write_end, read_end, is_running, runs):
        os.close(end)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_that_leaves_the_block_takes_the_lock_from_nobody(tmp_path: Path) -> None:
    """Its exception unwinds the block, where the descriptor may be another file of its own."""
    lock, kept = tmp_path / ".lock", tmp_path / "kept"
    parent = os.getpid()
    try:
        with exclusive_lock(lock) as descriptor:
            child = os.fork()
            if not child:
                assert os.open(kept, os.O_RDWR | os.O_CREAT) == descriptor
                raise ZeroDivisionError
            assert os.waitpid(child, 0)[1] == 0
            with pytest.raises(StoreLockedError), exclusive_lock(lock):
                pytest.fail("two hold the lock")
            assert json.loads(lock.read_text())["pid"] == parent
    except ZeroDivisionError:
        try:
            os.write(descriptor, b"still open")
        except OSError:
            os._exit(1)
        os._exit(0)


def test_a_signal_while_hdf5_writes_ends_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h5py writes chunks when it closes a dataset, where it ignores exceptions."""
    path, real, calls, stop_at = tmp_path / "f.h5", os.pwrite, 0, 0

    def pwrite(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    def write(number: int) -> None:
        nonlocal calls, stop_at
        calls, stop_at = 0, number
        with (
            AtomicFolder(tmp_path).reserve_file(path, 1 << 16) as reserved,
            h5py.File(reserved, "w") as file,
        ):
            file.create_dataset("rows", data=np.arange(40), chunks=(10,))

    monkeypatch.setattr(os, "pwrite", pwrite)
    write(0)
    path.unlink()
    for number in range(1, calls + 1):
        with pytest.raises(KeyboardInterrupt):
            write(number)
        assert list(tmp_path.iterdir()) == []


def test_a_signal_while_another_file_is_written_interrupts_at_once(tmp_path: Path) -> None:
    """Only calls by h5py delay it, to whose file the block may write for hours."""
    after = []

    def write_both() -> None:
        with AtomicFolder(tmp_path).reserve_file(tmp_path / "f.h5", 10):
            with_retries(tmp_path / "other", lambda: signal.raise_signal(signal.SIGINT))
            after.append("the block continued")

    with pytest.raises(KeyboardInterrupt):
        write_both()
    assert after == []
    assert list(tmp_path.iterdir()) == []
