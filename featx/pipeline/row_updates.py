"""Rows of an existing store that a run computes again before it computes missing parts.

These are rows of changed images, rows whose images failed, and rows lost with damaged chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from featx.base import log_message
from featx.errors import ConfigError, StoreMismatchError, counted
from featx.pipeline.changed_images import (
    ImageChanges,
    changed_failures_text,
    changed_images_text,
    changed_text,
    gone_images_text,
    image_changes,
    unknown_images_text,
)
from featx.pipeline.loop import run_parts
from featx.pipeline.retry import RetrySink, changed_failures
from featx.pipeline.run_context import RunContext
from featx.store import StoreSession
from featx.types import Status


def check_images(context: RunContext, session: StoreSession, only_warn: bool) -> None:
    """Compare the images with those that the rows in the store were computed from.

    Args:
        context: run context.
        session: write session of the store.
        only_warn: warn about changed images instead of raising. A repair does so, as it refuses
            nothing that it can fix.

    Raises:
        StoreMismatchError: images have changed, and refresh=true was not given or could not compute
            all layers of their rows.
    """
    config, keys = context.config, context.listing.keys
    changes = _changes(context, session)
    if changes.num_unknown:
        log_message(
            f"{unknown_images_text(changes.num_unknown)} (their image checksums were "
            "damaged), so whether these images have changed is not known. overwrite=true computes "
            "all rows again.",
            level="warning",
        )
    if len(changes.gone):
        log_message(
            f"{gone_images_text(keys, changes.gone)}. Their rows stay as they are.", level="warning"
        )
    if config.refresh:
        log_message(f"{changed_text(len(changes.rows))} since their rows were computed")
        rows = _rows_of_requested_runs(session, changes)
        if len(rows):
            _recompute(context, session, rows.tolist(), "refresh")
            changes = _changes(context, session)
    failed = {failure.row for failure in session.failures}
    changed_failures = [row for row in changes.rows.tolist() if row in failed]
    changed = [row for row in changes.rows.tolist() if row not in failed]
    if changed_failures and not config.retry_failed:
        log_message(f"{changed_failures_text(keys, changed_failures)}")
    if not changed:
        return
    layers = [
        f"layers=[{','.join(sorted(run.names))}]"
        for run, rows in zip(session.manifest.runs, changes.changed, strict=True)
        if np.isin(rows, changed).any()
    ]
    what = refresh_text(list(dict.fromkeys(layers)))
    text = changed_images_text(session.root, keys, changed, what)
    if not only_warn:
        raise StoreMismatchError(text)
    log_message(text, level="warning")


def refresh_text(layers: Sequence[str]) -> str:
    """Clause on what refresh=true computes for runs with these layers."""
    each = f", once with each of {' and '.join(layers)}" if len(layers) > 1 else f" ({layers[0]})"
    return f"computes those rows again and no others{each}"


def _changes(context: RunContext, session: StoreSession) -> ImageChanges:
    """Compare the images with the store, and save their states for the next comparison."""
    changes = image_changes(
        context.source,
        context.listing.keys,
        session.root,
        session.manifest,
        read_all=context.config.refresh,
    )
    if changes.states is not None:
        session.write_image_states(changes.states)
    return changes


def _rows_of_requested_runs(session: StoreSession, changes: ImageChanges) -> npt.NDArray[np.int64]:
    """Changed rows of the runs that compute the requested layers."""
    pairs = zip(session.manifest.runs, changes.changed, strict=True)
    return np.unique(
        np.concatenate(
            [[], *(rows for run, rows in pairs if session.has_requested_layers(run))]
        ).astype(np.int64)
    )


def compute_lost_rows(context: RunContext, session: StoreSession) -> None:
    """Recompute rows lost with damaged chunks, and merge them with the rows that a repair kept."""
    rows = session.lost_rows()
    if rows:
        log_message(
            f"{counted(len(rows), 'row was', 'rows were')} lost with damaged chunks; no other row "
            "is computed again"
        )
        sink = RetrySink(context, session, rows)
        run_parts(context, sink, sink)
        session.survey_again()


def retry_failed_rows(context: RunContext, session: StoreSession) -> None:
    """Read the failed images again, and write the rows of which the outcome has changed."""
    failed = [failure for failure in session.failures if failure.status != Status.NON_FINITE]
    readable, others = changed_failures(context, failed)
    text = f"{len(readable)} of {counted(len(failed), 'failed image')} can be read now"
    if others:
        text += f"; {counted(len(others), 'fails', 'fail')} for another reason than before"
    log_message(text)
    if readable or others:
        _recompute(context, session, sorted(readable + others), "retry_failed")


def _recompute(
    context: RunContext, session: StoreSession, rows: Sequence[int], option: str
) -> None:
    """Recompute some rows in place; no other row changes."""
    if not session.parts_with(rows):
        together = [f"layers=[{','.join(sorted(run.names))}]" for run in session.manifest.runs]
        raise ConfigError(
            f"{option}=true computes all layers again that were computed together. Give it with "
            f"the layers of one run: {', '.join(dict.fromkeys(together))}."
        )
    session.unpack()
    sink = RetrySink(context, session, rows)
    run_parts(context, sink, sink)
    session.survey_again()
