"""Rows that decoders load together: jobs, and the groups into which they are divided."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from featx.images.shared_memory import Slot, SlotLayout
from featx.types import Failure


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


@dataclass(frozen=True, eq=False)
class Group:
    """Some successive rows of a job, which one decoder loads.

    Attributes:
        job: their job.
        first: first place in the slot.
        stop: place after the last one.
        buffer: spool buffer with their encoded bytes, or NO_BUFFER.
        is_last: whether a new decoder takes the place of the one that has loaded them.
    """

    job: Job
    first: int
    stop: int
    buffer: int
    is_last: bool = False

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
