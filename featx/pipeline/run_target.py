"""What a run is for: its rows, what of them was begun before, and what is still to be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from featx.config.run_config import Config
from featx.errors import ConfigError, StoreMismatchError
from featx.pipeline.provenance import layer_line
from featx.sources import open_source, with_boxes
from featx.storage.s3_path import parse_path
from featx.store import layout
from featx.store.compatibility import growth_refused, refuse_difference
from featx.store.layout import PART_BYTES
from featx.store.listing import in_stored_order, listing_identity, read_listing
from featx.store.manifest import Manifest, load_manifest
from featx.store.session import missing_parts
from featx.types import LayerSpec, Listing, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine.engine import Engine
    from featx.layers.projection import ChosenLayers, StoredReduce
    from featx.layers.trace import CapturePoint

PART_SECONDS = 60.0
"""At most about this much work a part, within PART_BYTES: what a kill can cost."""

SHORT_PART_SECONDS, SHORT_PARTS = 2.0, 256
"""A run that is done in so many shorter parts has its first rows, and loses least, with those."""

PARTS_PER_LIMIT = 8
"""At least so many parts fit into the time limit of a process, by what the driver measured."""


class RunTarget(Protocol):
    """What a run is for, as far as `prepare` has to know: a store, or statistics.

    Attributes:
        dtype: in which the engine gives its values.
        settings: of the fingerprint, beside those of every run.
        folder: that the run writes to, None where it writes to none.
    """

    dtype: str
    folder: Path | None
    settings: dict[str, Any]

    def list_images(self) -> tuple[Source, Listing]:
        """The data set and its rows, in the order of what was begun."""

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Of the layers asked for, those that are still to be done."""

    def begun(self, names: set[str]) -> ResumeState | None:
        """What was decided for these layers, None where nothing was begun."""

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Rows of a part at the most, and the seconds of work that it should take.

        Args:
            engine: bound.
            specs: what a row holds.
            work_s: seconds that the model takes for all rows.

        Raises:
            FeatxError: what is asked cannot be done with these layers.
        """


class StoreTarget:
    """Features in the store that `out` names.

    Args:
        config: checked.
        known_rows_only: leave images alone that the store does not know.
        source: the data set, where it is an object from Python; None opens the config's.
    """

    def __init__(
        self, config: Config, known_rows_only: bool = False, source: Source | None = None
    ) -> None:
        self.folder: Path | None = parse_path(config.out)
        check_out(self.folder)
        self.dtype = config.dtype
        self.settings = {"dtype": config.dtype, "codec": config.codec}
        self._config = config
        self._known_rows_only = known_rows_only
        self._source = source
        self._stored = None if config.overwrite else load_manifest(self.folder)[0]

    def list_images(self) -> tuple[Source, Listing]:
        """The rows of the store first, and then what is new."""
        return list_images(self._config, self._stored, self._known_rows_only, self._source)

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """The layers that the store lacks or has not finished; all, where it has them all."""
        return _unfinished(self._config, self._stored, listing, chosen)

    def begun(self, names: set[str]) -> ResumeState | None:
        """What the first run of the store decided, and the one that makes these layers."""
        return _begun(self._stored, names)

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """A part is built in memory; a folder of very many parts is slow to resume."""
        row_bytes = sum(spec.row_bytes for spec in specs)
        limit_s = self._config.executor.task_seconds
        return PART_BYTES / max(1, row_bytes), seconds_of_part(work_s, limit_s)


def seconds_of_part(work_s: float, limit_s: float | None = None) -> float:
    """Seconds of work that a part should take.

    Args:
        work_s: that the whole run takes.
        limit_s: after which a process of the run is ended; None where there is no such limit. It
            also has to load the model, and what it computed of an unfinished part is lost.
    """
    seconds = min(PART_SECONDS, max(SHORT_PART_SECONDS, work_s / SHORT_PARTS))
    return seconds if limit_s is None else min(seconds, limit_s / PARTS_PER_LIMIT)


def check_out(out: Path) -> None:
    """Raise ConfigError where no folder can be made."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder for the store.")


