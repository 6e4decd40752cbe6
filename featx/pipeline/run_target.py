"""Run target: the rows of a run, the settings to resume with, and what is still missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from featx.base import log_message, log_step
from featx.config import Config
from featx.errors import ConfigError, StoreMismatchError, counted
from featx.images import num_heic_without_decoder
from featx.pipeline.provenance import layer_line
from featx.sources import check_class_names, open_source, similar_names, with_boxes
from featx.storage import parse_path
from featx.store import (
    Manifest,
    growth_message,
    layout,
    listing_identity,
    load_manifest,
    merge_listing,
    missing_parts,
    read_listing,
    refuse_difference,
)
from featx.types import LayerSpec, Listing, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import CapturePoint, ChosenLayers, StoredReduce

PART_SECONDS = 60.0
"""Upper bound of the work per part in seconds, and so of the work that a kill can cost."""

SHORT_PART_SECONDS, SHORT_PARTS = 2.0, 256
"""A run is cut into about SHORT_PARTS parts of SHORT_PART_SECONDS to PART_SECONDS of work each.

So a short run commits its first rows early, and an interruption costs it little.
"""

PARTS_PER_LIMIT = 8
"""Least number of parts that fit into the time limit of a process at the measured speed."""


class RunTarget(Protocol):
    """Output that a run must produce: rows of a store, or statistics.

    Attributes:
        dtype: name of the dtype in which the engine returns values, such as 'float16'.
        folder: folder that the run writes to, or None if it writes nothing.
        settings: entries of the fingerprint that only this kind of run has.
    """

    dtype: str
    folder: Path | None
    settings: dict[str, Any]

    def list_images(self) -> tuple[Source, Listing]:
        """Open the data set and list its rows, in the order of the existing output."""

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Select the requested layers that are still to be computed."""

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Resume state for the named layers, or None if nothing exists yet."""

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Limits for the size of a part.

        Args:
            engine: engine with captures attached.
            specs: datasets that a row consists of.
            work_s: seconds that the model takes for all rows.

        Returns:
            largest number of rows per part, and the seconds of work that a part should take.

        Raises:
            FeatxError: the target cannot be computed from these layers.
        """


class StoreTarget:
    """Run target for features in the store that `out` names.

    Args:
        config: checked config.
        known_rows_only: ignore images that the store does not contain yet.
        source: data set given as a Python object; None opens the data set of the config.
    """

    def __init__(
        self, config: Config, known_rows_only: bool = False, source: Source | None = None
    ) -> None:
        self.folder: Path | None = parse_path(config.out)
        check_out(self.folder)
        self.dtype: str = config.dtype
        self.settings = {"dtype": config.dtype, "codec": config.codec}
        self._config = config
        self._known_rows_only = known_rows_only
        self._source = source
        self._stored = None if config.overwrite else load_manifest(self.folder)[0]
        self._listed: tuple[Source, Listing] | None = None

    def list_images(self) -> tuple[Source, Listing]:
        """Open the data set once; rows of the store come first, new rows follow."""
        if self._listed is None:
            self._listed = list_images(
                self._config, self._stored, self._known_rows_only, self._source
            )
        return self._listed

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Select the layers that the store lacks or has not finished, or all if none is left."""
        return _unfinished(self._config, self._stored, listing, chosen)

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Choices of the first run of the store, and rows per part of the run with these layers."""
        return _resume_state(self._stored, names)

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Limits by `part_mib`, whose default is `layout.PART_BYTES`, and by `seconds_of_part`."""
        row_bytes = sum(spec.row_bytes for spec in specs)
        limit_s = self._config.executor.task_seconds
        part_mib = self._config.part_mib
        part_bytes = layout.PART_BYTES if part_mib == "auto" else int(part_mib) << 20
        return part_bytes / max(1, row_bytes), seconds_of_part(work_s, limit_s)


def seconds_of_part(work_s: float, limit_s: float | None = None) -> float:
    """Seconds of work that a part should take.

    Args:
        work_s: seconds of work of the whole run.
        limit_s: time limit of a process in seconds, or None if there is none. A process also loads
            the model within this limit, and loses the rows of a part that it cannot finish.
    """
    seconds = min(PART_SECONDS, max(SHORT_PART_SECONDS, work_s / SHORT_PARTS))
    return seconds if limit_s is None else min(seconds, limit_s / PARTS_PER_LIMIT)


def check_out(out: Path) -> None:
    """Raise ConfigError if `out` exists and is not a folder."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder for the store.")


