"""Decoders in child processes, seen from the process of the model: rows go out, batches come back.

If a decoder crashes or hangs, its foreman reports the row and forks another one, and the group of
the row is given out once more. A row that ends two decoders fails. A decoder that is killed between
two groups may have taken one that nobody knows of; the foreman then ends all decoders, so that
exactly the groups without a report are missing, and these are given out again.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.base import CRASHES
from featx.errors import RunError
from featx.images.decoder_process import (
    ATOMIC_BYTES,
    CAN_FORK,
    CELL_SHIFT,
    MESSAGE,
    NO_CELL,
    NO_ROW,
    RESUME,
    START_ALL,
    TASK,
    Cause,
    Channels,
    Death,
    Decoder,
    DecoderTable,
    Foreman,
    Kind,
    LoaderTimes,
    RowWorker,
)
from featx.images.shared_memory import Slot, SlotLayout, anonymous_file
from featx.types import NO_IMAGE, Failure, ImageFault, Status

GROUP_ROWS = 32
"""Largest number of rows that a decoder takes at once. A group costs the process of the model
about 60 µs, whatever its size."""

MAX_GROUPS = 256
"""Largest number of groups of a job, so that the pipe holds those of all jobs."""

ATTEMPTS = 2
"""Number of decoders that a row may end before it fails."""

KEPT_BATCHES = 4
"""Number of finished jobs whose images stay in shared memory; those of further ones are copied."""

_PIPE_BYTES = 1 << 20
"""Size of the pipe of tasks."""

_CELL_BYTES = 8 << 20
"""Bytes of a spool cell from which on no further image is added to its group."""

_END_LIMIT_S = 5.0
"""Seconds that the end of a pool waits for images that are being read."""

_KILLED = (
    "was killed, by a user or because the machine ran out of memory. Nothing committed is lost; "
    "free some memory and give the same command again."
)


def _take_back(slot: Slot, lent: set[int], free: list[Slot]) -> None:
    """Let a slot be used again whose images nobody has any more."""
    # Python calls this at any point, perhaps in a thread that holds the lock of the pool: each of
    # the two operations is whole without it.
    lent.discard(slot.offset)
    free.append(slot)


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
        error: exception that ends the run, and the row that it came from.
        is_abandoned: whether nobody will ask for the images.
    """

    worker: int
    rows: npt.NDArray[np.int64]
    slot: Slot
    layout: SlotLayout
    num_open: int = 0
    failures: list[Failure] = field(default_factory=list)
    error: tuple[int, BaseException] | None = None
    is_abandoned: bool = False

    def fail(self, row: int, error: BaseException) -> None:
        """Record an exception that ends the run; that of the first row counts."""
        if self.error is None or row < self.error[0]:
            self.error = row, error


@dataclass(frozen=True, eq=False)
class _Group:
    """Some successive rows of a job, which one decoder loads.

    Attributes:
        job: their job.
        first: first place in the slot.
        stop: place after the last one.
        cell: spool cell with their encoded bytes, or NO_CELL.
    """

    job: Job
    first: int
    stop: int
    cell: int


