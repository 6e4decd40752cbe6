"""The processes that decode: a foreman, and decoders that it forks and replaces.

The process of the model forks the foreman, and the foreman forks the decoders. So a decoder that
replaces another one comes from a process with one thread, whatever threads and devices the process
of the model uses by then.

Decoders take groups of rows from a pipe, write the images into slots of shared memory, and report
each group in a second pipe. The kernel keeps records and messages whole: they have at most 4096
bytes. So a decoder that dies leaves neither a lock nor half a message behind.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from featx.base import end_with_parent, return_freed_memory
from featx.errors import RunError, require
from featx.images.decoder_warnings import redirect_warnings
from featx.images.shared_memory import Slot, SlotLayout
from featx.types import ImageFault

TASK = struct.Struct("<IIIIIiq")
"""Number of a group, of its worker, first place and the one after the last, number of places of its
slot, number of its spool cell or NO_CELL, and offset of its slot."""

MESSAGE = struct.Struct("<BIqHddQ")
"""Kind, number of a group, row, number of bytes that follow, and for DONE the seconds of reading
and decoding and the bytes read since the last message of this kind."""

ATOMIC_BYTES = 4096
"""Largest number of bytes that a pipe keeps together (PIPE_BUF)."""

NO_CELL = -1
"""Spool cell of a group whose rows the decoder reads."""

CELL_SHIFT = 36
"""Logarithm of the distance of two spool cells in their file, which has holes."""

NO_ROW = -1
"""Row of a decoder that loads none, and of a place that is not to be loaded."""

_CHECK_INTERVAL_S = 1.0
"""Largest number of seconds between two checks of the decoders."""

START_ALL, RESUME = b"a", b"r"
"""Orders to the foreman: start all decoders, not only one; start decoders again after all ended."""


class Kind(IntEnum):
    """Kind of a message."""

    DONE = 0
    FAILURE = 1
    WARNINGS = 2
    ERROR = 3
    DEATH = 4


class Cause(IntEnum):
    """Cause of the end of a decoder."""

    SIGNAL = 0
    TOO_LATE = 1
    STOPPED = 2


@dataclass(frozen=True)
class Death:
    """End of a decoder.

    Attributes:
        row: row that it was loading, or NO_ROW. All decoders have been ended in the latter case,
            because nobody knows whether it had taken a group.
        signum: signal that ended it, or 0.
        exit_code: its exit code if no signal ended it.
        cause: cause of the signal.
    """

    row: int
    signum: int
    exit_code: int
    cause: Cause


@dataclass
class LoaderTimes:
    """Seconds and bytes of decoders.

    Attributes:
        read_s: seconds of reading encoded images.
        decode_s: seconds of decoding, resizing and cropping.
        num_bytes: number of encoded bytes read.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    num_bytes: int = 0

    def add(self, read_s: float, decode_s: float, num_bytes: int) -> None:
        """Add seconds and bytes."""
        self.read_s += read_s
        self.decode_s += decode_s
        self.num_bytes += num_bytes


class DecodingClock:
    """Context manager for the section of loading a row that is measured and limited in time.

    Args:
        since: (1,) array that holds the monotonic time of its start, and 0 outside the section.

    Attributes:
        seconds: seconds spent inside so far.
    """

    def __init__(self, since: npt.NDArray[np.float64]) -> None:
        self.seconds = 0.0
        self._since = since

    def __enter__(self) -> None:
        self._since[0] = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.monotonic() - float(self._since[0])
        self._since[0] = 0.0