def list_images(
    config: Config,
    stored: Manifest | None = None,
    known_rows_only: bool = False,
    source: Source | None = None,
) -> tuple[Source, Listing]:
    """Open the data set of a config and list its rows in the order of the store.

    Args:
        config: checked config; `data.limit` is applied.
        stored: manifest of the store that is resumed, or None.
        known_rows_only: ignore images that the store does not contain yet.
        source: data set given as a Python object; None opens the data set of the config.

    Raises:
        DataError: the data set does not exist or is empty.
        StoreMismatchError: rows of the store are missing from the data set, or the data set has new
            rows and grow=true is not given.
    """
    log_step(f"listing the images of {config.data.root or config.data.name} ...")
    source = open_source(config.data) if source is None else with_boxes(source, config.data)
    listing = source.listing()
    log_step(f"{counted(len(listing), 'image')} listed")
    check_class_names(listing.classes)
    for warning in (*listing.warnings, *similar_names(listing.classes)):
        log_message(warning, level="warning")
    listing = _some_rows(listing, config)
    if num_heic := num_heic_without_decoder(listing.keys):
        log_message(
            f"{counted(num_heic, 'image is', 'images are')} HEIC, which needs "
            'pip install "featx[heif]"; without it their rows fail.',
            level="warning",
        )
    if stored is not None:
        root = parse_path(config.out)
        before = _stored_listing(root, stored, listing)
        if before is not None:
            listing = merge_listing(root, before, listing)
            if known_rows_only:
                return source, before
        new_rows = len(listing) - stored.num_rows
        if new_rows > 0 and not config.grow:
            raise StoreMismatchError(growth_message(root, new_rows))
    return source, listing


def _some_rows(listing: Listing, config: Config) -> Listing:
    """Return the rows that data.limit or data.sample takes, and note how many there are."""
    limit, sample = config.data.limit, config.data.sample
    taken = listing
    if limit is not None:
        taken = listing.head(limit)
    elif sample is not None:
        taken = listing.sample(sample)
    if len(taken) == len(listing):
        return listing
    option = f"data.limit={limit}" if limit is not None else f"data.sample={sample}"
    skipped = {
        **taken.skipped,
        f"of {counted(len(listing), 'image')} by {option}": (len(listing) - len(taken)),
    }
    return replace(taken, skipped=skipped)


def _stored_listing(root: Path, stored: Manifest, listed: Listing) -> Listing | None:
    """Listing of the store, or None if no file holds it.

    If samples.h5 is damaged and no other file has a copy, the current listing of the data set is
    used, provided that it has the sha256 that the manifest records.
    """
    identity = stored.listing_identity
    before = read_listing(root, stored.num_rows, identity)
    if identity is None or (before is not None and listing_identity(before) == identity):
        return before
    if listing_identity(listed) == identity:
        return listed
    # grow=true was interrupted: the files of earlier runs have the first rows of the listing.
    for run in reversed(stored.runs[:-1]):
        run_identity = str(run.header.fingerprint.get("listing"))
        run_listing = read_listing(root, run.grid.stop_row, run_identity)
        if run_listing is not None and listing_identity(run_listing) == run_identity:
            merged = merge_listing(root, run_listing, listed)
            return merged if listing_identity(merged) == identity else None
    if before is not None:
        raise StoreMismatchError(
            f"{root / layout.LISTING} is damaged, no other file of the store has a whole copy, and "
            f"the data set now has another listing ({listing_identity(listed)}) than the store was "
            f"started with ({identity}). Put the data set back as it was then, choose out=DIR for "
            "a new store, or overwrite=true to delete this one."
        )
    return None


def _unfinished(
    config: Config,
    stored: Manifest | None,
    listing: Listing,
    chosen: ChosenLayers,
) -> ChosenLayers:
    """Select the requested layers that the store lacks or has not finished; all, if none is left.

    A request for [layer3, layer4] computes only layer3 if the store already holds layer4, so the
    model runs no deeper than necessary.
    """
    out = parse_path(config.out)
    if stored is None or len(listing) > stored.num_rows:
        return chosen
    unfinished = {name for run, _ in missing_parts(out, stored) for name in run.names}
    finished = set(stored.layers) - unfinished
    fresh = [pair for pair in chosen if pair[0].name not in finished]
    if not fresh:
        return chosen
    for point, reduce in chosen:
        if point.name in finished:
            _refuse_another_layer(out, stored, point, reduce, config)
    return fresh


def _refuse_another_layer(
    out: Path, stored: Manifest, point: CapturePoint, reduce: StoredReduce, config: Config
) -> None:
    """Raise StoreMismatchError if a finished layer differs from what the config asks for."""
    before = stored.layers[point.name]
    now = replace(
        before,
        layer=point.layer,
        capture=point.capture,
        reduce=reduce.name,
        # Parameters that follow from the layer are in the store only; the options name all others.
        reduce_args={**before.reduce_args, **reduce.args},
        dtype=point.dtype or config.dtype,
    )
    line = stored.first_run_with(point.name).header.fingerprint.get(f"layer.{point.name}")
    refuse_difference(
        out,
        {f"layer {point.name}": {**asdict(before), "as": line}},
        {f"layer {point.name}": {**asdict(now), "as": layer_line(now, config)}},
    )


def _resume_state(stored: Manifest | None, names: set[str]) -> ResumeState | None:
    """Resume state of a store for the named layers, or None without a store."""
    if stored is None:
        return None
    holders = [run for run in stored.runs if run.names & names]
    part_rows = holders[0].grid.part_rows if holders else None
    return ResumeState(stored.runs[0].resolved, part_rows, has_new_layers=not holders)
