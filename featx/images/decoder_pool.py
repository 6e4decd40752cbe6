"""Decoders in child processes, seen from the process of the model: rows go out, batches come back.

If a decoder crashes or hangs, its supervisor reports the row and forks another one, and the group
of the row is given out once more, the row by itself. An image that ends two decoders fails. A
decoder that is killed between two groups may have taken one without a trace; the supervisor then
ends all decoders, so that exactly the groups without a report are missing, and these are given out
again.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.base import CRASHES, delayed_signals, name_text, open_above_standard_streams
from featx.errors import RunError
from featx.images.decoder import Decoder, RowWorker
from featx.images.decoder_channels import (
    ATOMIC_BYTES,
    MESSAGE,
    NO_BUFFER,
    NO_ROW,
    TASK,
    Cause,
    Channels,
    Death,
    DecoderTable,
    Group,
    Job,
    Kind,
    LoaderTimes,
    Slot,
    SlotLayout,
    Spool,
    anonymous_file,
)
from featx.images.decoder_supervisor import RESUME, START_ALL, Supervisor
from featx.images.decoder_warnings import collect_warnings
from featx.storage import s3_outage
from featx.types import NO_IMAGE, Array, Failure, ImageFault, Status

CAN_FORK = sys.platform.startswith("linux")
"""Whether decoders are processes. Elsewhere they are threads: on macOS, a fork of a process that
has used its frameworks crashes."""

GROUP_ROWS = 32
"""Largest number of rows that a decoder takes at once. A group costs the process of the model
about 60 µs, whatever its size."""

ATTEMPTS = 2
"""Number of decoders that an image may end before its rows fail."""

FEW_ROWS = 64
"""Number of rows up to which one decoder may be enough."""

_PATIENCE_S = 0.05
"""Seconds that a job of few rows is awaited before all decoders are started. A start takes about as
long: each fork copies the page tables of a process that has imported torch."""

KEPT_BATCHES = 4
"""Usual number of finished jobs whose images stay in shared memory."""

_BUFFER_BYTES = 8 << 20
"""Bytes of a spool buffer from which on no further image is added to its group."""

_END_LIMIT_S = 5.0
"""Seconds that the end of a pool waits for images that are being read."""

_KILLED = (
    "was killed, by a user or because the machine ran out of memory. Nothing committed is lost; "
    "free some memory and give the same command again."
)


class DecoderPool:
    """Decoders that load rows; a context manager. It forks nothing before it is asked for a row.

    One decoder starts then. The others follow if there are more than FEW_ROWS rows, if a job takes
    longer than their start, or if images are kept together.

    Args:
        workers: workers that jobs name by their numbers.
        limit_s: seconds that decoding a row may take, or None for no limit.
        reads_in_decoders: whether decoders read the encoded images; otherwise threads of this
            process do.
        keeps_images_together: whether rows of the same image in succession go to the same decoder.
        pinned_for: CUDA device for which slots are page-locked; None if they are not.
        num_kept: number of finished jobs whose images stay in shared memory; those of further ones
            are copied. None copies none.
        can_fork: whether decoders are processes; otherwise they are threads, and an image that
            crashes or hangs its decoder ends the run. None is CAN_FORK.

    Attributes:
        times: seconds and bytes so far.
        on_warnings: function that receives the row and the warnings of its image.
    """

    def __init__(
        self,
        workers: Sequence[RowWorker],
        count: int,
        limit_s: float | None = None,
        reads_in_decoders: bool = False,
        keeps_images_together: bool = False,
        pinned_for: torch.device | None = None,
        num_kept: int | None = KEPT_BATCHES,
        can_fork: bool | None = None,
    ) -> None:
        self.times = LoaderTimes()
        self.on_warnings: Callable[[int, list[str]], None] = lambda row, messages: None
        self._workers, self._count, self._limit_s = workers, count, limit_s
        self._reads_in_decoders = reads_in_decoders
        self._keeps_images_together = keeps_images_together
        self._pinned_for, self._num_kept = pinned_for, num_kept
        self._can_fork = CAN_FORK if can_fork is None else can_fork
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._groups: dict[int, Group] = {}
        self._num_groups = 0
        self._unsent: list[deque[bytes]] = []
        self._attempts: dict[tuple[int, bytes], list[Status | None]] = {}
        self._faults: dict[tuple[int, bytes], tuple[ImageFault, int]] = {}
        self._free_slots: dict[tuple[int, int], list[Slot]] = {}
        self._lent_slots: dict[tuple[int, int], set[int]] = {}
        self._slots_end = 0
        self._pinned: dict[int, Array | None] = {}  # None: it could not be
        self._to_read: queue.SimpleQueue[tuple[Job, int, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pid: int | None = None
        self._owner: int | None = None
        self._num_started = 0
        self._num_begun = 0
        self._is_closing = False

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(self, *error: object) -> None:
        """End all decoders; batches that were handed out stay valid."""
        # Workers hold the source, whose files must not stay open until garbage is collected.
        self._workers = ()
        self.on_warnings = lambda row, messages: None
        if self._num_started and self._owner != os.getpid():
            return  # in a forked child, to which the decoders do not belong
        with self._state:
            self._is_closing = True
            if not self._num_started:
                return
            os.close(self._control)
            for file in self._tasks:
                os.close(file)
        if self._pid is not None:
            # The kernel ends the decoders when their parent is gone. In a process that ignores
            # SIGCHLD, a child that has ended is gone as well.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
        for _ in self._threads:
            self._to_read.put(None)
        self._spool.end_waiting(len(self._threads))
        until = time.monotonic() + _END_LIMIT_S
        for thread in self._threads[:-1]:
            thread.join(max(0.0, until - time.monotonic()))
        has_hung = any(thread.is_alive() for thread in self._threads[:-1])
        if self._pid is None and not has_hung:
            os.close(self._channels.results)
        for thread in self._threads[-1:]:  # the collector, if all could be started
            thread.join(max(0.0, until - time.monotonic()))
        for images in self._pinned.values():
            if images is not None:
                with torch.cuda.device(self._pinned_for):
                    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                    runtime.cudaHostUnregister(images.ctypes.data)
        self._free_slots.clear()
        self._groups.clear()
        if any(thread.is_alive() for thread in self._threads):
            return  # it would write into another file that gets the number of a closed one
        files = *self._channels.tasks, self._results, self._channels.slots, self._channels.spool
        for file in files:
            os.close(file)

    def begin(self, worker: int, rows: npt.NDArray[np.int64], num_places: int) -> Job:
        """Start loading rows.

        Args:
            rows: (n,) rows, n > 0.
            num_places: number of places B of the batch, at least n.

        Raises:
            RunError: no decoder can be started.
        """
        shape, dtype = self._workers[worker].shape, self._workers[worker].dtype
        layout = SlotLayout(num_places, shape, dtype)
        with self._state:
            if not self._num_started:
                # An interrupt during a fork is lost, as Python ignores what its callbacks raise.
                with delayed_signals():
                    self._start()

            # A slot that is free, or a new one at the end of the file.
            name = (worker, num_places)
            self._lent_slots.setdefault(name, set())
            if free := self._free_slots.setdefault(name, []):
                slot = free.pop()
            else:
                offset, self._slots_end = self._slots_end, self._slots_end + layout.num_bytes
                os.ftruncate(self._channels.slots, self._slots_end)
                slot = layout.map(self._channels.slots, offset)
            slot.rows[: len(rows)] = rows
            slot.checksums[: len(rows)] = NO_IMAGE
            job = Job(worker, rows, slot, layout)

            self._num_begun += len(rows)
            # An image must not move to another decoder, which would decode it once more.
            if self._num_begun > FEW_ROWS or self._keeps_images_together:
                self._start_all()

            # First place of each group, and the place after the last one.
            if self._keeps_images_together:
                images = [self._image_of(job, row) for row in rows.tolist()]
                starts = [0, *(i for i in range(1, len(rows)) if images[i] != images[i - 1])]
            else:
                size = max(1, min(GROUP_ROWS, num_places // (2 * self._count)))
                starts = [*range(0, len(rows), size)]
            spans = list(itertools.pairwise([*starts, len(rows)]))
            job.num_open = len(spans)
            self._fail_known(job, 0, len(rows))
            if self._reads_in_decoders:
                self._give_out(Group(job, first, stop, NO_BUFFER) for first, stop in spans)
            else:
                for first, stop in spans:
                    self._to_read.put((job, first, stop))
            return job

    def finish(self, job: Job) -> tuple[torch.Tensor, npt.NDArray[np.uint64]]:
        """Wait for the rows of a job.

        The images lie in shared memory, without a copy, as long as no more than `num_kept` of them
        are kept. Their memory is used again when the tensor and all its views are gone.

        Returns:
            (B, C, H, W) images, and (n,) checksums of the encoded bytes. The images of failed rows
            are zero, the places after the last row hold anything.

        Raises:
            RunError: reading fails repeatedly, memory is exhausted, or decoders are killed.
        """

        def is_done() -> bool:
            return not job.num_open or self._error is not None or job.error is not None

        with self._state:
            if not self._state.wait_for(is_done, _PATIENCE_S):
                self._start_all()
                self._state.wait_for(is_done)
        slot, name = job.slot, (job.worker, job.layout.num_rows)
        if job.error is not None:
            raise job.error[1]
        if self._error is not None:
            raise self._error
        job.failures.sort(key=lambda failure: failure.row)
        checksums = slot.checksums[: len(job.rows)].copy()
        if self._num_kept is not None and len(self._lent_slots[name]) >= self._num_kept:
            images = torch.from_numpy(slot.images).clone()
            self._free_slots[name].append(slot)
            return images, checksums
        if self._pinned_for is not None and slot.offset not in self._pinned:
            self._pin(slot, self._pinned_for)
        # A view of its own: torch keeps this array alive, and the slot is free when it is not.
        array = slot.images.view()
        lent, free = self._lent_slots[name], self._free_slots[name]
        lent.add(slot.offset)
        weakref.finalize(array, _take_back, slot, lent, free).atexit = False
        return torch.from_numpy(array), checksums

    def abandon(self, job: Job) -> None:
        """Forget a job whose images are no longer needed."""
        with self._state:
            job.is_abandoned = True
            if not job.num_open and not self._is_closing:
                self._free_slots[job.worker, job.layout.num_rows].append(job.slot)

    # Slots

    def _pin(self, slot: Slot, device: torch.device) -> None:
        """Page-lock a slot for CUDA, so that copies from it are asynchronous."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # On the current device, often the first one, CUDA would take some 500 MB for this process.
        with torch.cuda.device(device):
            code = runtime.cudaHostRegister(slot.images.ctypes.data, slot.images.nbytes, 0)
            if int(code) == 0:
                self._pinned[slot.offset] = slot.images
                return
            self._pinned[slot.offset] = None  # copies are slower then, and right
            # CUDA reports the error again at the next launch of this thread, which must not be one
            # of the model.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)

    # Groups on their way to the decoders

    def _give_out(self, groups: Iterable[Group]) -> None:
        """Hand groups to the decoders; the lock is held."""
        for group in groups:
            number = self._num_groups = (self._num_groups + 1) & 0xFFFFFFFF
            self._groups[number] = group
            job, pipe = group.job, 0
            if len(self._tasks) > 1:  # with one pipe any decoder takes the group
                _, key = self._image_of(job, int(job.rows[group.first]))
                pipe = zlib.crc32(key) % self._count
            record = TASK.pack(
                number, job.worker, group.is_last, group.first, group.stop, job.layout.num_rows,
                group.buffer, job.slot.offset,
            )  # fmt: skip
            self._unsent[pipe].append(record)
        self._send()

    def _send(self) -> None:
        """Write as many records as the pipes take; the lock is held.

        This process must not wait at a full pipe: decoders take records only as long as it follows
        their messages.
        """
        for file, records in zip(self._tasks, self._unsent, strict=True):
            with contextlib.suppress(BlockingIOError):
                while records:
                    count = min(len(records), ATOMIC_BYTES // TASK.size)
                    os.write(file, b"".join(records[i] for i in range(count)))
                    for _ in range(count):
                        records.popleft()

    def _image_of(self, job: Job, row: int) -> tuple[int, bytes]:
        """Number of the worker of a job, and key of the image of a row."""
        return job.worker, self._workers[job.worker].image_key(row)

    # Processes and threads

    def _start(self) -> None:
        """Create the pipes and fork the supervisor, which starts one decoder; the lock is held."""
        num_pipes = self._count if self._keeps_images_together else 1
        with open_above_standard_streams():  # a decoder replaces its stderr
            pipes = [os.pipe() for _ in range(num_pipes)]
            self._results, results_in = os.pipe()
            control_out, self._control = os.pipe()
            self._spool = Spool(2 * self._count + 2)
            slots = anonymous_file("featx-slots")
        self._tasks = [out for _, out in pipes]
        for file in self._tasks:
            os.set_blocking(file, False)
        self._unsent = [deque() for _ in pipes]
        self._channels = Channels(
            tasks=[into for into, _ in pipes],
            results=results_in,
            slots=slots,
            spool=self._spool.file,
            table=DecoderTable(self._count),
        )
        self._owner = os.getpid()
        if self._can_fork:
            try:
                self._pid = self._fork_supervisor(control_out)
            except RunError:
                ends = results_in, self._results, control_out, self._control
                for file in (*itertools.chain(*pipes), *ends, slots, self._spool.file):
                    os.close(file)
                raise
            os.close(results_in)
        else:
            for index in range(self._count):
                workers = [copy.copy(worker) for worker in self._workers]
                decoder = Decoder(index, workers, self._channels, collect_warnings)
                self._start_thread(decoder.serve)
        os.close(control_out)
        self._num_started = 1 if self._can_fork else self._count
        if not self._reads_in_decoders:
            for _ in range(self._count):
                self._start_thread(self._read_groups)
        self._start_thread(self._collect)

    def _start_all(self) -> None:
        """Start all decoders; the lock is held."""
        if self._num_started < self._count:
            self._num_started = self._count
            self._order(START_ALL)

    def _fork_supervisor(self, control: int) -> int:
        """Fork the supervisor and return its process id."""
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of a fork in a process with threads. The child takes no lock
                # that one of them may have held: it only uses its own pipes, memory and decoders.
                if sys.version_info >= (3, 12):
                    warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            raise _not_started_error(error.strerror) from error
        if pid == 0:
            try:
                for file in (self._control, self._results, *self._tasks):
                    os.close(file)
                Supervisor(self._workers, self._channels, self._limit_s, control).run()
            finally:
                os._exit(1)
        return pid

    def _order(self, order: bytes) -> None:
        """Give the supervisor an order, unless it is gone, which `_collect` reports."""
        if self._pid is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, order)

    def _start_thread(self, work: Callable[[], None]) -> None:
        """Start a thread that ends with the pool, or with the process if it hangs."""
        thread = threading.Thread(target=work, name="featx-loader", daemon=True)
        thread.start()
        self._threads.append(thread)

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
        if kind == Kind.WARNINGS:
            self.on_warnings(row, pickle.loads(content))
            return
        if kind == Kind.NOT_STARTED:
            raise _not_started_error(content.decode())
        with self._state:
            if self._is_closing:
                return
            if kind == Kind.DEATH:
                self._follow_death(group, pickle.loads(content))
                return
            job = self._groups[group].job
            if kind == Kind.DONE:
                done = self._groups.pop(group)
                if done.buffer != NO_BUFFER:
                    self._spool.release(done.buffer)
                waiting = (each for each in self._groups.values() if each.has_waited)
                if done.has_waited and job.error is None and not any(waiting):
                    s3_outage.report_end()
                self._count_done(job)
                self.times.add(*times)
                self._send()  # decoders have taken records, so that pipes may have room
            elif kind == Kind.OUTAGE:
                self._groups[group].has_waited = True
                s3_outage.report(*pickle.loads(content))
            elif kind == Kind.DAMAGED:
                job.damaged.add(row)
            elif kind == Kind.FAILURE:
                status, error, message = pickle.loads(content)
                self._fail_row(job, row, ImageFault(Status(status), message, error))
            elif kind == Kind.ERROR:
                job.fail(row, pickle.loads(content))
                self._state.notify_all()

    def _count_done(self, job: Job) -> None:
        """Count a group of a job as done; the lock is held."""
        job.num_open -= 1
        if not job.num_open:
            if job.is_abandoned:
                self._free_slots[job.worker, job.layout.num_rows].append(job.slot)
            self._state.notify_all()

    # Rows that fail, and decoders that end; the lock is held in all of these

    def _fail_row(self, job: Job, row: int, fault: ImageFault) -> None:
        key = bytes(self._workers[job.worker].keys[row])
        job.failures.append(Failure(row, key, fault.status, fault.error, str(fault)))

    def _fail_place(self, job: Job, place: int, fault: ImageFault) -> None:
        """Record the row at a place as failed, which no decoder loads then."""
        job.slot.rows[place] = NO_ROW
        self._workers[job.worker].clear(job.slot.images[place])
        self._fail_row(job, int(job.rows[place]), fault)

    def _fail_known(self, job: Job, first: int, stop: int) -> None:
        """Fail the rows whose image has ended too many decoders, so that it ends no more."""
        if not self._faults:
            return
        for place in range(first, stop):
            known = self._faults.get(self._image_of(job, int(job.rows[place])))
            if known is not None and job.slot.rows[place] != NO_ROW:
                fault, job.slot.checksums[place] = known
                self._fail_place(job, place, fault)

    def _follow_death(self, number: int, death: Death) -> None:
        """Give out again what a decoder has left."""
        if death.row == NO_ROW:
            # All decoders have ended. What they have not taken is given out again with the rest.
            for file, records in zip(self._channels.tasks, self._unsent, strict=True):
                records.clear()
                while select.select([file], [], [], 0)[0]:
                    os.read(file, 1 << 16)
            groups, self._groups = self._groups, {}
            for group in groups.values():
                self._forget_results(group)
            self._give_out(groups.values())
            self._order(RESUME)
            return
        if number not in self._groups:
            return  # it died after it had reported the group
        group = self._groups.pop(number)
        place = group.place_of(death.row)
        self._blame(group.job, place, death)
        self._forget_results(group)
        pieces = group.split(place)
        group.job.num_open += len(pieces) - 1
        if group.buffer != NO_BUFFER:
            self._spool.share(group.buffer, len(pieces) - 1)
        self._give_out(pieces)

    def _blame(self, job: Job, place: int, death: Death) -> None:
        """Count the end of a decoder against the image that it was loading."""
        image = self._image_of(job, death.row)
        attempts = self._attempts.setdefault(image, [])
        if death.cause == Cause.STOPPED:
            return
        if death.cause == Cause.TOO_LATE:
            message = f"decoding takes longer than data.timeout_s={self._limit_s:g}"
            fault = ImageFault(Status.TIMEOUT, message, "TimeoutError")
        elif death.signum == 0 or death.signum in CRASHES:
            name = f"exit code {death.exit_code}"
            if death.signum:
                name = signal.Signals(death.signum).name
            message = f"decoding it ends the process with {name}"
            fault = ImageFault(Status.CRASHES_DECODER, message, name)
        elif None in attempts:
            raise RunError(
                f"the process that decodes {name_text(image[1])} {_KILLED} A smaller "
                "data.max_pixels makes large images failed rows."
            )
        else:
            attempts.append(None)
            return
        attempts.append(fault.status)
        if len(attempts) - attempts.count(None) >= ATTEMPTS:
            self._faults[image] = fault, int(job.slot.checksums[place])

    def _forget_results(self, group: Group) -> None:
        """Prepare a group for being given out again: what decoders have reported comes again."""
        job, places = group.job, range(group.first, group.stop)
        rows = {int(job.rows[i]) for i in places if job.slot.rows[i] != NO_ROW}
        job.failures = [failure for failure in job.failures if failure.row not in rows]
        job.damaged -= rows
        self._fail_known(job, group.first, group.stop)

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
        """Read images into spool buffers, and give out the rows of each buffer as a group."""
        worker, slot, times = self._workers[job.worker], job.slot, LoaderTimes()
        pieces: list[bytes] = []
        size, key, fault = 0, None, None
        for place in range(first, stop):
            if job.is_abandoned or job.error is not None:
                with self._state:
                    self._count_done(job)
                return
            row = int(job.rows[place])
            if slot.rows[place] == NO_ROW:
                continue
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
                with self._state:
                    self._fail_place(job, place, fault)
                continue
            slot.starts[place], slot.stops[place] = size - len(pieces[-1]), size
            if size >= _BUFFER_BYTES and place + 1 < stop:
                with self._state:
                    job.num_open += 1
                self._spool_group(job, first, place + 1, pieces)
                first, pieces, size, key = place + 1, [], 0, None
        with self._state:
            self.times.add(times.read_s, 0, times.num_bytes)
        self._spool_group(job, first, stop, pieces)

    def _spool_group(self, job: Job, first: int, stop: int, images: Sequence[bytes]) -> None:
        """Write encoded images into a spool buffer, and give out their rows."""
        buffer = self._spool.write(images)
        with self._state:
            if not self._is_closing:
                self._give_out([Group(job, first, stop, buffer)])


def _not_started_error(reason: str | None) -> RunError:
    """Error for a process that could not be forked."""
    return RunError(
        f"no process that decodes images can be started: {reason}. Free some memory, or allow more "
        "processes (ulimit -u), and give the same command again."
    )


def _take_back(slot: Slot, lent: set[int], free: list[Slot]) -> None:
    """Let a slot be used again whose images are no longer referenced."""
    # Python calls this at any point, perhaps in a thread that holds the lock of the pool: each of
    # the two operations is whole without it.
    lent.discard(slot.offset)
    free.append(slot)