class RowWorker(Protocol):
    """Loads rows in a decoder. It is made in the process of the model and copied by the fork."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of a loaded row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of a loaded row."""

    def image_key(self, row: int) -> bytes:
        """Key of the image of a row; rows of one image in succession go to one decoder."""

    def read(self, row: int) -> bytes:
        """Read the encoded bytes of the image of a row.

        Raises:
            ImageFault: the image cannot be read.
        """

    def fill(
        self,
        row: int,
        read: Callable[[], bytes],
        out: npt.NDArray[Any],
        checksum: npt.NDArray[np.uint64],
        clock: DecodingClock,
    ) -> None:
        """Load a row.

        Args:
            row: row to load.
            read: function that returns the encoded bytes of its image.
            out: array of `shape` and `dtype` that takes the image.
            checksum: (1,) array that takes the checksum of the encoded bytes.
            clock: context manager for decoding, resizing and cropping.

        Raises:
            ImageFault: the row fails.
        """

    def warm_up(self) -> None:
        """Import what decoding needs, once for all decoders."""


@dataclass
class DecoderTable:
    """What decoders do at the moment, in memory shared with the foreman.

    Attributes:
        pids: (P,) process ids; 0 where none runs.
        rows: (P,) row that is being loaded, or NO_ROW.
        groups: (P,) number of the group taken last.
        since: (P,) monotonic time at which the decoding of the row began, or 0.
    """

    count: int
    pids: npt.NDArray[np.int64] = field(init=False)
    rows: npt.NDArray[np.int64] = field(init=False)
    groups: npt.NDArray[np.int64] = field(init=False)
    since: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        columns = np.frombuffer(mmap.mmap(-1, 8 * 4 * self.count), np.int64)
        self.pids, self.rows, self.groups, since = columns.reshape(4, self.count)
        self.since = since.view(np.float64)


@dataclass(frozen=True)
class Channels:
    """What the processes have in common: pipes and shared memory.

    Attributes:
        tasks: ends of the pipes of tasks from which decoders read; decoder i reads from number
            i modulo their count.
        results: end of the pipe of messages to which decoders write.
        slots: descriptor of the file of the slots.
        spool: descriptor of the file of encoded bytes that the process of the model has read.
        table: what the decoders do.
    """

    tasks: Sequence[int]
    results: int
    slots: int
    spool: int
    table: DecoderTable


class Decoder:
    """Loads groups of rows; the work of a decoder process, or of a thread where none can be forked.

    Args:
        index: number of the decoder.
        workers: workers by their numbers.
        channels: pipes and shared memory.
        take_warnings: returns the warnings since its last call.
    """

    def __init__(
        self,
        index: int,
        workers: Sequence[RowWorker],
        channels: Channels,
        take_warnings: Callable[[], list[str]],
    ) -> None:
        self._index, self._workers, self._channels = index, workers, channels
        self._take_warnings = take_warnings
        self._slots: dict[int, Slot] = {}

    def serve(self) -> None:
        """Load groups until the pipe of tasks ends."""
        tasks, results = self._channels.tasks, self._channels.results
        current = self._channels.table.rows[self._index : self._index + 1]
        since = self._channels.table.since[self._index : self._index + 1]
        groups = self._channels.table.groups
        file = tasks[self._index % len(tasks)]
        while len(record := os.read(file, TASK.size)) == TASK.size:
            group, number, first, stop, num_rows, cell, offset = TASK.unpack(record)
            groups[self._index] = group
            worker, times, clock = self._workers[number], LoaderTimes(), DecodingClock(since)
            slot = self._slot(worker, num_rows, offset)
            for place in range(first, stop):
                row = int(slot.rows[place])
                if row == NO_ROW:
                    continue
                current[0] = row
                try:
                    read = self._reader(worker, row, slot, place, cell, times)
                    checksum = slot.checksums[place : place + 1]
                    worker.fill(row, read, slot.images[place], checksum, clock)
                except ImageFault as fault:
                    slot.images[place] = 0
                    send(results, Kind.FAILURE, group, row, _fault_bytes(fault))
                except BaseException as error:  # noqa: BLE001 - raised in the process of the model
                    send(results, Kind.ERROR, group, row, error_bytes(error))
                    break
                if warnings := self._take_warnings():
                    send(results, Kind.WARNINGS, group, row, _warning_bytes(warnings))
            done = times.read_s, clock.seconds, times.num_bytes
            os.write(results, MESSAGE.pack(Kind.DONE, group, NO_ROW, 0, *done))
            current[0] = NO_ROW

    def _reader(
        self, worker: RowWorker, row: int, slot: Slot, place: int, cell: int, times: LoaderTimes
    ) -> Callable[[], bytes]:
        """A function that reads the encoded bytes of a row, from their spool cell if they are there
        already."""

        def read() -> bytes:
            started_at = time.perf_counter()
            data = worker.read(row)
            times.add(time.perf_counter() - started_at, 0, len(data))
            return data

        def read_spool() -> bytes:
            start, stop = int(slot.starts[place]), int(slot.stops[place])
            return read_range(self._channels.spool, (cell << CELL_SHIFT) + start, stop - start)

        return read if cell == NO_CELL else read_spool

    def _slot(self, worker: RowWorker, num_rows: int, offset: int) -> Slot:
        """The slot of a task, which is mapped the first time."""
        slot = self._slots.get(offset)
        if slot is None:
            layout = SlotLayout(num_rows, worker.shape, worker.dtype)
            slot = self._slots[offset] = layout.map(self._channels.slots, offset)
        return slot


