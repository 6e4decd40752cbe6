"""Features of the rows of a run, batch by batch, into the parts of a store."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.errors import RunError
from featx.pipeline.row_failures import failures_of
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_observer import RunObserver
from featx.storage.s3_folder import open_folder
from featx.store import layout
from featx.store.heartbeat import Heartbeat
from featx.store.listing import read_listing
from featx.store.manifest import Manifest, read_manifest
from featx.store.part_builder import PartBuilder
from featx.store.part_files import part_names, publish_part
from featx.types import Batch, Failure, Listing, Part

if TYPE_CHECKING:
    from featx.engine.engine import Engine


@dataclass(frozen=True)
class Rows:
    """Features of the n rows of a batch.

    Attributes:
        features: dataset name -> (n, ...) as stored.
        failures: the rows that failed.
        faint: layer -> rows that float16 hardly holds.
        checksums: (n,) of their images.
    """

    features: dict[str, Any]
    failures: list[Failure]
    faint: Counter[str]
    checksums: npt.NDArray[np.uint64] | None = None


class FeatureSink:
    """What becomes of the batches of a run whose features are stored.

    Args:
        prepared: the run.
        commit: makes a part durable; returns the failures of the part that is there then.
        heart: is told what part is computed.
        observer: follows the batches.

    Attributes:
        faint: layer -> rows that float16 hardly holds.
        seconds: there are no stages beside those of every run.
    """

    def __init__(
        self,
        prepared: RunContext,
        commit: Callable[[PartBuilder], Sequence[Failure]],
        heart: Heartbeat,
        observer: RunObserver | None = None,
    ) -> None:
        self.faint: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._commit = commit
        self._heart = heart
        self._observer = observer or RunObserver()
        self._prepared = prepared
        self._builder: PartBuilder | None = None

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """The features of a batch."""
        return compute_rows(self._prepared, engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Rows]) -> list[Failure]:
        """Put the next batch of a part in its place; returns its rows that failed."""
        if self._builder is None:
            self._builder = PartBuilder(part, self._prepared.specs)
            self._heart.begin(part)
        rows = computed()
        self._builder.add(batch.start, rows.features, rows.failures, rows.checksums)
        self.faint += rows.faint
        self._observer.batch_computed(batch, rows.features, rows.failures)
        return rows.failures

    def finish_part(self) -> Callable[[], Sequence[Failure]]:
        """The part whose last batch was taken; calling what is returned makes it durable."""
        assert self._builder is not None, "no batch of a part was taken"
        builder, self._builder = self._builder, None
        return functools.partial(self._made_durable, builder)

    def _made_durable(self, builder: PartBuilder) -> Sequence[Failure]:
        there = self._commit(builder)
        self._heart.committed(builder.part)
        return there


@dataclass(frozen=True)
class StorePartTask:
    """What the workers of a spread run are to make: parts of a store.

    Attributes:
        dtype: in which the engine gives its values.
        settings: of the fingerprint, beside those of every run.
        datasets: the names of what is computed.
        manifest: featx.json.
    """

    dtype: str
    settings: Mapping[str, Any]
    datasets: frozenset[str]
    manifest: bytes

    def check(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        """Raise RunError where the store is another one since this was ordered."""
        if read_manifest(root) != Manifest.from_json(self.manifest, root):
            raise RunError(f"{root} was begun anew or went on otherwise since this was ordered.")

    def listing(self, root: Path, num_rows: int, identity: str) -> Listing | None:
        """The rows, as the store has them."""
        return read_listing(root, num_rows, identity)

    def missing(self, root: Path, parts: Sequence[Part]) -> list[Part]:
        """Those of some parts that nobody has committed yet."""
        there = part_names(root)
        return [part for part in parts if layout.part_name(part.index) not in there]

    def maker(self, prepared: RunContext, root: Path, heart: Heartbeat) -> FeatureSink:
        """What computes the parts and commits each."""
        disk, manifest = open_folder(root), Manifest.from_json(self.manifest, root)

        def publish(builder: PartBuilder) -> Sequence[Failure]:
            return publish_part(disk, builder, manifest, prepared.listing)

        return FeatureSink(prepared, publish, heart)


def compute_rows(prepared: RunContext, engine: Engine, batch: Batch) -> Rows:
    """Features of the rows of one batch, padding cut off; non-finite and faint rows found.

    Args:
        prepared: the run.
        engine: of it, or a replica of that.
        batch: n rows of it, and padding.

    Raises:
        NonFiniteError: a feature is not finite, and nonfinite=error.
    """
    from featx.engine.row_checks import stored_bits

    values = engine.run(batch.images, prepared.labels_of(batch))
    failures = failures_of(prepared, engine, batch, values)
    failed = {failure.row for failure in failures}
    ok = [i for i in range(batch.count) if batch.start + i not in failed]
    faint = Counter({name: int(rows[ok].sum()) for name, rows in engine.underflow_rows().items()})
    features = {name: stored_bits(value[: batch.count]) for name, value in values.items()}
    return Rows(features, failures, faint, batch.checksums)
