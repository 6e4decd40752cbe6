"""Batch sink of job=stats: sums the rows of a run, batch by batch, into a tree of moments."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.moments_tree import MomentsTree, spans_in
from featx.analysis.statistics.part_moments import PartMoments, StatsLayer
from featx.analysis.statistics.position_norms import PartNorms
from featx.analysis.statistics.stats_file import PARTS_FOLDER, STATS_FILE, stored_resume_state
from featx.base import differences, record_use, synchronise
from featx.errors import InternalError, RunError
from featx.layers import positions_last
from featx.pipeline import RunContext, failures_of
from featx.storage import AtomicFolder
from featx.store import Heartbeat, read_listing
from featx.types import UNKNOWN_IMAGE, Batch, Failure, Listing, Part

if TYPE_CHECKING:
    import torch

    from featx.engine import Engine

Values = tuple[Mapping[str, "torch.Tensor"], list[Failure]]
"""Values of a batch: dataset name -> (B, ...) on the device, and the rows that failed."""

Commit = Callable[
    [Part, Sequence[Failure], Mapping[str, Moments], npt.NDArray[np.uint64]], Sequence[Failure]
]
"""Function that commits the moments of a part and returns the failures of the part as committed."""


class StatsSink:
    """Batch sink that sums batches to moments on the device.

    Args:
        context: the run.
        layers: layers whose statistics are computed.
        axes: layer -> axis of its features, if each position is an observation.
        commit: commits a part.
        heartbeat: heartbeat, which reports the part that is computed.

    Attributes:
        underflow_rows: underflow rows per layer; always empty, because nothing is cast to float16.
        seconds: seconds spent in sums, in addition to the stages of every run.
    """

    def __init__(
        self,
        context: RunContext,
        layers: Sequence[StatsLayer],
        axes: Mapping[str, int],
        commit: Commit,
        heartbeat: Heartbeat,
    ) -> None:
        self.underflow_rows: Counter[str] = Counter()
        self.seconds = {"statistics": 0.0}
        self._context = context
        self._layers = layers
        self._axes = axes
        self._commit = commit
        self._heartbeat = heartbeat
        self._part: Part | None = None
        self._moments: dict[str, PartMoments] = {}
        self._norms: dict[str, PartNorms] = {}
        self._failures: list[Failure] = []
        self._checksums = np.empty(0, dtype=np.uint64)

    def compute(self, engine: Engine, batch: Batch) -> Values:
        """Compute the values of a batch on the device."""
        labels, keys = self._context.labels_of(batch), self._context.keys_of(batch)
        rows = engine.rows(batch.images, labels, on_device=True, keys=keys)
        return rows.features, failures_of(self._context, engine, batch, rows.finite)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Values]) -> list[Failure]:
        """Add the next batch of a part.

        Returns:
            the rows of the batch that failed.
        """
        if self._part is None:
            self._part, self._failures = part, []
            self._checksums = np.full(len(part), UNKNOWN_IMAGE, dtype=np.uint64)
            self._moments = {layer.spec.name: PartMoments(part, layer) for layer in self._layers}
            self._norms = {
                layer.spec.name: PartNorms(part, layer)
                for layer in self._layers
                if layer.tokens is not None
            }
            self._heartbeat.begin(part)
        values, failures = computed()
        # The values may come from another CUDA stream: their memory must not be reused before the
        # sums of this stream are complete.
        record_use(values)
        started_at = time.perf_counter()
        failed = [failure.row for failure in failures]
        for name, moments in self._moments.items():
            rows = values[name][: batch.count]
            axis = self._axes.get(name)
            rows = rows if axis is None else positions_last(rows, axis)
            moments.add(batch.start, rows, failed)
        for name, norms in self._norms.items():
            norms.add(batch.start, values[name], batch.count, failed)
        synchronise(self._context.engine.device)
        self.seconds["statistics"] += time.perf_counter() - started_at
        self._failures += failures
        if batch.checksums is not None:
            first = batch.start - part.start
            self._checksums[first : first + batch.count] = batch.checksums
        return failures

    def finish_part(self) -> Callable[[], Sequence[Failure]]:
        """Finish the part whose last batch was taken.

        Returns:
            function that commits the part.
        """
        if self._part is None:
            raise InternalError("no batch of a part was taken")
        moments_of_layer = {name: moments.finish() for name, moments in self._moments.items()}
        for name, norms in self._norms.items():
            moments_of_layer[name] = replace(moments_of_layer[name], norms=norms.finish())
        synchronise(self._context.engine.device)  # another thread, with its own stream, commits
        part, failures, checksums = self._part, self._failures, self._checksums
        self._part, self._moments, self._norms, self._failures = None, {}, {}, []
        return functools.partial(self._commit_part, part, failures, moments_of_layer, checksums)

    def _commit_part(
        self,
        part: Part,
        failures: list[Failure],
        moments: dict[str, Moments],
        checksums: npt.NDArray[np.uint64],
    ) -> Sequence[Failure]:
        """Commit a part and report it."""
        committed_failures = self._commit(part, failures, moments, checksums)
        self._heartbeat.record_commit(part)
        return committed_failures


@dataclass(frozen=True)
class StatsPartTask:
    """Part task of a distributed run: how workers compute and commit parts of statistics.

    Attributes:
        dtype: dtype of the engine's values.
        settings: entries of the fingerprint in addition to those of every run.
        layers: layers whose statistics are computed.
        axes: layer -> axis of its features, if each position is an observation.
    """

    dtype: str
    settings: Mapping[str, Any]
    layers: tuple[StatsLayer, ...]
    axes: Mapping[str, int]

    @property
    def datasets(self) -> frozenset[str]:
        """Names of the datasets that are computed."""
        return frozenset(layer.spec.name for layer in self.layers)

    def check(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        """Check that the folder contains no statistics with other settings."""
        stored = stored_resume_state(root)
        if stored is not None and differences(stored.settings, fingerprint):
            raise RunError(
                f"the statistics in {root} have other settings than this run: another run has "
                "overwritten them. Run the same command again."
            )

    def listing(self, root: Path, num_rows: int, identity: str) -> Listing | None:
        """Read the listing that the driver has written for its workers."""
        return read_listing(root / PARTS_FOLDER, num_rows, identity)

    def missing(self, root: Path, parts: Sequence[Part]) -> list[Part]:
        """Return those of some parts that no process has committed yet."""
        spans = spans_in(root / PARTS_FOLDER)
        return [
            part
            for part in parts
            if not any(start <= part.start and part.stop <= stop for start, stop in spans)
        ]

    def sink(self, context: RunContext, root: Path, heartbeat: Heartbeat) -> StatsSink:
        """Create the batch sink of a worker."""
        commit = tree_of(context, self.layers, AtomicFolder(root)).commit
        return StatsSink(context, self.layers, self.axes, commit, heartbeat)


def tree_of(context: RunContext, layers: Sequence[StatsLayer], disk: AtomicFolder) -> MomentsTree:
    """Return the files of the statistics of a run in a folder."""
    return MomentsTree(
        disk,
        disk.root / STATS_FILE,
        context.header,
        len(context.listing),
        layers,
        context.parallelism.threads,
    )
