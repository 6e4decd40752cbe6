"""Decoders in child processes: whatever happens to one, every other row is what it would be."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image, run_python, with_path
from encoded_images import encode
from processes import ended

from featx.errors import RunError
from featx.images import (
    PREFETCH_BATCHES,
    DecoderPool,
    DecodeSettings,
    ImagePolicy,
    Loader,
    Preprocess,
    row_loader,
)
from featx.images.decoder_channels import fault_bytes
from featx.sources import FolderSource
from featx.sources.views import BoxedSource
from featx.types import Failure, ImageFault, Part, Status

POLICY = ImagePolicy("apply", (255, 255, 255), 10**7)
SIDE = 16
PREPROCESS = Preprocess(None, (SIDE, SIDE), SIDE, "bilinear", (0, 0, 0), (1, 1, 1))  # type: ignore[arg-type]
NUM_ROWS = 96
BAD_ROW = 37


class InParent:
    """The images of a folder, read by the process of the model."""

    def __init__(self, folder: FolderSource) -> None:
        self.listing, self.read = folder.listing, folder.read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for seed in range(NUM_ROWS):
        data = encode(make_image(40 + seed % 7, 30 + seed % 5, seed=seed), "PNG")
        (root / f"{seed:03}.png").write_bytes(data)
    return root


Loaded = tuple[torch.Tensor, "np.ndarray[Any, Any]", list[Failure]]


def make_loader(
    folder: Path, workers: int = 2, timeout_s: float | None = 20, in_parent: bool = False
) -> Loader:
    """A loader of all images, which the decoders read, or the process of the model."""
    files = FolderSource(folder)
    settings = DecodeSettings(PREPROCESS, POLICY, timeout_s=timeout_s, workers=workers)
    return Loader(InParent(files) if in_parent else files, files.listing(), settings)


def load(
    folder: Path,
    workers: int = 2,
    timeout_s: float | None = 20,
    in_parent: bool = False,
    act: Callable[[], None] | None = None,
) -> Loaded:
    """Images, checksums and failures of all rows; `act` is called after the second batch."""
    images, checksums, failures = [], [], []
    with make_loader(folder, workers, timeout_s, in_parent) as loader:
        parts = [Part(0, 0, 40), Part(1, 40, NUM_ROWS)]
        for number, (_, batch) in enumerate(loader.batches(parts, 4)):
            images.append(batch.images[: batch.count].clone())
            checksums.append(batch.checksums)
            failures += batch.failures
            if act is not None and number == 1:
                act()
    return torch.cat(images), np.concatenate(checksums), failures


def assert_equal(found: Loaded, expected: Loaded, bad: int | None = None) -> None:
    """Equal rows and checksums, apart from the images of a bad row."""
    rows = [row for row in range(NUM_ROWS) if row != bad]
    assert torch.equal(found[0][rows], expected[0][rows])
    np.testing.assert_array_equal(found[1], expected[1])
    assert bad is None or not found[0][bad].any()


OTHERS: set[int] = set()
"""Processes that pytest has started for other tests, such as moto's server."""


@pytest.fixture(scope="module", autouse=True)
def _others() -> None:
    OTHERS.update(children(os.getpid()))


def children(parent: int) -> list[int]:
    """Processes that a process has started, as /proc tells; see OTHERS."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, pid = path.read_text().rpartition(")")[2].split()[:2]
            if int(pid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return [pid for pid in found if pid not in OTHERS]


def processes() -> tuple[int, list[int]]:
    """The supervisor of this process's loader, and its decoders."""
    until = time.monotonic() + 10
    while time.monotonic() < until:  # the supervisor may have just started
        for supervisor in children(os.getpid()):
            if decoders := children(supervisor):
                return supervisor, decoders
        time.sleep(0.01)
    raise AssertionError("there is no decoder")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Loaded:
    return load(folder)


