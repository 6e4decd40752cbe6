"""Detects a model of the user's code that computes other features than the rows of a store have."""

from __future__ import annotations

import numpy as np

from featx.errors import StoreMismatchError, counted
from featx.pipeline.row_failures import compute_rows
from featx.pipeline.run_context import RunContext
from featx.store import StoreSession, from_raw
from featx.types import Array

_SAME_MODEL = {"fp32": 1e-3, "fp16": 5e-3, "bf16": 3e-2}
"""Precision -> largest median of the relative L2 difference between rows of one model, in two
processes and on two cards of one kind of device."""

_CHECKED_ROWS = 8
"""Least number of stored rows that are computed again, where a batch has fewer."""


def check_model(context: RunContext, session: StoreSession) -> None:
    """Compute some stored rows again if the user's code makes the model, and compare them.

    Such a model may compute other features with the same weights: its code can have changed, or
    something that is neither a weight nor printed, such as the active adapter. Rows that failed,
    and those of changed images, are left out. Raises StoreMismatchError if the others differ.
    """
    config, size = context.config, context.batch_rows
    if config.model.code is None or config.overwrite:
        return
    stored = session.first_rows(max(size, _CHECKED_ROWS))
    if stored is None:
        return
    differences: dict[str, list[float]] = {spec.name: [] for spec in context.specs}
    for _, batch in context.loader.batches([stored.part], size):
        rows = compute_rows(context, context.engine, batch)
        first, count = batch.start - stored.part.start, batch.count
        places = slice(first, first + count)
        is_compared = stored.good[places].copy()
        if rows.checksums is not None:
            is_compared &= rows.checksums == stored.images[places]
        failed = {failure.row - batch.start for failure in [*stored.failures, *rows.failures]}
        is_compared[list(failed.intersection(range(count)))] = False
        for spec in context.specs:
            pair = stored.features[spec.name][places], rows.features[spec.name]
            before, now = (from_raw(each, spec.dtype).reshape(count, -1) for each in pair)
            differences[spec.name] += _differences(before[is_compared], now[is_compared])
    medians = {name: float(np.median(each)) for name, each in differences.items() if each}
    name = max(medians, key=lambda name: medians[name], default=None)
    limit = _SAME_MODEL[context.engine.compute.precision]
    if name is not None and medians[name] > limit:
        raise StoreMismatchError(
            f"{session.root} was started with another model than {config.model.code} makes now, "
            "although weights and printed layers are the same: computed again, "
            f"{counted(len(differences[name]), 'row')} of {name} differ by {medians[name]:.2g} "
            f"(median of the relative L2 difference; expected at most {limit:g}). Its code may "
            "have changed, or an active adapter, a flag or a constant. Put that back, choose "
            "another out=DIR, or overwrite=true to delete what is there."
        )


def _differences(before: Array, now: Array) -> list[float]:
    """L2 difference of each of (n, D) rows and its counterpart, relative to the longer one."""
    before, now = before.astype(np.float64), now.astype(np.float64)
    lengths = np.maximum(np.linalg.norm(before, axis=1), np.linalg.norm(now, axis=1))
    lengths[lengths == 0] = 1  # both are 0
    differences: list[float] = (np.linalg.norm(before - now, axis=1) / lengths).tolist()
    return differences