class Foreman:
    """Keeps decoders running, in a process of its own.

    Args:
        workers: workers by their numbers.
        channels: pipes and shared memory.
        limit_s: seconds that decoding a row may take, or None for no limit.
        control: end of the pipe of orders; when it is closed, all processes end.
    """

    def __init__(
        self,
        workers: Sequence[RowWorker],
        channels: Channels,
        limit_s: float | None,
        control: int,
    ) -> None:
        self._workers, self._channels, self._table = workers, channels, channels.table
        self._limit_s, self._control = limit_s, control
        self._target = 1
        self._is_paused = False
        self._were_stopped: set[int] = set()
        self._causes: dict[int, Cause] = {}

    def run(self) -> NoReturn:
        """Start, watch and replace decoders until the process of the model is gone."""
        parent = os.getppid()
        # Ctrl-C reaches the whole process group. The process of the model decides when these end.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        torch.set_num_threads(1)  # the threads of OpenMP did not survive the fork
        return_freed_memory()  # the process of the model would copy each such page that it reuses
        for worker in self._workers:
            with contextlib.suppress(Exception):  # rows will tell
                worker.warm_up()
        gc.freeze()  # a collection would touch, and so copy, every page
        wake = self._wake_at_child_end()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        limit_s = _CHECK_INTERVAL_S if self._limit_s is None else self._limit_s / 4
        while True:
            self._start_missing()
            ready = dict(poll.poll(1000 * min(limit_s, _CHECK_INTERVAL_S)))
            if os.getppid() != parent or (self._control in ready and not self._obey()):
                self._end_decoders()
                os._exit(0)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, ATOMIC_BYTES)
            self._end_late_decoders()
            self._report_deaths()

    def _wake_at_child_end(self) -> int:
        """The end of a pipe that becomes readable when a decoder ends."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        return woken

    def _obey(self) -> bool:
        """Follow an order; return False if there will be no more."""
        order = os.read(self._control, 1)
        if order == START_ALL:
            self._target = self._table.count
        elif order == RESUME:
            self._is_paused = False
        return bool(order)

    def _start_missing(self) -> None:
        """Fork the decoders that do not run."""
        for index in range(0 if self._is_paused else self._target):
            if not self._table.pids[index]:
                self._start_decoder(index)

    def _start_decoder(self, index: int) -> None:
        """Fork a decoder."""
        self._table.rows[index], self._table.since[index] = NO_ROW, 0
        foreman = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                end_with_parent(foreman)
                os.close(self._control)
                Decoder(index, self._workers, self._channels, redirect_warnings()).serve()
                code = 0
            finally:
                # Nothing that was copied by the fork may be finalised here.
                os._exit(code)
        self._table.pids[index] = pid

    def _end_late_decoders(self) -> None:
        """Kill decoders that are over the time limit, and those that somebody has stopped."""
        if self._limit_s is not None:
            since, now = self._table.since, time.monotonic()
            for index in np.flatnonzero((since > 0) & (now - since > self._limit_s)).tolist():
                self._kill(index, Cause.TOO_LATE)
        stopped = {index for index in range(self._table.count) if self._is_stopped(index)}
        # At Ctrl-Z all processes are stopped, and this one may continue before the others do.
        for index in stopped & self._were_stopped:
            self._kill(index, Cause.STOPPED)
        self._were_stopped = stopped

    def _kill(self, index: int, cause: Cause) -> None:
        """Kill a decoder and remember why."""
        self._causes.setdefault(index, cause)
        os.kill(int(self._table.pids[index]), signal.SIGKILL)

    def _is_stopped(self, index: int) -> bool:
        """Return whether a decoder is stopped by a signal."""
        pid = int(self._table.pids[index])
        try:
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return False
        return status.rpartition(b") ")[2].startswith(b"T")

    def _report_deaths(self) -> None:
        """Report decoders that have ended. After the end of one between two rows, end all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            index = int(np.flatnonzero(self._table.pids == pid)[0])
            self._table.pids[index] = 0
            row, group = int(self._table.rows[index]), int(self._table.groups[index])
            is_signalled = os.WIFSIGNALED(status)
            death = Death(
                row,
                os.WTERMSIG(status) if is_signalled else 0,
                0 if is_signalled else os.WEXITSTATUS(status),
                self._causes.pop(index, Cause.SIGNAL),
            )
            if row == NO_ROW:
                self._end_decoders()
                self._is_paused = True
            send(self._channels.results, Kind.DEATH, group, row, pickle.dumps(death))

    def _end_decoders(self) -> None:
        """Kill all decoders and wait for their end."""
        pids = self._table.pids[self._table.pids > 0].tolist()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._table.pids[:] = 0
        self._causes.clear()