@pytest.mark.parametrize(("workers", "in_parent"), [(1, False), (5, False), (2, True)])
def test_any_number_of_decoders_gives_the_same(
    folder: Path, expected: Loaded, workers: int, in_parent: bool
) -> None:
    assert expected[2] == []
    assert len({row.numpy().tobytes() for row in expected[0]}) == NUM_ROWS
    assert_equal(load(folder, workers, in_parent=in_parent), expected)


@pytest.mark.parametrize(
    ("signum", "in_parent"),
    [(signal.SIGKILL, False), (signal.SIGSEGV, True), (signal.SIGSTOP, False)],
)
def test_a_decoder_that_is_ended_or_stopped_costs_no_row(
    folder: Path, expected: Loaded, signum: signal.Signals, in_parent: bool
) -> None:
    found = load(folder, in_parent=in_parent, act=lambda: os.kill(processes()[1][0], signum))
    assert found[2] == []
    assert_equal(found, expected)


@pytest.mark.slow
def test_decoders_that_are_killed_again_and_again_cost_no_row(
    folder: Path, expected: Loaded
) -> None:
    def act() -> None:
        for _ in range(5):
            time.sleep(0.05)
            for pid in processes()[1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    found = load(folder, act=act)
    assert found[2] == []
    assert_equal(found, expected)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_end_of_the_supervisor_ends_the_run(folder: Path, handler: signal.Handlers) -> None:
    """A process may ignore the ends of its children, which then vanish at once."""

    def act() -> None:
        supervisor, decoders = processes()
        os.kill(supervisor, signal.SIGKILL)
        assert all(ended(pid) for pid in decoders)  # by the kernel

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with pytest.raises(RunError, match=r"was killed, by a user or because .* out of memory"):
            load(folder, act=act)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("num_forks", [0, 1, 2])
def test_a_limit_of_processes_is_named(
    monkeypatch: pytest.MonkeyPatch, folder: Path, num_forks: int
) -> None:
    """`num_forks` processes can be forked: none, the supervisor, a decoder."""
    fork, left = os.fork, num_forks

    def limited() -> int:
        nonlocal left
        if not left:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left -= 1
        return fork()

    gc.collect()  # exceptions of other tests hold maps of images
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", limited)
    with pytest.raises(RunError, match=r"can be started: Resource temp.* \(ulimit -u\)"):
        load(folder)
    assert not children(os.getpid())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_a_limit_of_threads_ends_the_decoders(
    monkeypatch: pytest.MonkeyPatch, folder: Path, num_threads: int
) -> None:
    start, left = threading.Thread.start, num_threads

    def limited(self: threading.Thread) -> None:
        nonlocal left
        if self.name == "featx-loader":
            if not left:
                raise RuntimeError("can't start new thread")
            left -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        load(folder, in_parent=True)
    assert not children(os.getpid())


def before_decoding(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    act: Callable[[bool], object],
    name: str = "decode_array",
) -> None:
    """Call `act` in the decoders before each image, with whether it is the bad one."""
    bad = (folder / f"{BAD_ROW:03}.png").read_bytes()
    decode = getattr(row_loader, name)

    def act_and_decode(data: bytes, *rest: Any) -> Any:
        act(data == bad)
        return decode(data, *rest)

    monkeypatch.setattr(row_loader, name, act_and_decode)


def bad_decoder(monkeypatch: pytest.MonkeyPatch, folder: Path, act: Callable[[], object]) -> None:
    """Call `act` in the decoder of one image."""
    before_decoding(monkeypatch, folder, lambda is_bad: act() if is_bad else None)


def kill_self(signum: int) -> None:
    faulthandler.disable()  # that of pytest would print a traceback
    os.kill(os.getpid(), signum)
    time.sleep(60)


@pytest.mark.parametrize(
    ("act", "status", "error", "in_parent"),
    [
        (lambda: kill_self(signal.SIGSEGV), Status.CRASHES_DECODER, "SIGSEGV", True),
        (lambda: kill_self(signal.SIGABRT), Status.CRASHES_DECODER, "SIGABRT", False),
        (lambda: os._exit(3), Status.CRASHES_DECODER, "exit code 3", False),
        (lambda: time.sleep(60), Status.TIMEOUT, "TimeoutError", False),
    ],
)
def test_an_image_that_ends_its_decoder_fails_alone(
    monkeypatch: pytest.MonkeyPatch, folder: Path, expected: Loaded, act: Callable[[], object],
    status: Status, error: str, in_parent: bool,
) -> None:  # fmt: skip
    bad_decoder(monkeypatch, folder, act)
    timeout_s = 0.5 if status == Status.TIMEOUT else 30.0  # a crash takes longer beside others
    found = load(folder, timeout_s=timeout_s, in_parent=in_parent)
    assert [(f.row, f.status, f.error) for f in found[2]] == [(BAD_ROW, status, error)]
    assert found[2][0].key == f"{BAD_ROW:03}.png".encode()
    assert_equal(found, expected, BAD_ROW)


def test_an_image_that_ends_one_decoder_only_is_loaded(
    monkeypatch: pytest.MonkeyPatch, folder: Path, expected: Loaded, tmp_path: Path
) -> None:
    """As when the kernel kills the largest process; the second decoder has the memory."""

    def act() -> None:
        flag = tmp_path / "flag"
        if not flag.exists():
            flag.touch()
            kill_self(signal.SIGKILL)

    bad_decoder(monkeypatch, folder, act)
    found = load(folder)
    assert found[2] == []
    assert_equal(found, expected)


def test_an_image_whose_decoders_are_killed_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The machine, not the image: it never becomes a failed row."""
    bad_decoder(monkeypatch, folder, lambda: kill_self(signal.SIGKILL))
    with pytest.raises(RunError, match=r"decodes 037\.png was killed.* data\.max_pixels"):
        load(folder)


def test_a_decoder_without_memory_ends_the_run_and_names_the_image(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """As in a container whose limit refuses an allocation: no row fails for it."""

    def act() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        np.ones(256 << 20, np.uint8)

    bad_decoder(monkeypatch, folder, act)
    with pytest.raises(RunError, match=r"out of memory at 037\.png.*same command again"):
        load(folder)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
@pytest.mark.parametrize("in_parent", [False, True])
def test_a_container_with_little_shared_memory_is_enough(
    folder: Path, tmp_path: Path, in_parent: bool
) -> None:
    """Batches of 192 MiB with 64 MiB of /dev/shm, as Docker gives; nothing is left there."""
    script = tmp_path / "load.py"
    script.write_text(
        f"""
import os
from pathlib import Path
import test_decoder_pool as tests
tests.PREPROCESS = tests.Preprocess(None, (1024, 1024), 1024, "bilinear", (0, 0, 0), (1, 1, 1))
with tests.make_loader(Path({str(folder)!r}), in_parent={in_parent}) as loader:
    images = [batch.images for _, batch in loader.batches([tests.Part(0, 0, 96)], 64)]
assert [len(each) for each in images] == [64, 64] and all(each[0].any() for each in images)
assert os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks == 64 << 20
print(os.listdir("/dev/shm"))
"""
    )
    command = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command],
        env=with_path(*(Path(place) for place in sys.path if "tests" in place)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("in_parent", [False, True])
def test_threads_where_no_process_can_be_forked(
    folder: Path, expected: Loaded, in_parent: bool
) -> None:
    source = FolderSource(folder)
    rows = row_loader.RowLoader(source, source.listing(), DecodeSettings(PREPROCESS, POLICY))
    with DecoderPool([rows], 3, reads_in_decoders=not in_parent, can_fork=False) as pool:
        starts = range(0, NUM_ROWS, 16)
        jobs = [pool.begin(0, np.arange(start, start + 16), 16) for start in starts]
        found = [(*pool.finish(job), job.failures) for job in jobs]
        images = torch.cat([images.clone() for images, _, _ in found])
    checksums = np.concatenate([checksums for _, checksums, _ in found])
    assert_equal((images, checksums, []), expected)
    assert not any(failures for *_, failures in found)


class Waiting:
    """Images that are read, or decoded, when the event is set."""

    keys, shape, dtype = np.array([b"waits"]), (1,), np.dtype(np.uint8)

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def image_key(self, row: int) -> bytes:
        return b"waits"

    def read(self, row: int) -> bytes:
        self.has_begun.set()
        self.may_end.wait(60)
        return b"encoded image"

    def fill(self, row: int, read: Callable[[], bytes], out: Any, *_: Any) -> None:
        read()

    def warm_up(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("in_parent", [True, False])
def test_a_thread_that_outlives_its_pool_writes_into_no_other_file(
    tmp_path: Path, in_parent: bool
) -> None:
    worker: Any = Waiting()
    with DecoderPool([worker], 1, reads_in_decoders=not in_parent, can_fork=in_parent) as pool:
        pool.begin(0, np.array([0]), 1)
        assert worker.has_begun.wait(60)
    with contextlib.ExitStack() as files:
        # They get the numbers of all files that the pool has closed.
        paths = [tmp_path / str(i) for i in range(20)]
        for path in paths:
            files.enter_context(path.open("wb"))
        worker.may_end.set()
        time.sleep(0.5)
        assert not any(path.stat().st_size for path in paths)


def test_a_full_pipe_of_tasks_stops_nothing(folder: Path, expected: Loaded) -> None:
    """Groups of one row each, far more than the pipe has room for, and one decoder."""
    source = FolderSource(folder)
    listing = source.listing()
    rows = row_loader.RowLoader(source, listing, DecodeSettings(PREPROCESS, POLICY))
    with DecoderPool([rows], 1, reads_in_decoders=True, keeps_images_together=True) as pool:
        jobs = [pool.begin(0, np.arange(1600) % NUM_ROWS, 1600) for _ in range(2)]
        images = [pool.finish(job)[0].clone() for job in jobs]
    assert all(torch.equal(x, expected[0][np.arange(1600) % NUM_ROWS]) for x in images)


@pytest.mark.slow
def test_an_image_that_damages_the_memory_of_its_decoder_fails_no_neighbour(
    monkeypatch: pytest.MonkeyPatch, folder: Path, expected: Loaded
) -> None:
    """The decoder crashes at the next image, each time that it has decoded the damaging one."""
    is_damaged = False

    def act(is_bad: bool) -> None:
        nonlocal is_damaged
        if is_damaged:
            kill_self(signal.SIGSEGV)
        is_damaged = is_bad

    before_decoding(monkeypatch, folder, act)
    for workers in (1, 2):
        found = load(folder, workers)
        assert found[2] == []
        assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("in_parent", [False, True])
def test_boxes_of_an_image_that_hangs_fail_together(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, in_parent: bool
) -> None:
    """The time limit passes a few times for the image, not for each of its boxes."""
    names = [f"{row:03}.png" for row in (BAD_ROW - 1, BAD_ROW, BAD_ROW + 1)]
    boxes = [f"{name},{x},0,16,16" for name in names for x in range(20)]
    table = tmp_path / "boxes.csv"
    table.write_text("\n".join(["path,x,y,width,height", *boxes]))
    hung = tmp_path / "hung"

    def act(is_bad: bool) -> None:
        if is_bad:
            with hung.open("a") as file:
                file.write("x")
            time.sleep(60)

    before_decoding(monkeypatch, folder, act, "decode_box_image")
    files = FolderSource(folder)
    source = BoxedSource(InParent(files) if in_parent else files, table)
    listing = source.listing()
    settings = DecodeSettings(PREPROCESS, POLICY, timeout_s=0.5, workers=2)
    with Loader(source, listing, settings) as loader:
        batches = [batch for _, batch in loader.batches([Part(0, 0, len(listing))], 8)]
    failures = [failure for batch in batches for failure in batch.failures]
    assert [f.key.partition(b"#")[0].decode() for f in failures] == [names[1]] * 20
    assert {f.status for f in failures} == {Status.TIMEOUT}
    assert 2 <= len(hung.read_text()) <= 2 + PREFETCH_BATCHES
    assert len({number for batch in batches for number in batch.checksums.tolist()}) == 3


def test_nothing_is_forked_before_an_image_is_asked_for(folder: Path) -> None:
    source = FolderSource(folder)
    with Loader(source, source.listing(), DecodeSettings(PREPROCESS, POLICY, workers=2)) as loader:
        assert not any(map(children, children(os.getpid())))
        loader.load([3])
        assert processes()[1]
        list(loader.batches([Part(0, 0, NUM_ROWS)], 8))
        until = time.monotonic() + 10
        while len(processes()[1]) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(processes()[1]) == 2
    assert not any(thread.name == "featx-loader" for thread in threading.enumerate())


PAUSED = """
import os, signal, sys, time
import numpy as np
from featx.images import DecoderPool

class Worker:
    keys, shape, dtype = np.array([b"hangs once", b"warns"]), (1,), np.dtype(np.uint8)

    def image_key(self, row):
        return bytes(self.keys[row])

    def fill(self, row, read, out, checksum, clock):
        with clock:
            if row == 0 and not os.path.exists(sys.argv[1]):
                open(sys.argv[1], "w").close()
                time.sleep(60)
        if row == 1:
            os.write(2, b"%d" % os.getpid())
        out[:] = 7

    def warm_up(self):
        pass

def end_the_idle_decoder(row, messages):
    time.sleep(0.3)  # until it waits for the next row
    os.kill(int(messages[0]), signal.SIGSEGV)
    time.sleep(2)

with DecoderPool([Worker()], 2, limit_s=1.0, reads_in_decoders=True) as pool:
    pool.on_warnings = end_the_idle_decoder
    images, _ = pool.finish(pool.begin(0, np.array([0, 1]), 2))
    assert images.tolist() == [[7], [7]], images
"""


def test_a_pause_longer_than_the_time_limit_ends_no_other_process(tmp_path: Path) -> None:
    """Until all decoders are started again there are none, and process 0 is the whole group."""
    run_python("-c", PAUSED, tmp_path / "hung", timeout=60, start_new_session=True)


DAMAGED = """
import ctypes, os, sys, time
import numpy as np
from featx.images import DecoderPool

class Worker:
    keys, shape, dtype = np.array([b"damages memory"]), (1,), np.dtype(np.uint8)

    def image_key(self, row):
        return bytes(self.keys[row])

    def fill(self, row, read, out, checksum, clock):
        if not os.path.exists(sys.argv[1]):
            with clock:  # shared with the supervisor, as is the time of the next decoder behind it
                ctypes.c_double.from_address(clock._since.ctypes.data + 8).value = 1.0
            open(sys.argv[1], "w").close()
        out[:] = 7

    def warm_up(self):
        pass

with DecoderPool([Worker()], 2, limit_s=1.0, reads_in_decoders=True) as pool:
    job = pool.begin(0, np.array([0]), 1)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    time.sleep(0.5)
    images, _ = pool.finish(job)
    assert images.tolist() == [[7]], images
"""


def test_an_image_that_damages_shared_memory_ends_no_other_process(tmp_path: Path) -> None:
    """The decoder that seems to be late has not been started: its process would be the group."""
    run_python("-c", DAMAGED, tmp_path / "damaged", timeout=60, start_new_session=True)


SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
from test_decoder_pool import *
folder = Path(sys.argv[1])
"""

INTERRUPTED = """
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
with pytest.raises(KeyboardInterrupt):
    load(folder)
assert not children(os.getpid())
"""

WITHOUT_STDERR = """
expected = load(folder)
os.close(2)
assert_equal(load(folder), expected)
"""

FORKED = """
with make_loader(folder) as loader:
    loader.load([0])
    before = processes()[0]
    if not (child := os.fork()):
        loader.__exit__()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    loader.load([1])
    assert processes()[0] == before
"""


@pytest.mark.parametrize(
    "script", [INTERRUPTED, WITHOUT_STDERR, FORKED], ids=["interrupt", "no-stderr", "fork"]
)
def test_a_process_of_a_user_forks_decoders(folder: Path, script: str) -> None:
    """An interrupt during the fork is not lost; a stderr that is closed is not taken for a pipe;
    decoders are not those of a child that the user forks meanwhile."""
    here = Path(__file__).parent
    run_python("-c", SCRIPT + script, folder, here, here.parent, timeout=100)


KILLED = """
import os, sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_decoder_pool import *
source = FolderSource(Path(sys.argv[1]))
with Loader(source, source.listing(), DecodeSettings(PREPROCESS, POLICY, workers=3)) as loader:
    batches = loader.batches([Part(0, 0, NUM_ROWS)], 32)
    next(batches)
    time.sleep(0.3)
    supervisor, decoders = processes()
    print(supervisor, *decoders, flush=True)
    time.sleep(60)
"""


def test_no_process_outlives_the_one_of_the_model(folder: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", KILLED, str(folder), str(here), str(here.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(text) for text in process.stdout.readline().split()]
        assert len(children) == 4
        process.kill()
    until = time.monotonic() + 10
    while any(_is_alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_is_alive(pid) for pid in children)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Cuda:
    """Page-locking by CUDA without a device; `code` is what it returns.

    Attributes:
        calls: name of each call, and the device that was current.
    """

    def __init__(self, patch: pytest.MonkeyPatch, code: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self._code, self._current = code, 0
        runtime = types.SimpleNamespace(
            cudaHostRegister=self._register, cudaHostUnregister=self._unregister
        )
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "device", self._device)
        patch.setattr(torch, "ones", self._ones)

    @contextlib.contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        self._current = device.index
        yield
        self._current = 0

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        assert num_bytes == 8 * 3 * SIDE * SIDE
        self.calls.append(("register", self._current))
        return self._code

    def _unregister(self, address: int) -> None:
        self.calls.append(("unregister", self._current))

    def _ones(self, *size: int, device: torch.device) -> None:
        self.calls.append(("launch", device.index))
        raise RuntimeError("CUDA error: operation not supported")


@pytest.mark.parametrize("code", [0, 801])
def test_slots_are_page_locked_for_the_device_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The current device is another one; an error that CUDA keeps is taken out of its memory."""
    cuda, files = Cuda(monkeypatch, code), FolderSource(folder)
    settings = DecodeSettings(PREPROCESS, POLICY, timeout_s=20, workers=1)
    with Loader(files, files.listing(), settings, torch.device("cuda", 1)) as loader:
        parts = [Part(0, 0, 32)]
        images = [batch.images.clone() for _, batch in loader.batches(parts, 8)]
    assert torch.equal(torch.cat(images), load(folder)[0][:32])
    num_slots = sum(name == "register" for name, _ in cuda.calls)
    assert 1 <= num_slots <= 5
    others = [("unregister", 1)] * num_slots if code == 0 else []
    launches = [] if code == 0 else [("launch", 1)] * num_slots
    assert sorted(cuda.calls) == sorted([("register", 1)] * num_slots + others + launches)


@pytest.mark.parametrize(("letter", "num_letters"), [("a", 2000), ("é", 1000), ("\udcff", 666)])
def test_a_long_reason_of_any_characters_is_cut(letter: str, num_letters: int) -> None:
    """A pipe keeps 4096 bytes together."""
    message = fault_bytes(ImageFault(Status.DECODE_ERROR, 3000 * letter))
    assert pickle.loads(message)[2] == num_letters * letter
    assert len(message) < 3000
