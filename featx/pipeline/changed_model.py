"""Detects a model of the user's code that computes other features than the rows of a store have."""

from __future__ import annotations

import numpy as np

from featx.errors import StoreMismatchError, counted
from featx.pipeline.row_failures import compute_rows
from featx.pipeline.run_context import RunContext
from featx.store import StoreSession, from_raw

_SAME_MODEL = {"fp32": 1e-3, "fp16": 5e-3, "bf16": 3e-2}
"""Precision -> largest median of the relative L2 difference between rows of one model, in two
processes and on two cards of one kind of device."""

_CHECKED_ROWS = 8
"""Least number of stored rows that are computed again, where a batch has fewer."""


def check_model(context: RunContext, session: StoreSession) -> None:
    """Compute some stored rows again if the user's code makes the model, and compare them.

    Such a model may compute other features with the same weights: its code can have changed, or
    something that is neither a weight nor printed, such as the active adapter. Raises
    StoreMismatchError if it does.
    """
    config, engine, size = context.config, context.engine, context.batch_rows
    if config.model.code is None or config.overwrite:
        return
    stored = session.first_rows(max(size, _CHECKED_ROWS))
    if stored is None:
        return
    part, num_compared = stored.part, 0
    differences: dict[str, list[float]] = {}
    for _, batch in context.loader.batches([part], size):
        rows = compute_rows(context, engine, batch)
        failed = {failure.row for failure in [*stored.failures, *rows.failures]}
        for i in range(batch.count):
            place = batch.start + i - part.start
            is_same_image = rows.checksums is None or rows.checksums[i] == stored.images[place]
            if batch.start + i in failed or not is_same_image or not stored.good[place]:
                continue
            num_compared += 1
            for spec in context.specs:
                pair = stored.features[spec.name][place], rows.features[spec.name][i]
                before, now = (from_raw(each, spec.dtype).astype(np.float64) for each in pair)
                length = max(np.linalg.norm(before), np.linalg.norm(now))
                difference = float(np.linalg.norm(before - now) / length) if length else 0.0
                differences.setdefault(spec.name, []).append(difference)
    medians = {name: float(np.median(each)) for name, each in differences.items()}
    name = max(medians, key=lambda name: medians[name], default=None)
    limit = _SAME_MODEL[engine.compute.precision]
    if name is not None and medians[name] > limit:
        raise StoreMismatchError(
            f"{session.root} was started with another model than {config.model.code} makes now, "
            "although weights and printed layers are the same: computed again, "
            f"{counted(num_compared, 'row')} of {name} differ by {medians[name]:.2g} (median of "
            f"the relative L2 difference; expected at most {limit:g}). Its code may have changed, "
            "or an active adapter, a flag or a constant. Put that back, choose another out=DIR, or "
            "overwrite=true to delete what is there."
        )