def list_images(
    config: Config,
    stored: Manifest | None = None,
    known_rows_only: bool = False,
    source: Source | None = None,
) -> tuple[Source, Listing]:
    """The data set of a config and its rows, `data.limit` applied, in the store's order.

    Args:
        config: checked.
        stored: the store that is gone on with.
        known_rows_only: leave images alone that the store does not know.
        source: the data set, where it is an object from Python; None opens the config's.

    Raises:
        DataError: it is not there, or empty.
        StoreMismatchError: rows of the store are not in it any more, or new ones are there unasked
            for.
    """
    source = open_source(config.data) if source is None else with_boxes(source, config.data)
    listing = source.listing()
    listing = listing if config.data.limit is None else listing.head(config.data.limit)
    if stored is not None:
        root = parse_path(config.out)
        before = _stored_listing(root, stored, listing)
        if before is not None:
            listing = in_stored_order(root, before, listing)
            if known_rows_only:
                return source, before
        new_rows = len(listing) - stored.num_rows
        if new_rows > 0 and not config.grow:
            raise StoreMismatchError(growth_refused(root, new_rows))
    return source, listing


def _stored_listing(root: Path, stored: Manifest, found: Listing) -> Listing | None:
    """The listing that a store was begun with; None where nothing is left of it.

    Where samples.h5 is damaged and no other file has a copy, it is the data set as it is found now,
    if that has the sha256 that the manifest tells.

    Raises:
        StoreMismatchError: samples.h5 is damaged, and the data set is another one now.
    """
    identity = stored.listing_identity
    before = read_listing(root, stored.num_rows, identity)
    if identity is None or (before is not None and listing_identity(before) == identity):
        return before
    if listing_identity(found) == identity:
        return found
    for run in reversed(stored.runs[:-1]):  # rows were being added to what other files know
        rows = str(run.header.fingerprint.get("listing"))
        first = read_listing(root, run.grid.stop_row, rows)
        if first is not None and listing_identity(first) == rows:
            grown = in_stored_order(root, first, found)
            return grown if listing_identity(grown) == identity else None
    if before is not None:
        raise StoreMismatchError(
            f"{root / layout.LISTING} is damaged, no other file of the store has a whole copy, and "
            f"the data set now has another listing ({listing_identity(found)}) than the store was "
            f"begun with ({identity}). Put the data set back as it was then, choose out=DIR for a "
            "new store, or overwrite=true to delete this one."
        )
    return None


def _unfinished(
    config: Config,
    stored: Manifest | None,
    listing: Listing,
    chosen: ChosenLayers,
) -> ChosenLayers:
    """Of the layers asked for, those that the store lacks or has not finished; else all.

    A store of [layer4] that is asked for [layer3,layer4] gets layer3; the model runs no deeper
    than it must.
    """
    out = parse_path(config.out)
    if stored is None or len(listing) > stored.num_rows:
        return chosen
    unfinished = {name for run, _ in missing_parts(out, stored) for name in run.names}
    finished = set(stored.layers) - unfinished
    fresh = [pair for pair in chosen if pair[0].name not in finished]
    if not fresh:
        return chosen
    for tap, reduce in chosen:
        if tap.name in finished:
            _refuse_another_layer(out, stored, tap, reduce, config)
    return fresh


def _refuse_another_layer(
    out: Path, stored: Manifest, tap: CapturePoint, reduce: StoredReduce, config: Config
) -> None:
    """A finished layer that is not computed again must be what is asked for, all the same."""
    before = stored.layers[tap.name]
    now = replace(
        before,
        layer=tap.layer,
        capture=tap.capture,
        reduce=reduce.name,
        reduce_args=reduce.args,
        dtype=tap.dtype or config.dtype,
    )
    line = stored.holder(tap.name).header.fingerprint.get(f"layer.{tap.name}")
    refuse_difference(
        out,
        {f"layer {tap.name}": {**asdict(before), "as": line}},
        {f"layer {tap.name}": {**asdict(now), "as": layer_line(now, config)}},
    )


def _begun(stored: Manifest | None, names: set[str]) -> ResumeState | None:
    """What a store decided for these layers when it was begun."""
    if stored is None:
        return None
    holders = [run for run in stored.runs if run.names & names]
    return ResumeState(stored.runs[0].resolved, holders[0].grid.part_rows if holders else None)
