"""Recomputes some rows of a store in place; all other rows keep their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.errors import require
from featx.pipeline.feature_sink import Rows, compute_rows
from featx.pipeline.run_context import RunContext
from featx.store import PartBuilder, StoreSession
from featx.types import Batch, Failure, Part

if TYPE_CHECKING:
    from featx.engine import Engine


def changed_failures(
    context: RunContext, failures: Sequence[Failure]
) -> tuple[list[int], list[int]]:
    """Read and decode the images of failed rows again.

    Returns:
        rows whose image can be decoded now, and rows that fail for another reason than before.
    """
    readable, others = [], []
    results = context.loader.results([failure.row for failure in failures])
    for before, now in zip(failures, results, strict=True):
        if not isinstance(now, Failure):
            readable.append(before.row)
        elif (now.status, now.error, now.message) != (before.status, before.error, before.message):
            others.append(before.row)
    return readable, others


class RetrySink:
    """Batch sink that recomputes rows and replaces them in their parts.

    Such rows failed before, belong to changed images, or were lost with a damaged chunk. The last
    bits of a row depend on its batch, so the batches of the original run are computed again as a
    whole, but only the requested rows are replaced.

    Args:
        context: run context.
        session: write session of the store, whose features lie in parts.
        rows: rows of the listing. For a part of which a repair kept pieces, all rows that the
            pieces lack must be among them.

    Attributes:
        seconds: always empty, as this sink has no stages of its own.
    """

    def __init__(self, context: RunContext, session: StoreSession, rows: Sequence[int]) -> None:
        self.seconds: dict[str, float] = {}
        self._context = context
        self._session = session
        self._rows = frozenset(rows)
        self._parts = {part.index: part for part in session.parts_with(rows)}
        self._spans = [span for part in self._parts.values() for span in self._batches_of(part)]
        self._num_taken = 0
        self._features: dict[int, dict[str, npt.NDArray[Any]]] = {}
        self._checksums: dict[int, np.uint64] = {}
        self._failures: list[Failure] = []
        self._damaged: set[int] = set()

    @property
    def num_rows(self) -> int:
        """Number of rows in the batches that are computed."""
        return sum(len(span) for span in self._spans)

    @property
    def num_committed(self) -> int:
        """Number of rows in batches that were taken."""
        return sum(len(span) for span in self._spans[: self._num_taken])

    @property
    def num_failed(self) -> int:
        """Always 0, so that failures do not end the run."""
        return 0  # the rows are few, and most have failed before: no reason to stop

    def missing(self) -> list[Part]:
        """Batches that contain requested rows.

        Each is a `Part` with the rows of the batch and the index of its part in the store. The part
        is replaced when its last batch was taken.
        """
        return self._spans

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """Compute the features of a batch."""
        return compute_rows(self._context, engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Rows]) -> list[Failure]:
        """Keep the requested rows of a batch; return the failures among them."""
        rows = computed()
        for row in self._rows.intersection(range(batch.start, batch.start + batch.count)):
            position = row - batch.start
            self._features[row] = {name: values[position] for name, values in rows.features.items()}
            if rows.checksums is not None:
                self._checksums[row] = rows.checksums[position]
        failed = [failure for failure in rows.failures if failure.row in self._rows]
        self._failures += failed
        self._damaged |= self._rows.intersection(rows.damaged)
        return failed

    def finish_part(self) -> Callable[[], None]:
        """Return a function that replaces the part, or does nothing before its last batch."""
        index = self._spans[self._num_taken].index
        self._num_taken += 1
        if self._num_taken < len(self._spans) and self._spans[self._num_taken].index == index:
            return lambda: None  # more batches of the same part follow
        features, failures, sums = self._features, self._failures, self._checksums
        damaged = self._damaged
        self._features, self._failures, self._checksums, self._damaged = {}, [], {}, set()
        part = self._parts[index]
        return functools.partial(self._replace, part, features, failures, sums, damaged)

    def _batches_of(self, part: Part) -> list[Part]:
        """Batches of a part that contain requested rows, aligned as in the original run."""
        size = self._context.engine.compute.batch_size
        inside = [row for row in self._rows if part.start <= row < part.stop]
        starts = {row - (row - part.start) % size for row in inside}
        return [Part(part.index, i, min(i + size, part.stop)) for i in sorted(starts)]

    def _replace(
        self,
        part: Part,
        features: Mapping[int, Mapping[str, npt.NDArray[Any]]],
        failures: Sequence[Failure],
        checksums: Mapping[int, np.uint64],
        damaged: Collection[int],
    ) -> None:
        """Replace a part by a copy with new values in the rows that were computed."""
        stored, before, images, damaged_before = self._session.read_part(part)
        missing = set(self._session.missing_rows(part))
        require(missing <= features.keys(), "a row that no piece holds was not computed")
        for row, checksum in checksums.items():
            images[row - part.start] = checksum
        for row, values in features.items():
            for name, value in values.items():
                stored[name][row - part.start] = value
        kept = [failure for failure in before if failure.row not in features]
        builder = PartBuilder(part, self._context.specs)
        all_damaged = {*(damaged_before - features.keys()), *damaged}
        builder.add(part.start, stored, [*kept, *failures], images, all_damaged)
        self._session.replace(builder)
