"""Batch sink that stores features: batches become parts of a store."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.errors import InternalError, RunError
from featx.pipeline.row_failures import failures_of
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_observer import RunObserver
from featx.storage import open_folder
from featx.store import (
    Heartbeat,
    Manifest,
    PartBuilder,
    begin_part,
    layout,
    part_names,
    publish_part,
    read_listing,
    read_manifest,
)
from featx.types import Batch, Failure, LayerSpec, Listing, Part

if TYPE_CHECKING:
    from featx.engine import Engine


@dataclass(frozen=True)
class Rows:
    """Features of the n rows of a batch.

    Attributes:
        features: dataset name -> (n, ...) array in the store's dtype (bfloat16 as uint16 bits).
        failures: failed rows of the batch.
        underflow_rows: layer -> number of underflow rows: their largest magnitude is below 6.1e-5,
            the smallest normal float16.
        checksums: (n,) checksums of the encoded images, or None if the batch has none.
        damaged: rows whose images are damaged and were accepted.
    """

    features: dict[str, npt.NDArray[Any]]
    failures: list[Failure]
    underflow_rows: Counter[str]
    checksums: npt.NDArray[np.uint64] | None = None
    damaged: Collection[int] = ()


class FeatureSink:
    """Batch sink of a run whose features are stored.

    Args:
        context: run context.
        begin: begins a part with some datasets.
        commit: commits a part; returns the failures of the part that the store holds afterwards,
            which another process may have committed first.
        heartbeat: heartbeat that records the current part.
        observer: notified of each batch.

    Attributes:
        underflow_rows: layer -> number of underflow rows so far.
        seconds: always empty, as features have no stages of their own.
    """

    def __init__(
        self,
        context: RunContext,
        begin: Callable[[Part, Sequence[LayerSpec]], PartBuilder],
        commit: Callable[[PartBuilder], Sequence[Failure]],
        heartbeat: Heartbeat,
        observer: RunObserver | None = None,
    ) -> None:
        self.underflow_rows: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._begin = begin
        self._commit = commit
        self._heartbeat = heartbeat
        self._observer = observer or RunObserver()
        self._context = context
        self._builder: PartBuilder | None = None

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """Compute the features of a batch."""
        return compute_rows(self._context, engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Rows]) -> list[Failure]:
        """Add the next batch to the current part; return the failures of its rows."""
        if self._builder is None:
            self._builder = self._begin(part, self._context.specs)
            self._heartbeat.begin(part)
        rows = computed()
        self._builder.add(batch.start, rows.features, rows.failures, rows.checksums, rows.damaged)
        self.underflow_rows += rows.underflow_rows
        self._observer.batch_computed(batch, rows.features, rows.failures)
        return rows.failures

    def finish_part(self) -> Callable[[], Sequence[Failure]]:
        """Detach the part whose last batch was taken; return a function that commits it."""
        if self._builder is None:
            raise InternalError("no batch of a part was taken")
        builder, self._builder = self._builder, None
        return functools.partial(self._commit_part, builder)

    def _commit_part(self, builder: PartBuilder) -> Sequence[Failure]:
        """Commit a part; return the failures of the part that the store holds then."""
        there = self._commit(builder)
        self._heartbeat.record_commit(builder.part)
        return there


@dataclass(frozen=True)
class StorePartTask:
    """Part task of workers that compute parts of a store; picklable.

    Attributes:
        dtype: name of the dtype in which the engine returns values.
        settings: entries of the fingerprint that only this kind of run has.
        datasets: names of the datasets to compute.
        manifest: content of featx.json when the run was started.
    """

    dtype: str
    settings: Mapping[str, Any]
    datasets: frozenset[str]
    manifest: bytes

    def check(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        """Raise RunError if the manifest of the store has changed since the run was started."""
        if read_manifest(root) != Manifest.from_json(self.manifest, root):
            raise RunError(
                f"the manifest of {root} has changed since this run was started: another run has "
                "overwritten or extended the store. Run the same command again."
            )

    def listing(self, root: Path, num_rows: int, identity: str) -> Listing | None:
        """Read the listing from the store; None if no file holds so many rows."""
        return read_listing(root, num_rows, identity)

    def missing(self, root: Path, parts: Sequence[Part]) -> list[Part]:
        """Select the parts that no process has committed yet."""
        there = part_names(root)
        return [part for part in parts if layout.part_name(part.index) not in there]

    def sink(self, context: RunContext, root: Path, heartbeat: Heartbeat) -> FeatureSink:
        """Create the sink that computes the parts and commits each of them to the store."""
        disk, manifest = open_folder(root), Manifest.from_json(self.manifest, root)

        def begin(part: Part, specs: Sequence[LayerSpec]) -> PartBuilder:
            return begin_part(disk, part, specs, manifest, context.listing)

        def publish(builder: PartBuilder) -> Sequence[Failure]:
            return publish_part(disk, builder, manifest, context.listing)

        return FeatureSink(context, begin, publish, heartbeat)


def compute_rows(context: RunContext, engine: Engine, batch: Batch) -> Rows:
    """Compute the features of one batch, without padding; find non-finite and underflow rows.

    Args:
        context: run context.
        engine: engine of the run, or a replica of it.
        batch: n rows, followed by padding.

    Raises:
        NonFiniteError: a feature is NaN or infinite, and nonfinite=error.
    """
    from featx.engine import stored_bits

    labels, keys = context.labels_of(batch), context.keys_of(batch)
    rows = engine.rows(batch.images, labels, keys=keys)
    failures = failures_of(context, engine, batch, rows.finite)
    failed = {failure.row for failure in failures}
    ok = [i for i in range(batch.count) if batch.start + i not in failed]
    underflow_rows = Counter({name: int(small[ok].sum()) for name, small in rows.underflow.items()})
    features = {name: stored_bits(value[: batch.count]) for name, value in rows.features.items()}
    return Rows(features, failures, underflow_rows, batch.checksums, batch.damaged)
