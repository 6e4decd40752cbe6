"""Claims: which worker of a run computes which part.

A claim is a file that exists once for each part, so the first worker that creates it computes the
part. Its content is the number of the worker. A claim is never deleted: the driver rewrites those
of a worker that was lost with the number of its replacement.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from featx.pipeline.executors.worker_spec import WorkerSpec
from featx.storage import open_folder
from featx.types import Part

CLAIMS = "claims"
"""Name of the folder of all claims, in the folder of the workers."""

_LIST_S = 5.0
"""Seconds for which a worker relies on its last look at the claims of the others."""


class PartClaims:
    """Claims of a run as one worker sees them.

    Args:
        spec: worker spec, with the parts of the run.
        number: number of the worker.
    """

    def __init__(self, spec: WorkerSpec, number: int) -> None:
        self._spec = spec
        self._number = number
        self._disk = open_folder(spec.folder)
        self._order = parts_in_order(spec, number)
        self._listed_at = 0.0

    def inherited(self) -> list[Part]:
        """Missing parts that are claimed by this worker, in the order in which it computes them."""
        missing = self._spec.output.uncommitted(self._order)
        claimed = claimed_indices(self._spec)
        return [part for part in missing if part.index in claimed and self._owns(part)]

    def parts(self) -> Iterator[Part]:
        """Claim parts and yield them, at least one; ends early when few are left.

        The loader reads ahead across these parts. The last ones are for workers without a part.
        """
        while (part := self._next()) is not None:
            yield part
            if len(self._order) <= self._spec.num_workers:
                return

    def has_unclaimed(self) -> bool:
        """Return whether a missing part is not claimed."""
        self._list()
        return bool(self._order)

    def _next(self) -> Part | None:
        """Claim a part that neither is committed nor has a claim; None if there is none."""
        if time.monotonic() - self._listed_at > _LIST_S:
            self._list()
        while self._order:
            part = self._order.pop(0)
            path = _claim_path(self._spec, part)
            if self._disk.create(path, str(self._number)) or self._owns(part):
                return part
            self._list()  # another worker is at the same rows
        return None

    def _list(self) -> None:
        """Drop the parts that are committed or claimed by now."""
        claimed = claimed_indices(self._spec)
        missing = self._spec.output.uncommitted(self._order)
        self._order = [part for part in missing if part.index not in claimed]
        self._listed_at = time.monotonic()

    def _owns(self, part: Part) -> bool:
        """Return whether the claim of a part is of this worker."""
        return owner_of(self._spec, part) == self._number


def parts_in_order(spec: WorkerSpec, number: int) -> list[Part]:
    """Parts in the order of one worker: its own share first, so that neighbours stay together."""
    start = number % spec.num_workers * len(spec.parts) // spec.num_workers
    return [*spec.parts[start:], *spec.parts[:start]]


def claimed_indices(spec: WorkerSpec) -> set[int]:
    """Indices of the parts that are claimed, also of those that are committed."""
    return {int(path.name) for path in (spec.folder / CLAIMS).glob("[0-9]*")}


def owner_of(spec: WorkerSpec, part: Part) -> int | None:
    """Number of the worker that has claimed a part; None if that is not written yet."""
    with contextlib.suppress(OSError, ValueError):
        return int(_claim_path(spec, part).read_bytes())
    return None


def assign(spec: WorkerSpec, part: Part, number: int) -> None:
    """Claim a part for a worker, whoever has it."""
    open_folder(spec.folder).replace(_claim_path(spec, part), str(number).encode())


def _claim_path(spec: WorkerSpec, part: Part) -> Path:
    """Path of the claim of a part."""
    return spec.folder / CLAIMS / str(part.index)
