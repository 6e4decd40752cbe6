"""Rows of an existing store that a run computes again before it computes missing parts.

These are rows of changed images, rows whose images failed, and rows lost with damaged chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import log_message
from featx.errors import ConfigError, StoreMismatchError, counted, require
from featx.pipeline.changed_images import (
    ImageChanges,
    changed_failures_text,
    changed_images_text,
    changed_text,
    gone_images_text,
    image_changes,
    image_keys,
    rows_of_two_images,
    unknown_images_text,
)
from featx.pipeline.loop import run_parts
from featx.pipeline.row_failures import Rows, compute_rows
from featx.pipeline.run_context import RunContext
from featx.store import (
    PartBuilder,
    Run,
    StoreSession,
    layout,
    write_image_states,
)
from featx.types import NO_IMAGE, Array, Batch, Failure, Part, Status

if TYPE_CHECKING:
    from featx.engine import Engine


def check_images(
    context: RunContext, session: StoreSession, only_warn: bool, before: ImageChanges | None
) -> int:
    """Compare the images with those that the rows in the store were computed from.

    Return the number of rows that refresh=true or auto computed again. A repair only warns about
    changed images, as it refuses nothing that it can fix. `before` is what
    `check_images_before_adding` has found just now, or None. Raises StoreMismatchError if images
    have changed, and refresh was not given or could not compute all layers of their rows.
    """
    config, num_recomputed = context.config, 0
    reads_all = config.refresh is True
    if before is None or before.states is not None:
        changes = _changes(context, session, reads_all, announces=before is None)
    else:
        # Without states all bytes would be read again. Runs that were added since have no rows yet.
        added = len(session.manifest.runs) - len(before.changed)
        changes = replace(before, changed=(*before.changed, *[np.empty(0, np.int64)] * added))
    if changes.num_unknown:
        log_message(
            f"{unknown_images_text(changes.num_unknown)} (their image checksums were "
            "damaged), so whether these images have changed is not known. overwrite=true computes "
            "all rows again.",
            level="warning",
        )
    if len(changes.gone):
        text = gone_images_text(_images_of(context, changes.gone))
        log_message(f"{text}. Their rows stay as they are.", level="warning")
    if config.refresh and (reads_all or len(changes.rows)):
        num_changed = len(_images_of(context, changes.rows))
        log_message(f"{changed_text(num_changed)} since the rows were computed")
        pairs = zip(session.manifest.runs, changes.changed, strict=True)
        of_runs = [rows.tolist() for run, rows in pairs if session.has_requested_layers(run)]
        rows = sorted(set().union(*of_runs))
        num_recomputed = len(rows)
        if num_recomputed:
            _recompute(context, session, rows, "refresh")
            # Of images without a state, those of which another run has other rows are read again.
            changes = _changes(context, session, reads_all=False, announces=False)
    failed = {failure.row for failure in session.failures}
    changed_failures = [row for row in changes.rows.tolist() if row in failed]
    if changed_failures and not config.retry_failed:
        log_message(changed_failures_text(_images_of(context, changed_failures)))
    if runs := _outdated_runs(session, changes):
        text = _outdated_text(context, session, runs)
        if not only_warn:
            raise StoreMismatchError(text)
        log_message(text, level="warning")
    return num_recomputed


def check_images_before_adding(context: RunContext, session: StoreSession) -> ImageChanges:
    """Refuse to add layers or rows if images have changed, and refresh does not compute their rows.
    Return the comparison of the images.

    A command that is refused leaves the runs of the store as they were. Raises StoreMismatchError.
    """
    changes = _changes(context, session, context.config.refresh is True, announces=True)
    runs = _outdated_runs(session, changes)
    if context.config.refresh:
        runs = [(run, rows) for run, rows in runs if not session.has_requested_layers(run)]
    if runs:
        raise StoreMismatchError(_outdated_text(context, session, runs))
    return changes


def _outdated_runs(
    session: StoreSession, changes: ImageChanges
) -> list[tuple[Run, npt.NDArray[np.int64]]]:
    """Runs with features of images that have changed, and their rows; failed rows have none."""
    failed = [failure.row for failure in session.failures]
    pairs = zip(session.manifest.runs, changes.changed, strict=True)
    with_rows = [(run, np.setdiff1d(rows, failed)) for run, rows in pairs]
    return [(run, rows) for run, rows in with_rows if rows.size]


def _outdated_text(
    context: RunContext,
    session: StoreSession,
    runs: Sequence[tuple[Run, npt.NDArray[np.int64]]],
) -> str:
    """Message on rows of changed images, which names the images and what computes them again."""
    rows = np.unique(np.concatenate([rows for _, rows in runs]))
    what = _refresh_text(_layers_options([run for run, _ in runs]))
    if context.config.grow and len(_layers_options(session.manifest.runs)) > 1:
        what += ", without grow=true, which adds rows afterwards"
    return changed_images_text(session.root, _images_of(context, rows), what)


def _images_of(context: RunContext, rows: Sequence[int] | npt.NDArray[np.int64]) -> list[bytes]:
    """Return the keys of the images that rows of the run show."""
    return image_keys(context.source, context.listing.keys[list(rows)])


def _refresh_text(layers: Sequence[str]) -> str:
    """Clause on what refresh=true computes for runs with these layers."""
    each = f", once with each of {' and '.join(layers)}" if len(layers) > 1 else f" ({layers[0]})"
    return f"computes those rows again and no others{each}"


def _layers_options(runs: Sequence[Run]) -> list[str]:
    """The option `layers` of each run of a store, without repeats."""
    return list(dict.fromkeys(f"'layers=[{','.join(sorted(run.names))}]'" for run in runs))


def has_mixed_rows(context: RunContext, session: StoreSession) -> bool:
    """Return whether layers of a row were computed from different images, in different runs.

    Then the parts are kept: failed images have been mended for some of the layers only. Raises
    StoreMismatchError if such a row has not failed.
    """
    runs = session.manifest.runs
    mixed = rows_of_two_images(session.root, session.manifest).tolist() if len(runs) > 1 else []
    failed = {failure.row for failure in session.failures}
    if ok := [row for row in mixed if row not in failed]:
        what = _refresh_text(_layers_options(runs))
        images = _images_of(context, ok)
        raise StoreMismatchError(changed_images_text(session.root, images, what))
    if mixed:
        num_images = len(_images_of(context, mixed))
        log_message(
            "the parts are kept: "
            f"{counted(num_images, 'failed image has', 'failed images have')} been mended for some "
            f"layers only. retry_failed=true with each of {' and '.join(_layers_options(runs))} "
            "computes the others."
        )
    return bool(mixed)


def _changes(
    context: RunContext, session: StoreSession, reads_all: bool, announces: bool
) -> ImageChanges:
    """Compare the images with the store, and save their states for the next comparison."""
    changes = image_changes(
        context.source,
        context.listing.keys[: session.manifest.num_rows],
        session.root,
        session.manifest,
        read_all=reads_all,
        announces=announces,
    )
    if changes.states is not None:
        path = session.root / layout.IMAGES
        write_image_states(session.disk, path, changes.states, changes.checksums)
    return changes


def compute_lost_rows(context: RunContext, session: StoreSession) -> int:
    """Recompute rows lost with damaged chunks, and merge them with the rows that a repair kept.

    Returns their number.
    """
    rows = session.lost_rows()
    if rows:
        log_message(
            f"{counted(len(rows), 'row was', 'rows were')} lost with damaged chunks; no other row "
            "is computed again"
        )
        _replace_rows(context, session, rows)
    return len(rows)


def retry_failed_rows(context: RunContext, session: StoreSession) -> int:
    """Read the failed images again, and write the rows of which the outcome has changed.

    Returns the number of rows that were computed again.
    """
    failed = [failure for failure in session.failures if failure.status != Status.NON_FINITE]
    readable, others = [], []
    results = context.loader.results([failure.row for failure in failed])
    for before, now in zip(failed, results, strict=True):
        is_lost = before.status == Status.DAMAGED_AND_IMAGE_GONE
        if not isinstance(now, Failure):
            readable.append(before.row)
        elif is_lost and now.status == Status.MISSING:
            continue  # the image is still gone
        elif (now.status, now.error, now.message) != (before.status, before.error, before.message):
            others.append(before.row)
    text = f"{len(readable)} of {counted(len(failed), 'failed image')} can be read now"
    if others:
        text += f"; {counted(len(others), 'fails', 'fail')} for another reason than before"
    log_message(text)
    if readable or others:
        _recompute(context, session, sorted(readable + others), "retry_failed")
    return len(readable)


def _recompute(
    context: RunContext, session: StoreSession, rows: Sequence[int], option: str
) -> None:
    """Recompute some rows in place; no other row changes."""
    if not session.parts_with(rows):
        raise ConfigError(
            f"{option}=true computes all layers again that were computed together. Give it with "
            f"the layers of one run: {', '.join(_layers_options(session.manifest.runs))}."
        )
    session.unpack()
    _replace_rows(context, session, rows)


def _replace_rows(context: RunContext, session: StoreSession, rows: Sequence[int]) -> None:
    run_parts(context, _RowReplacement(context, session, rows))
    session.survey_again()


class _NewRows:
    """New values of the requested rows of one batch."""

    def __init__(self, part: Part, requested: frozenset[int]) -> None:
        self.part = part
        self.features: dict[int, dict[str, Array]] = {}
        self.checksums: dict[int, np.uint64] = {}
        self.failures: list[Failure] = []
        self.damaged: set[int] = set()
        self._requested = requested

    def add(self, batch: Batch, rows: Rows) -> None:
        for row in self._requested.intersection(range(batch.start, batch.start + batch.count)):
            place = row - batch.start
            self.features[row] = {name: values[place] for name, values in rows.features.items()}
            if rows.checksums is not None:
                self.checksums[row] = rows.checksums[place]
        self.failures += rows.failures
        self.damaged |= self._requested.intersection(rows.damaged)


class _RowReplacement:
    """Part sink that recomputes rows of a store and replaces them in their parts.

    Such rows failed before, belong to changed images, or were lost with a damaged chunk. The last
    bits of a row depend on its batch, so the batches of the original run are computed again as a
    whole, but only the requested rows are replaced. Among them are all rows that a damaged part has
    lost.
    """

    seconds: Mapping[str, float] = {}
    num_failed = 0  # the rows are few, and most have failed before: no reason to stop

    def __init__(self, context: RunContext, session: StoreSession, rows: Sequence[int]) -> None:
        self.num_committed = 0
        self._context = context
        self._session = session
        self._rows, self._ordered = frozenset(rows), sorted(rows)
        self._parts = {part.index: part for part in session.parts_with(rows)}
        # Taken before the images are read: another driver that replaces a part later may have read
        # newer ones.
        self._etags = {index: session.etag(part) for index, part in self._parts.items()}
        self._spans = [span for part in self._parts.values() for span in self._batches_of(part)]
        self._num_left = Counter(span.index for span in self._spans)
        self._new: list[_NewRows] = []  # of the part whose batches are computed

    @property
    def num_rows(self) -> int:
        return sum(len(span) for span in self._spans)

    def missing(self) -> list[Part]:
        """Batches with requested rows, each as a `Part` with the index of its part in the store."""
        return self._spans

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        rows = compute_rows(self._context, engine, batch)
        return replace(rows, failures=[f for f in rows.failures if f.row in self._rows])

    def begin_part(self, part: Part) -> _NewRows:
        return _NewRows(part, self._rows)

    def commit(self, rows: _NewRows) -> None:
        """Keep the new rows of a batch; after the last batch of its part, replace the part."""
        self._new.append(rows)
        self._num_left[rows.part.index] -= 1
        if not self._num_left[rows.part.index]:
            self._replace(self._parts[rows.part.index])
            self._new.clear()
        self.num_committed += len(rows.part)

    def _batches_of(self, part: Part) -> list[Part]:
        """Batches of a part that contain requested rows, aligned as in the original run."""
        size = self._context.batch_rows
        low, high = (bisect_left(self._ordered, row) for row in (part.start, part.stop))
        starts = {row - (row - part.start) % size for row in self._ordered[low:high]}
        return [Part(part.index, i, min(i + size, part.stop)) for i in sorted(starts)]

    def _replace(self, part: Part) -> None:
        """Replace a part by a copy with new values in the rows that were computed."""
        rows = self._session.read_part(part)
        stored, images = rows.features, rows.images
        computed = {row for new in self._new for row in new.features}
        missing = set(self._session.lost_rows_of(part))
        require(missing <= computed, "a row that was lost was not computed")
        had_image = {row for row in missing if images[row - part.start] != NO_IMAGE}
        failures = [failure for failure in rows.failures if failure.row not in computed]
        damaged = rows.damaged - computed
        for new in self._new:
            for row, checksum in new.checksums.items():
                images[row - part.start] = checksum
            for row, values in new.features.items():
                for name, value in values.items():
                    stored[name][row - part.start] = value
            # A row that the store has lost cannot be computed without its image.
            failures += [
                replace(failure, status=Status.DAMAGED_AND_IMAGE_GONE)
                if failure.status == Status.MISSING and failure.row in had_image
                else failure
                for failure in new.failures
            ]
            damaged |= new.damaged
        builder = PartBuilder(part, self._context.specs)
        builder.add(part.start, stored, failures, images, damaged)
        self._session.replace(builder, self._etags[part.index])