def send(results: int, kind: Kind, group: int, row: int, content: bytes) -> None:
    """Write a message."""
    header = MESSAGE.pack(kind, group, row, len(content), 0.0, 0.0, 0)
    require(len(header) + len(content) <= ATOMIC_BYTES, "a message may be torn")
    os.write(results, header + content)


def read_range(file: int, offset: int, size: int) -> bytes:
    """Read `size` bytes of a file."""
    data = os.pread(file, size, offset)
    while len(data) < size:  # a read ends early after 2 GiB
        data += os.pread(file, size - len(data), offset + len(data))
    return data


def error_bytes(error: BaseException) -> bytes:
    """A pickled exception; one that cannot be pickled, or is long, as a RunError with its text."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # an exception may be pickled without what its __init__ needs
    except Exception:  # noqa: BLE001 - pickling calls any code
        content = b""
    if 0 < len(content) < ATOMIC_BYTES - MESSAGE.size:
        return content
    text = "".join(traceback.format_exception(error))
    return pickle.dumps(RunError(text.encode(errors="replace")[-2000:].decode(errors="replace")))


def _fault_bytes(fault: ImageFault) -> bytes:
    """Status, name of the exception, and message of a failed row."""
    return pickle.dumps((int(fault.status), fault.error, _shortened(str(fault), 2000)))


def _warning_bytes(warnings: Iterable[str]) -> bytes:
    """The first warnings of a row, as many as a message holds."""
    return pickle.dumps([_shortened(text, 200) for text in list(warnings)[:8]])


def _shortened(text: str, num_bytes: int) -> str:
    """A text of at most so many bytes in UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    return text if len(data) <= num_bytes else data[:num_bytes].decode("utf-8", "replace")


CAN_FORK = sys.platform.startswith("linux")
"""Whether decoders are processes. Elsewhere they are threads: on macOS, a fork of a process that
has used its frameworks crashes."""
