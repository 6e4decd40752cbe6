"""A decoder: takes groups of rows from a pipe, and writes their images into shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from featx.images.decoder_channels import (
    BUFFER_SHIFT,
    MESSAGE,
    NO_BUFFER,
    NO_ROW,
    TASK,
    Channels,
    Kind,
    LoaderTimes,
    Slot,
    SlotLayout,
    error_bytes,
    fault_bytes,
    outage_bytes,
    read_range,
    send,
    warning_bytes,
)
from featx.images.decoder_warnings import ACCEPTED_DAMAGE
from featx.types import Array, ImageFault


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
    def keys(self) -> npt.NDArray[np.bytes_]:
        """(N,) keys of all rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of a loaded row."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of a loaded row."""

    def image_key(self, row: int) -> bytes:
        """Key of the image of a row; rows of one image in succession go to one decoder."""

    def read(self, row: int) -> bytes:
        """Read the encoded bytes of the image of a row."""

    def fill(
        self,
        row: int,
        read: Callable[[], bytes],
        out: Array,
        checksum: npt.NDArray[np.uint64],
        clock: DecodingClock,
    ) -> None:
        """Load a row."""

    def clear(self, out: Array) -> None:
        """Clear the place of a row that failed."""

    def warm_up(self) -> None:
        """Import what decoding needs, once for all decoders."""


class Decoder:
    """Loads groups of rows.

    It is the work of a decoder process, or of a thread where none can be forked.
    """

    def __init__(
        self,
        index: int,
        workers: Sequence[RowWorker],
        channels: Channels,
        collect_warnings: Callable[[], Callable[[], list[str]]],
    ) -> None:
        self._index, self._workers, self._channels = index, workers, channels
        self._collect_warnings = collect_warnings
        self._slots: dict[int, Slot] = {}

    def report_outage(self, text: str, since: float) -> None:
        """Tell the process of the model that a request for the row at hand waits."""
        table = self._channels.table
        group, row = int(table.groups[self._index]), int(table.rows[self._index])
        send(self._channels.results, Kind.OUTAGE, group, row, outage_bytes(text, since))

    def serve(self) -> None:
        """Load groups until the pipe of tasks ends, or after a group that a new decoder follows."""
        take_warnings = self._collect_warnings()
        tasks, results = self._channels.tasks, self._channels.results
        current = self._channels.table.rows[self._index : self._index + 1]
        since = self._channels.table.since[self._index : self._index + 1]
        groups = self._channels.table.groups
        file = tasks[self._index % len(tasks)]
        while len(record := os.read(file, TASK.size)) == TASK.size:
            group, number, is_last, first, stop, num_rows, buffer, offset = TASK.unpack(record)
            groups[self._index] = group
            worker, times, clock = self._workers[number], LoaderTimes(), DecodingClock(since)
            slot = self._slots.get(offset)
            if slot is None:  # it is mapped the first time
                layout = SlotLayout(num_rows, worker.shape, worker.dtype)
                slot = self._slots[offset] = layout.map(self._channels.slots, offset)
            for place in range(first, stop):
                row = int(slot.rows[place])
                if row == NO_ROW:
                    continue
                current[0] = row
                try:
                    read = self._reader(worker, row, slot, place, buffer, times)
                    checksum = slot.checksums[place : place + 1]
                    worker.fill(row, read, slot.images[place], checksum, clock)
                except ImageFault as fault:
                    worker.clear(slot.images[place])
                    send(results, Kind.FAILURE, group, row, fault_bytes(fault))
                except BaseException as error:  # noqa: BLE001 - raised in the process of the model
                    send(results, Kind.ERROR, group, row, error_bytes(error))
                    break
                if warnings := take_warnings():
                    send(results, Kind.WARNINGS, group, row, warning_bytes(warnings))
                    if any(text.startswith(ACCEPTED_DAMAGE) for text in warnings):
                        send(results, Kind.DAMAGED, group, row, b"")
            done = times.read_s, clock.seconds, times.num_bytes
            os.write(results, MESSAGE.pack(Kind.DONE, group, NO_ROW, 0, *done))
            current[0] = NO_ROW
            if is_last:
                return

    def _reader(
        self, worker: RowWorker, row: int, slot: Slot, place: int, buffer: int, times: LoaderTimes
    ) -> Callable[[], bytes]:
        """A function that returns the encoded bytes of a row, from their spool buffer if any."""

        def read() -> bytes:
            started_at = time.perf_counter()
            data = worker.read(row)
            times.add(time.perf_counter() - started_at, 0, len(data))
            return data

        def read_spool() -> bytes:
            start, stop = int(slot.starts[place]), int(slot.stops[place])
            return read_range(self._channels.spool, (buffer << BUFFER_SHIFT) + start, stop - start)

        return read if buffer == NO_BUFFER else read_spool
