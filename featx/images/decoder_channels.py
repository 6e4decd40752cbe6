"""Jobs and results of decoders, and the pipes and the memory that carry them."""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from featx.errors import RunError, require
from featx.types import Array, Failure, ImageFault

NO_BUFFER = -1
"""Spool buffer of a group whose rows the decoder reads."""

BUFFER_SHIFT = 36
"""Logarithm of the distance of two spool buffers in their file, which has holes."""

_COLUMNS = 4
"""Number of columns of a slot with 8 bytes per row: rows, checksums, starts, stops."""


@dataclass(frozen=True)
class Slot:
    """Places of the rows of one batch.

    Attributes:
        offset: byte offset in the file, which names the slot.
        images: (B, C, H, W) images.
        rows: (B,) int64, row of each place.
        checksums: (B,) uint64, checksum of the encoded bytes of each place.
        starts: (B,) int64, offset of the encoded bytes of each place in their spool cell.
        stops: (B,) int64, the offset after their end.
    """

    offset: int
    images: Array
    rows: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlotLayout:
    """Number B of places, and (C, H, W) and dtype of an image."""

    num_rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot: the images, the columns at its end, and what fills up a page."""
        num_values = self.num_rows * int(np.prod(self.shape, dtype=np.int64))
        num_bytes = num_values * self.dtype.itemsize + 8 * _COLUMNS * self.num_rows
        page = mmap.ALLOCATIONGRANULARITY
        return -(-num_bytes // page) * page

    def map(self, file: int, offset: int) -> Slot:
        """Map a slot into this process."""
        memory = mmap.mmap(file, self.num_bytes, offset=offset)
        count = self.num_rows
        pixels = count * int(np.prod(self.shape, dtype=np.int64))
        images = np.frombuffer(memory, self.dtype, pixels).reshape(count, *self.shape)
        start = self.num_bytes - 8 * _COLUMNS * count
        columns = np.frombuffer(memory, np.int64, _COLUMNS * count, start)
        rows, checksums, starts, stops = columns.reshape(_COLUMNS, count)
        return Slot(offset, images, rows, checksums.view(np.uint64), starts, stops)


def anonymous_file(name: str) -> int:
    """Create a file without a path and return its descriptor; its pages lie in memory on Linux.

    It does not count against the size of /dev/shm, which is 64 MiB in many containers.
    """
    if sys.platform.startswith("linux"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Spool:
    """A few buffers in an anonymous file, each with the encoded images of a group.

    Their number limits how far images are read ahead.
    """

    def __init__(self, num_buffers: int) -> None:
        self.file = anonymous_file("featx-spool")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_users: Counter[int] = Counter()
        for buffer in range(num_buffers):
            self._free.put(buffer)

    def write(self, images: Iterable[bytes]) -> int:
        """Wait for a free buffer, write encoded images into it, and return its number.

        After `end_waiting` nothing is written, and the number is NO_BUFFER.
        """
        buffer = self._free.get()
        if buffer == NO_BUFFER:
            return buffer
        self._num_users[buffer] = 1
        offset = buffer << BUFFER_SHIFT
        for data in images:
            view = memoryview(data)
            while view:  # a write ends early after 2 GiB
                written = os.pwrite(self.file, view, offset)
                offset, view = offset + written, view[written:]
        return buffer

    def share(self, buffer: int, num_groups: int) -> None:
        """Let further groups use a buffer, so that it is released that many times more."""
        self._num_users[buffer] += num_groups

    def release(self, buffer: int) -> None:
        """Let a buffer be used again when all of its groups are done."""
        self._num_users[buffer] -= 1
        if not self._num_users[buffer]:
            self._free.put(buffer)

    def end_waiting(self, num_threads: int) -> None:
        """Wake threads that wait for a free buffer, when their groups are no longer needed."""
        for _ in range(num_threads):
            self._free.put(NO_BUFFER)


@dataclass(eq=False)
class Job:
    """Rows that are loaded together.

    Attributes:
        worker: number of the worker that loads them.
        rows: (n,) their rows.
        slot: slot that takes the images.
        layout: layout of the slot.
        num_open: number of groups that are not done.
        failures: rows that failed.
        damaged: rows whose images are damaged and were accepted.
        error: exception that ends the run, and the row that it came from.
        is_abandoned: whether the images are no longer needed.
    """

    worker: int
    rows: npt.NDArray[np.int64]
    slot: Slot
    layout: SlotLayout
    num_open: int = 0
    failures: list[Failure] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    error: tuple[int, BaseException] | None = None
    is_abandoned: bool = False

    def fail(self, row: int, error: BaseException) -> None:
        """Record an exception that ends the run; that of the first row counts."""
        if self.error is None or row < self.error[0]:
            self.error = row, error


@dataclass(eq=False)
class Group:
    """Some successive rows of a job, which one decoder loads.

    Attributes:
        first: first place in the slot.
        stop: place after the last one.
        buffer: spool buffer with their encoded bytes, or NO_BUFFER.
        is_last: whether a new decoder takes the place of the one that has loaded them.
        has_waited: whether its decoder has waited for an object store.
    """

    job: Job
    first: int
    stop: int
    buffer: int
    is_last: bool = False
    has_waited: bool = False

    def place_of(self, row: int) -> int:
        """The first place of a row in the group."""
        rows = self.job.rows[self.first : self.stop]
        return self.first + int(np.argmax(rows == row))

    def split(self, place: int) -> list[Group]:
        """Divide the group into the rows before a place, the row at it, and those behind it.

        The row at the place is loaded by a decoder that has loaded no other row of the group, as
        an image may damage the memory of its decoder, which then crashes at a later one.
        """
        groups = [
            replace(self, stop=place, is_last=True),
            replace(self, first=place, stop=place + 1, is_last=True),
            replace(self, first=place + 1),
        ]
        return [group for group in groups if group.first < group.stop]


TASK = struct.Struct("<IHHIIIiq")
"""Number of a group, of its worker, 1 if a new decoder follows, first place and the one after the
last, number of places of its slot, number of its spool buffer or NO_BUFFER, and offset of the slot.
"""

MESSAGE = struct.Struct("<BIqHddQ")
"""Kind, number of a group, row, number of bytes that follow, and for DONE the seconds of reading
and decoding and the bytes read since the last message of this kind."""

ATOMIC_BYTES = 4096
"""Largest number of bytes that a pipe keeps together (PIPE_BUF)."""

NO_ROW = -1
"""Row of a decoder that loads none, and of a place that is not to be loaded."""


class Kind(IntEnum):
    """Kind of a message."""

    DONE = 0
    FAILURE = 1
    WARNINGS = 2
    ERROR = 3
    DEATH = 4
    DAMAGED = 5
    NOT_STARTED = 6
    OUTAGE = 7


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
            because it may have taken a group without a trace.
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
    """Seconds of reading encoded images and of decoding, resizing and cropping, and bytes read."""

    read_s: float = 0.0
    decode_s: float = 0.0
    num_bytes: int = 0

    def add(self, read_s: float, decode_s: float, num_bytes: int) -> None:
        """Add seconds and bytes."""
        self.read_s += read_s
        self.decode_s += decode_s
        self.num_bytes += num_bytes


@dataclass
class DecoderTable:
    """What decoders do at the moment, in memory shared with the supervisor.

    Attributes:
        rows: (P,) row that is being loaded, or NO_ROW.
        groups: (P,) number of the group taken last.
        since: (P,) monotonic time at which the decoding of the row began, or 0.
    """

    count: int
    rows: npt.NDArray[np.int64] = field(init=False)
    groups: npt.NDArray[np.int64] = field(init=False)
    since: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        columns = np.frombuffer(mmap.mmap(-1, 8 * 3 * self.count), np.int64)
        self.rows, self.groups, since = columns.reshape(3, self.count)
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


def fault_bytes(fault: ImageFault) -> bytes:
    """Status, name of the exception, and message of a failed row."""
    return pickle.dumps((int(fault.status), fault.error, _shortened(str(fault), 2000)))


def outage_bytes(text: str, since: float) -> bytes:
    """Message about an object store that a decoder waits for, and the time since which it does."""
    return pickle.dumps((_shortened(text, 2000), since))


def warning_bytes(warnings: Iterable[str]) -> bytes:
    """The first warnings of a row, as many as a message holds."""
    return pickle.dumps([_shortened(text, 200) for text in list(warnings)[:8]])


def _shortened(text: str, num_bytes: int) -> str:
    """A text of at most so many bytes in UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= num_bytes:
        return text
    while data[num_bytes] & 0xC0 == 0x80:  # within a character
        num_bytes -= 1
    return data[:num_bytes].decode("utf-8", "surrogatepass")
