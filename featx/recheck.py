"""Rows extracted again from their pictures, as they were the first time, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.config import Config
from featx.extraction import compute_rows
from featx.keys import from_saved
from featx.prepare import Prepared, prepare
from featx.store.dtypes import from_raw
from featx.store.manifest import Manifest, Run
from featx.store.reader import FeatureStore
from featx.types import Batch, LayerSpec, Part, Status

MIN_COSINE = 0.999
"""Another device or library version may change bits, never more than this."""


@dataclass
class Recheck:
    """What came of extracting rows again.

    Attributes:
        rows: that were extracted again.
        identical: rows with the very same bits in every layer, or the same failure.
        close: others with a cosine of at least MIN_COSINE in every layer.
        different: a line for each of the rest.
    """

    rows: int = 0
    identical: int = 0
    close: int = 0
    different: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def recheck_rows(config: Config, root: Path, manifest: Manifest, count: int) -> Recheck:
    """Extract random rows of a store again and compare.

    Whole batches are computed, as they were: a row's last bits depend on its batch.

    Args:
        config: of the command; its device, seed and data.root are taken where they are given.
        root: the store's folder.
        manifest: its runs.
        count: how many rows, at most all that are there.

    Raises:
        FeatxError: the pictures or the model are not to be had as they were.
    """
    store = FeatureStore(root)
    there = np.flatnonzero(store.status != Status.ABSENT)
    chosen = np.random.default_rng(config.seed).permutation(there)[:count]
    result = Recheck(rows=len(chosen))
    worst: dict[int, float] = dict.fromkeys(chosen.tolist(), np.inf)
    notes: dict[int, str] = {}
    for run in manifest.runs:
        inside = [row for row in sorted(worst) if run.grid.first_row <= row < run.grid.stop_row]
        specs = {spec.name: spec for spec in run.layers if spec.name in store}
        if not inside or not specs:
            continue
        with prepare(config_of_run(config, root, run), run.header.config) as prepared:
            for row, features, status in _extracted(prepared, run, inside):
                found = _likeness(store, row, specs, features, status)
                if found < worst[row]:
                    worst[row] = found
                    notes[row] = f"row {row} ({store.keys[row]}): " + _what(
                        store, row, status, found
                    )
    result.identical = sum(value == np.inf for value in worst.values())
    result.close = sum(MIN_COSINE <= value < np.inf for value in worst.values())
    result.different = [notes[row] for row, value in worst.items() if value < MIN_COSINE]
    return result


def config_of_run(config: Config, root: Path, run: Run) -> Config:
    """The config of a run of a store, to go on with it or do it again.

    Args:
        config: of the command now; a device or data.root given there is taken.
        root: where the store lies now.
        run: of the store.
    """
    before = from_saved(run.header.config)
    data = before.data if config.data.root is None else replace(before.data, root=config.data.root)
    device = before.device if config.device == "auto" else config.device
    return replace(before, data=data, device=device, out=str(root), overwrite=False)


def _extracted(
    prepared: Prepared, run: Run, rows: list[int]
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]], int]]:
    """Each of some rows: its features in every layer, as stored, and its status."""
    from featx.loader import Loader

    size = prepared.engine.compute.batch_size
    spans: dict[int, list[int]] = {}
    for row in rows:
        spans.setdefault(row - (row - _part_of(run, row).start) % size, []).append(row)
    parts = [
        Part(0, start, min(start + size, _part_of(run, start).stop)) for start in sorted(spans)
    ]
    loader = Loader(
        prepared.source,
        prepared.listing,
        prepared.engine.backbone.preprocess,
        prepared.policy,
        prepared.reference,
        size,
    )
    with loader:
        for _, batch in loader.batches(parts):
            yield from _rows_of(prepared, batch, spans[batch.start])


def _part_of(run: Run, row: int) -> Part:
    return run.grid.part((row - run.grid.first_row) // run.grid.part_rows)


def _rows_of(
    prepared: Prepared, batch: Batch, rows: list[int]
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]], int]]:
    features, failures = compute_rows(prepared, batch, Counter())
    status = {failure.row: int(failure.status) for failure in failures}
    for row in rows:
        values = {name: value[row - batch.start] for name, value in features.items()}
        yield row, values, status.get(row, int(Status.OK))


def _likeness(
    store: FeatureStore,
    row: int,
    specs: dict[str, LayerSpec],
    features: dict[str, npt.NDArray[Any]],
    status: int,
) -> float:
    """Infinity where stored and new row are the same; else the smallest cosine of their layers."""
    if status != int(store.status[row]):
        return -1.0
    if status != Status.OK:
        return np.inf
    smallest = np.inf
    for name in specs:
        dtype = specs[name].dtype
        before = np.asarray(store[name][row], dtype=np.float64).ravel()
        now = from_raw(features[name], dtype).astype(np.float64).ravel()
        if np.array_equal(before, now):
            continue
        lengths = np.linalg.norm(before) * np.linalg.norm(now)
        smallest = min(smallest, float(before @ now / lengths) if lengths else -1.0)
    return smallest


def _what(store: FeatureStore, row: int, status: int, cosine: float) -> str:
    before = int(store.status[row])
    if before != status:
        return f"was {Status(before).label}, is {Status(status).label} now"
    return f"cosine to the picture's features now is {cosine:.5f}"