class DecoderPool:
    """Decoders that load rows; a context manager. It forks nothing before it is asked for a row.

    Args:
        workers: workers that jobs name by their numbers.
        keys: (N,) keys of all rows.
        count: number of decoders.
        limit_s: seconds that decoding a row may take, or None for no limit.
        reads_in_decoders: whether decoders read the encoded images; otherwise threads of this
            process do.
        keeps_images_together: whether rows of the same image in succession go to the same decoder.
        is_pinned: whether slots are page-locked for CUDA.
        can_fork: whether decoders are processes; otherwise they are threads, and an image that
            crashes or hangs its decoder ends the run.

    Attributes:
        times: seconds and bytes so far.
        on_warnings: function that receives the row and the warnings of its image.
    """

    def __init__(
        self,
        workers: Sequence[RowWorker],
        keys: npt.NDArray[np.bytes_],
        count: int,
        limit_s: float | None = None,
        reads_in_decoders: bool = False,
        keeps_images_together: bool = False,
        is_pinned: bool = False,
        can_fork: bool = CAN_FORK,
    ) -> None:
        self.times = LoaderTimes()
        self.on_warnings: Callable[[int, list[str]], None] = lambda row, messages: None
        self._workers, self._keys, self._count, self._limit_s = workers, keys, count, limit_s
        self._reads_in_decoders = reads_in_decoders
        self._keeps_images_together = keeps_images_together
        self._is_pinned, self._can_fork = is_pinned, can_fork
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._groups: dict[int, _Group] = {}
        self._num_groups = 0
        self._attempts: dict[int, list[Status | None]] = {}
        self._free_slots: dict[tuple[int, int], list[Slot]] = {}
        self._lent_slots: dict[tuple[int, int], set[int]] = {}
        self._slots_end = 0
        self._pinned: dict[int, npt.NDArray[Any]] = {}
        self._cells: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[Job, int, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pid: int | None = None
        self._num_started = 0
        self._is_closing = False

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(self, *error: object) -> None:
        """End all decoders; batches that were handed out stay valid."""
        with self._state:
            self._is_closing = True
            if not self._num_started:
                return
            os.close(self._control)
            for file in self._tasks:
                os.close(file)
        if self._pid is not None:
            # The kernel ends the decoders when their parent is gone.
            os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        for _ in self._threads:
            self._to_read.put(None)
            self._cells.put(NO_CELL)
        until = time.monotonic() + _END_LIMIT_S
        *others, collector = self._threads
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        if self._pid is None:
            os.close(self._channels.results)
        collector.join(max(0.0, until - time.monotonic()))
        for images in self._pinned.values():
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(images.ctypes.data)
        self._free_slots.clear()
        self._groups.clear()
        for file in (*self._channels.tasks, self._results, self._channels.slots, self._spool):
            os.close(file)

    def start_all(self) -> None:
        """Start all decoders. Before this is called only one runs, which is enough for trials."""
        with self._state:
            self._start()
            if self._num_started < self._count:
                self._num_started = self._count
                if self._pid is not None:
                    os.write(self._control, START_ALL)

    def begin(self, worker: int, rows: npt.NDArray[np.int64], num_places: int) -> Job:
        """Start loading rows.

        Args:
            worker: number of the worker that loads them.
            rows: (n,) rows, n > 0.
            num_places: number of places B of the batch, at least n.
        """
        with self._state:
            self._start()
            layout = SlotLayout(
                num_places, self._workers[worker].shape, self._workers[worker].dtype
            )
            slot = self._take_slot(worker, layout)
            slot.rows[: len(rows)] = rows
            slot.checksums[: len(rows)] = NO_IMAGE
            job = Job(worker, rows, slot, layout)
            spans = self._spans(job)
            job.num_open = len(spans)
            if self._reads_in_decoders:
                self._give_out([_Group(job, first, stop, NO_CELL) for first, stop in spans])
            else:
                for first, stop in spans:
                    self._to_read.put((job, first, stop))
            return job

    def finish(self, job: Job) -> tuple[torch.Tensor, npt.NDArray[np.uint64]]:
        """Wait for the rows of a job.

        The images lie in shared memory, without a copy, as long as no more than KEPT_BATCHES of
        them are kept. Their memory is used again when the tensor and all its views are gone.

        Returns:
            (B, C, H, W) images, and (n,) checksums of the encoded bytes. The images of failed rows
            are zero, the places after the last row hold anything.

        Raises:
            RunError: reading fails repeatedly, memory is exhausted, or decoders are killed.
        """
        with self._state:
            while job.num_open and self._error is None and job.error is None:
                self._state.wait()
        slot, name = job.slot, (job.worker, job.layout.num_rows)
        if job.error is not None:
            raise job.error[1]
        if self._error is not None:
            raise self._error
        job.failures.sort(key=lambda failure: failure.row)
        checksums = slot.checksums[: len(job.rows)].copy()
        if len(self._lent_slots[name]) >= KEPT_BATCHES:
            images = torch.from_numpy(slot.images).clone()
            self._free_slots[name].append(slot)
            return images, checksums
        if self._is_pinned and slot.offset not in self._pinned:
            self._pin(slot)
        # A view of its own: torch keeps this array alive, and the slot is free when it is not.
        array = slot.images.view()
        lent, free = self._lent_slots[name], self._free_slots[name]
        lent.add(slot.offset)
        weakref.finalize(array, _take_back, slot, lent, free).atexit = False
        return torch.from_numpy(array), checksums

    def abandon(self, job: Job) -> None:
        """Forget a job whose images nobody needs any more."""
        with self._state:
            job.is_abandoned = True
            if not job.num_open and not self._is_closing:
                self._free_slots[job.worker, job.layout.num_rows].append(job.slot)

    def _take_slot(self, worker: int, layout: SlotLayout) -> Slot:
        """A free slot, or a new one."""
        name = (worker, layout.num_rows)
        free = self._free_slots.setdefault(name, [])
        self._lent_slots.setdefault(name, set())
        if free:
            return free.pop()
        offset, self._slots_end = self._slots_end, self._slots_end + layout.num_bytes
        os.ftruncate(self._channels.slots, self._slots_end)
        return layout.map(self._channels.slots, offset)

    def _pin(self, slot: Slot) -> None:
        """Page-lock a slot for CUDA, so that copies from it run beside the host."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(slot.images.ctypes.data, slot.images.nbytes, 0)
        if int(code) == 0:  # otherwise copies are slower, and right
            self._pinned[slot.offset] = slot.images

    def _spans(self, job: Job) -> list[tuple[int, int]]:
        """First and last places of the groups of a job."""
        num_rows, worker = len(job.rows), self._workers[job.worker]
        if self._keeps_images_together:
            keys = [worker.image_key(row) for row in job.rows.tolist()]
            starts = [0, *(i for i in range(1, num_rows) if keys[i] != keys[i - 1])]
            return list(zip(starts, [*starts[1:], num_rows], strict=True))
        places = job.layout.num_rows
        size = max(1, min(GROUP_ROWS, places // (2 * self._count)), -(-places // MAX_GROUPS))
        return [(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]

    def _give_out(self, groups: Sequence[_Group]) -> None:
        """Write groups into the pipes of tasks; the lock is held."""
        records: dict[int, list[bytes]] = {}
        for group in groups:
            number = self._num_groups = (self._num_groups + 1) & 0xFFFFFFFF
            self._groups[number] = group
            job = group.job
            record = TASK.pack(
                number, job.worker, group.first, group.stop, job.layout.num_rows, group.cell,
                job.slot.offset,
            )  # fmt: skip
            records.setdefault(self._tasks[self._decoder_of(group)], []).append(record)
        for file, of_file in records.items():
            data = b"".join(of_file)
            for start in range(0, len(data), ATOMIC_BYTES):
                os.write(file, data[start : start + ATOMIC_BYTES])

    def _decoder_of(self, group: _Group) -> int:
        """Number of the pipe that a group is written into; with one pipe any decoder takes it."""
        if len(self._tasks) == 1:
            return 0
        row = int(group.job.rows[group.first])
        key = self._workers[group.job.worker].image_key(row)
        return zlib.crc32(key) % self._num_started

    def _start(self) -> None:
        """Create the pipes and fork the foreman, which starts one decoder; the lock is held."""
        if self._num_started:
            return
        num_pipes = self._count if self._keeps_images_together else 1
        pipes = [os.pipe() for _ in range(num_pipes)]
        self._tasks = [out for _, out in pipes]
        for file in self._tasks:
            with contextlib.suppress(OSError, AttributeError):  # only Linux can, and it may refuse
                fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._results, results_in = os.pipe()
        control_out, self._control = os.pipe()
        self._spool = anonymous_file("featx-spool")
        self._channels = Channels(
            tasks=[into for into, _ in pipes],
            results=results_in,
            slots=anonymous_file("featx-slots"),
            spool=self._spool,
            table=DecoderTable(self._count),
        )
        self._num_started = 1
        if self._can_fork:
            self._pid = self._fork_foreman(control_out)
            os.close(results_in)
        else:
            self._num_started = self._count
            for index in range(self._count):
                workers = [copy.copy(worker) for worker in self._workers]
                decoder = Decoder(index, workers, self._channels, list)
                self._start_thread(decoder.serve)
        os.close(control_out)
        if not self._reads_in_decoders:
            for cell in range(2 * self._count + 2):
                self._cells.put(cell)
            for _ in range(self._count):
                self._start_thread(self._read_groups)
        self._start_thread(self._collect)

    def _fork_foreman(self, control: int) -> int:
        """Fork the foreman and return its process id."""
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork in a process with threads. The child takes no lock that
            # one of them may have held: it only uses its own pipes, memory and decoders.
            if sys.version_info >= (3, 12):
                warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                for file in (self._control, self._results, *self._tasks):
                    os.close(file)
                Foreman(self._workers, self._channels, self._limit_s, control).run()
            finally:
                os._exit(1)
        return pid

    def _start_thread(self, work: Callable[[], None]) -> None:
        """Start a thread that ends with the pool, or with the process if it hangs."""
        thread = threading.Thread(target=work, name="featx-loader", daemon=True)
        self._threads.append(thread)
        thread.start()

    # A thread that follows the messages of the decoders

    def _collect(self) -> None:
        """Follow messages until the decoders are gone."""
        data = b""
        try:
            while more := os.read(self._results, 1 << 16):
                data += more
                offset = 0
                while len(data) - offset >= MESSAGE.size:
                    kind, group, row, length, *times = MESSAGE.unpack_from(data, offset)
                    end = offset + MESSAGE.size + length
                    if end > len(data):
                        break
                    content = data[offset + MESSAGE.size : end]
                    offset = end
                    self._follow(Kind(kind), group, row, content, times)
                data = data[offset:]
            if not self._is_closing:
                raise RunError(f"the process that starts decoders {_KILLED}")
        except BaseException as error:  # noqa: BLE001 - raised where batches are asked for
            with self._state:
                self._error = error
                self._state.notify_all()

    def _follow(self, kind: Kind, group: int, row: int, content: bytes, times: list[Any]) -> None:
        """Follow one message."""
        if kind == Kind.WARNINGS:
            self.on_warnings(row, pickle.loads(content))
            return
        with self._state:
            if self._is_closing:
                return
            if kind == Kind.DEATH:
                self._follow_death(group, pickle.loads(content))
                return
            job = self._groups[group].job
            if kind == Kind.DONE:
                self._end_group(group)
                self.times.add(*times)
            elif kind == Kind.FAILURE:
                status, error, message = pickle.loads(content)
                self._fail_row(job, row, Status(status), error, message)
            elif kind == Kind.ERROR:
                job.fail(row, pickle.loads(content))
                self._state.notify_all()

    def _end_group(self, number: int) -> None:
        """Count a group as done."""
        group = self._groups.pop(number)
        if group.cell != NO_CELL:
            self._cells.put(group.cell)
        self._count_done(group.job)

    def _count_done(self, job: Job) -> None:
        """Count a group of a job as done; the lock is held."""
        job.num_open -= 1
        if not job.num_open:
            if job.is_abandoned:
                self._free_slots[job.worker, job.layout.num_rows].append(job.slot)
            self._state.notify_all()

    def _fail_row(self, job: Job, row: int, status: Status, error: str, message: str) -> None:
        """Record a failed row."""
        job.failures.append(Failure(row, bytes(self._keys[row]), status, error, message))

    def _follow_death(self, number: int, death: Death) -> None:
        """Give out again what a decoder has left."""
        if death.row == NO_ROW:
            # All decoders have ended. What they have not taken is given out again with the rest.
            for file in self._channels.tasks:
                while select.select([file], [], [], 0)[0]:
                    os.read(file, 1 << 16)
            groups, self._groups = self._groups, {}
            self._give_out([self._prepare_again(group, death) for group in groups.values()])
            os.write(self._control, RESUME)
            return
        if number not in self._groups:
            return  # it died after it had reported the group
        attempts = self._attempts.setdefault(death.row, [])
        if death.cause == Cause.TOO_LATE:
            attempts.append(Status.TIMEOUT)
        elif death.signum in CRASHES or death.exit_code:
            attempts.append(Status.CRASHES_DECODER)
        elif death.cause == Cause.SIGNAL:
            if None in attempts:
                name = os.fsdecode(bytes(self._keys[death.row]))
                raise RunError(f"the process that decodes {name} {_KILLED}")
            attempts.append(None)
        self._give_out([self._prepare_again(self._groups.pop(number), death)])

    def _prepare_again(self, group: _Group, death: Death) -> _Group:
        """Prepare a group for being given out again: rows that ended too many decoders fail."""
        job, slot = group.job, group.job.slot
        rows = job.rows[group.first : group.stop].tolist()
        # Failures that decoders have reported will come again.
        taken = {row for place, row in enumerate(rows, group.first) if slot.rows[place] != NO_ROW}
        job.failures = [failure for failure in job.failures if failure.row not in taken]
        for place, row in enumerate(rows, group.first):
            attempts = [status for status in self._attempts.get(row, []) if status is not None]
            if len(attempts) < ATTEMPTS or slot.rows[place] == NO_ROW:
                continue
            slot.rows[place] = NO_ROW
            slot.images[place] = 0
            if attempts[-1] == Status.TIMEOUT:
                message = f"decoding takes longer than data.timeout_s={self._limit_s:g}"
                self._fail_row(job, row, Status.TIMEOUT, "TimeoutError", message)
            else:
                name = f"exit code {death.exit_code}"
                if death.signum:
                    name = signal.Signals(death.signum).name
                message = f"decoding it ends the process with {name}"
                self._fail_row(job, row, Status.CRASHES_DECODER, name, message)
        return group

    # Threads that read images, where decoders do not

    def _read_groups(self) -> None:
        """Read the images of groups, one group after the other."""
        while (task := self._to_read.get()) is not None and not self._is_closing:
            job, first, stop = task
            try:
                self._read_group(job, first, stop)
            except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
                with self._state:
                    job.fail(int(job.rows[first]), error)
                    self._state.notify_all()

    def _read_group(self, job: Job, first: int, stop: int) -> None:
        """Read images into spool cells, and give out the rows of each cell as a group."""
        worker, slot, times = self._workers[job.worker], job.slot, LoaderTimes()
        pieces: list[bytes] = []
        size, key, fault = 0, None, None
        for place in range(first, stop):
            if job.is_abandoned or job.error is not None:
                with self._state:
                    self._count_done(job)
                return
            row = int(job.rows[place])
            if key is None or worker.image_key(row) != key:
                key, fault = worker.image_key(row), None
                started_at = time.perf_counter()
                try:
                    pieces.append(worker.read(row))
                    size += len(pieces[-1])
                except ImageFault as error:
                    fault = error
                times.add(time.perf_counter() - started_at, 0, 0 if fault else len(pieces[-1]))
            if fault is not None:
                slot.rows[place] = NO_ROW
                slot.images[place] = 0
                with self._state:
                    self._fail_row(job, row, fault.status, fault.error, str(fault))
                continue
            slot.starts[place], slot.stops[place] = size - len(pieces[-1]), size
            if size >= _CELL_BYTES and place + 1 < stop:
                with self._state:
                    job.num_open += 1
                self._spool_group(job, first, place + 1, pieces)
                first, pieces, size, key = place + 1, [], 0, None
        with self._state:
            self.times.add(times.read_s, 0, times.num_bytes)
        self._spool_group(job, first, stop, pieces)

    def _spool_group(self, job: Job, first: int, stop: int, pieces: Sequence[bytes]) -> None:
        """Write encoded images into a free spool cell, and give out their rows."""
        cell = self._cells.get()
        offset = cell << CELL_SHIFT
        for data in pieces:
            view = memoryview(data)
            while view:  # a write ends early after 2 GiB
                written = os.pwrite(self._spool, view, offset)
                offset, view = offset + written, view[written:]
        with self._state:
            if not self._is_closing:
                self._give_out([_Group(job, first, stop, cell)])
