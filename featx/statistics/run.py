"""job=stats itself: the statistics of layers over a data set, computed part by part."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.config import Config
from featx.errors import ConfigError, StoreMismatchError
from featx.executors import check, here, spread
from featx.executors.harvest import Outcome
from featx.loading.decode import PILLOW
from featx.progress import announce, complain, describe_run, size_text
from featx.reduce import channel_axis
from featx.run.failed_rows import failures_text
from featx.run.image_changes import (
    ImagesOfRun,
    changed_images_text,
    changed_text,
    compare_images,
    gone_images_text,
    mended_images_text,
    unknown_images_text,
)
from featx.run.loop import peak_memory_mib
from featx.run.overwriting import OverwriteMark, resumed_or_anew
from featx.run.prepare import Prepared, prepare
from featx.run.purpose import check_out, list_images, seconds_of_part
from featx.statistics.distance import refuse_other_values
from featx.statistics.file import (
    PARTS_FOLDER,
    STATS_FILE,
    STATS_IMAGES,
    Statistics,
    statistics_begun,
)
from featx.statistics.moments import Moments
from featx.statistics.part_moments import StatsLayer
from featx.statistics.parts import MomentsOfParts
from featx.statistics.projection import frechet_distance
from featx.statistics.projection import spread as spread_of
from featx.statistics.work import StatsProduct, StatsWork, tree_of
from featx.store.commit import TEMPORARY, Disk, exclusive_lock
from featx.store.failures import failures_csv
from featx.store.heartbeat import Heartbeat, clear_signs, refuse_other_writers
from featx.store.images import keep_image_states
from featx.store.layout import LISTING, LOCK, STATS_OVERWRITING, TRACE, WORKERS, Grid
from featx.store.listing import listing_file, marks_digest
from featx.types import Begun, Failure, LayerSpec, Listing, Part, Source

FAILURES_CSV = "stats-failures.csv"

COMMIT_BYTES_PER_S = 40e6
"""Bytes of a part's matrices that are built, synced and merged in a second, on a busy machine."""

COMMIT_SHARE = 0.1
"""Of a part's time that its commit may take."""

_ANEW = (
    "computes anew the files of parts that hold them, and the whole where it is finished: a sum "
    "does not lose one row"
)
"""What refresh=true does."""

_RESOLVED = ("precision", "compile", "channels_last", "batch_size")


class StatsPurpose:
    """Statistics in the folder that `out` names, beside a store that may be there.

    Attributes:
        dtype: values are taken in float32, before any cast to a store's dtype.
        layers: whose statistics are taken; known after `part_limits`.
        axes: layer -> the axis of its features, where each position is a row.
    """

    dtype = "float32"

    def __init__(self, config: Config, source: Source | None = None) -> None:
        self.layers: list[StatsLayer] = []
        self.axes: dict[str, int] = {}
        self.settings: dict[str, Any] = {
            "dtype": self.dtype,
            "stats.rows": config.stats.rows,
            "stats.kind": config.stats.kind,
        }
        if config.takes_gradients:
            self.settings["target"] = config.target
        self._config = config
        self._source = source
        self.folder: Path | None = Path(config.out).expanduser()
        check_out(self.folder)
        self._begun = None if config.overwrite else statistics_begun(self.folder)

    def list_images(self) -> tuple[Source, Listing]:
        """The rows as the data set lists them; a store in the same folder has its own order."""
        source, listing = list_images(self._config, source=self._source)
        if listing.marks is not None:  # no row says which image it is of, so all of them do
            self.settings["data.marks"] = marks_digest(listing)
        return source, listing

    def unfinished(self, listing: Listing, chosen: list[Any]) -> list[Any]:
        """All layers: one file holds them together."""
        return chosen

    def begun(self, names: set[str]) -> Begun | None:
        """What was decided before the first part was done."""
        if self._begun is None:
            return None
        settings = self._begun.settings
        resolved = {key: settings[key] for key in _RESOLVED}
        resolved["fold"] = settings.get("fold", False)
        resolved["jpeg"] = settings.get("jpeg", PILLOW)
        resolved["heif"] = settings.get("version.pillow_heif")
        if self._begun.threads is not None:
            resolved["threads"] = self._begun.threads
        return Begun(resolved, settings["part_rows"], "the statistics were")

    def part_limits(
        self, engine: Any, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """As of a store, longer where writing and merging the matrices would take much of it.

        Raises:
            ConfigError: a matrix would be too large.
            ReduceError: the positions of a layer are unknown.
        """
        self.layers = [self._layer(spec, engine.backbone.preprocess.crop) for spec in specs]
        if self._config.stats.rows == "position" and not self.axes:
            raise ConfigError(
                "stats.rows=position has no effect: the rows of these layers are vectors. Leave "
                "it out, or take layers with maps or tokens, or another reduction."
            )
        full = self._config.stats.kind == "full"
        numbers = sum(layer.dim ** (2 if full else 1) for layer in self.layers)
        commit_s = 8 * numbers / COMMIT_BYTES_PER_S
        seconds = seconds_of_part(work_s, self._config.executor.task_seconds)
        return float("inf"), max(seconds, commit_s / COMMIT_SHARE)

    def _layer(self, spec: LayerSpec, input_size: tuple[int, int]) -> StatsLayer:
        positions = None
        if self._config.stats.rows == "position" and len(spec.shape) > 1:
            axis = channel_axis(spec.reduce, spec.name, spec.shape, input_size)
            self.axes[spec.name] = axis
            positions = math.prod(spec.shape) // spec.shape[axis - 1]
        return StatsLayer(spec, self._config.stats.kind, positions)


def run_stats(config: Config, config_yaml: str, source: Source | None = None) -> dict[str, Any]:
    """Begin or go on with the statistics of a config until they are whole.

    Args:
        config: checked, with job=stats.
        config_yaml: as the user gave it, for the file.
        source: the data set, where it is an object from Python; None opens the config's.

    Returns:
        rows, failures, file, layers with their spread, frechet {layer: distance} where another
        file was named, and what it took.

    Raises:
        FeatxError: the config or the statistics there do not fit, or the run failed on its way.
        Interrupted: a signal asked for the end; what was whole is committed.
    """
    path = Path(config.out).expanduser() / STATS_OVERWRITING
    mark = OverwriteMark(path, config, source is None)

    def run(config: Config) -> dict[str, Any]:
        return _run(config, config_yaml, mark, source)

    return resumed_or_anew(config, mark, run)


def _run(
    config: Config, config_yaml: str, mark: OverwriteMark, source: Source | None
) -> dict[str, Any]:
    """As `run_stats`, and overwrite=true deletes what is there."""
    out = Path(config.out).expanduser()
    if config.is_spread:
        check(config)
    other = None if config.stats.against is None else Statistics(config.stats.against)
    with contextlib.ExitStack() as stack:
        purpose = StatsPurpose(config, source)
        prepared = stack.enter_context(prepare(config, config_yaml, purpose))
        if other is not None:
            _check_against(other, purpose, prepared)
        disk = Disk(out)
        disk.make_folder(out)
        lock = stack.enter_context(exclusive_lock(out / LOCK))
        refuse_other_writers(out)
        clear_signs(disk)
        _clear(disk, config.overwrite)
        if config.overwrite:
            mark.write(disk)
        parts = MomentsOfParts(tree_of(prepared, purpose.layers, disk))
        parts.survey()
        _refuse_changed_images(prepared, parts)
        grid = Grid(len(prepared.listing), prepared.part_rows)
        session = StatsSession(parts, grid, lock)
        announce(_begin_text(prepared, purpose, session, parts.path))
        outcome = _computed(prepared, purpose, session, config_yaml)
        figures = outcome.figures
        merging = time.perf_counter()
        parts.finish()
        written = figures.seconds["write"]
        if written is not None:
            figures.seconds["write"] = written + time.perf_counter() - merging
        session.write_failures()
        mark.remove(disk)
    if parts.failures:
        complain(failures_text(parts.failures))
    return _summary(Statistics(parts.path), other, parts.failures, outcome)


class StatsSession:
    """Statistics being taken, under the folder's lock: what is there and what is missing.

    Args:
        parts: of the run, surveyed.
        grid: of its rows.
        lock: the descriptor that holds the folder.
    """

    def __init__(self, parts: MomentsOfParts, grid: Grid, lock: int) -> None:
        self.root = parts.path.parent
        self.disk = parts.disk
        self.lock = lock
        self.rows_asked = grid.num_rows
        self._parts = parts
        self._grid = [grid.part(index) for index in range(len(grid))]
        self.write_failures()

    @property
    def rows_done(self) -> int:
        return self.rows_asked - sum(len(part) for part in self.missing())

    @property
    def num_failed(self) -> int:
        return len(self._parts.failures)

    def missing(self) -> list[Part]:
        """The parts that are still to be done, in order."""
        return self._parts.missing(self._grid)

    def commit(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> Sequence[Failure]:
        """Make one part durable. Returns its failures."""
        there = self._parts.commit(part, failures, moments, checksums)
        if there:
            self.write_failures()
        return there

    def committed(self, part: Part, failures: Sequence[Failure]) -> None:
        """A worker has made a part durable; its failures are noted."""
        self._parts.committed(part, failures)
        if failures:
            self.write_failures()

    def arrived(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Those of some parts that other processes have committed, with their failures."""
        return self._parts.arrived(parts)

    def write_failures(self) -> None:
        """The list beside the file, from what the parts hold; apart from that of a store."""
        self.disk.replace(self.root / FAILURES_CSV, failures_csv(self._parts.failures))

    def write_listing(self, listing: Listing) -> None:
        """The rows for workers, who list nothing themselves; goes with the parts."""
        self.disk.replace(self._parts.folder / LISTING, listing_file(listing))


def _refuse_changed_images(prepared: Prepared, parts: MomentsOfParts) -> None:
    """Compare the images with those that the statistics which are there were taken from.

    With refresh=true the files that hold changed images go, to be computed anew.

    Raises:
        StoreMismatchError: images have changed, and refresh=true was not given.
    """
    keys, config = prepared.listing.keys, prepared.config
    states_file = parts.path.with_name(STATS_IMAGES)
    checksums, done = parts.image_checksums()
    before = ImagesOfRun(0, checksums, done)
    changes = compare_images(prepared.source, keys, [before], states_file, read_all=config.refresh)
    if changes.num_unknown:
        complain(
            f"warning: {unknown_images_text(changes.num_unknown)} (an early featx took these "
            "statistics): whether it has changed is not known. overwrite=true begins them anew.\n"
        )
    if len(changes.gone):
        complain(f"warning: {gone_images_text(keys, changes.gone)}. Statistics keep them.\n")
    rows = changes.rows.tolist()
    if config.refresh:
        complain(f"{changed_text(len(rows))} since the statistics were taken\n")
        parts.discard(rows)
    failed = {failure.row for failure in parts.failures}
    if not config.refresh and (changed := [row for row in rows if row not in failed]):
        raise StoreMismatchError(changed_images_text(parts.path, keys, changed, _ANEW))
    if not config.refresh and rows:
        complain(f"{mended_images_text(keys, rows)}\n")
    if changes.states is not None:
        keep_image_states(parts.disk, states_file, changes.states)


def _computed(
    prepared: Prepared, purpose: StatsPurpose, session: StatsSession, config_yaml: str
) -> Outcome:
    """What is missing, computed by this process or by those that the config asks for."""
    if not prepared.config.is_spread:
        with Heartbeat(session.disk, str(prepared.engine.device)) as heart:
            maker = StatsWork(prepared, purpose.layers, purpose.axes, session.commit, heart)
            return here.run(prepared, session, maker)
    product = StatsProduct(purpose.dtype, purpose.settings, tuple(purpose.layers), purpose.axes)
    if session.missing():
        session.write_listing(prepared.listing)
    return spread(prepared, session, product, config_yaml)


def _clear(disk: Disk, overwrite: bool) -> None:
    """Delete what a killed process left half written; with overwrite, all statistics."""
    names = (STATS_FILE, FAILURES_CSV, STATS_IMAGES, STATS_OVERWRITING, TRACE)
    for pattern in (*(f"{TEMPORARY}{name}.*" for name in names), f"{WORKERS}/{TEMPORARY}*"):
        for leftover in disk.root.glob(pattern):
            disk.remove(leftover)
    if overwrite:
        for name in (PARTS_FOLDER, FAILURES_CSV, STATS_FILE, STATS_IMAGES):
            disk.remove(disk.root / name)


def _check_against(other: Statistics, purpose: StatsPurpose, prepared: Prepared) -> None:
    """Raise, before hours of work, where no distance to the other statistics can be told."""
    common = [layer for layer in purpose.layers if layer.spec.name in other]
    if not common:
        names = ", ".join(layer.spec.name for layer in purpose.layers)
        raise ConfigError(
            f"stats.against={other.path} has statistics of {', '.join(other)}, of none of {names}."
        )
    for layer in common:
        about = other.about(layer.spec.name)
        header = prepared.header
        mine = {
            "target": purpose.settings.get("target"),
            "weights_sha256": header.weights_sha256,
            "transform": header.transform,
            **layer.attributes,
        }
        refuse_other_values(mine, about, f"this run and {other.path}, {layer.spec.name}")
        if about["kind"] != "full":
            raise ConfigError(
                f"stats.against={other.path} keeps the variances of {layer.spec.name} only; a "
                "distance needs stats.kind=full there, too."
            )


def _begin_text(
    prepared: Prepared, purpose: StatsPurpose, session: StatsSession, path: Path
) -> list[tuple[str, str]]:
    """What will be done, before it is done."""
    lines = []
    for layer in purpose.layers:
        numbers = layer.dim**2 if layer.kind == "full" else layer.dim
        each = "" if layer.positions is None else f", {layer.positions} rows a picture"
        lines.append(
            f"{layer.spec.name}  {layer.spec.shape}  {layer.dim} features{each}, {layer.kind}, "
            f"{size_text(8 * numbers)}"
        )
    rows = [
        (name, "\n".join(lines) if name == "layers" else text)
        for name, text in describe_run(prepared)
    ]
    done, total = session.rows_done, session.rows_asked
    state = f"{done} of {total} rows are there already" if done else "begun"
    return [*rows, ("statistics", f"{path}, {state}")]


def _summary(
    statistics: Statistics, other: Statistics | None, failures: Sequence[Failure], outcome: Outcome
) -> dict[str, Any]:
    layers, distances = {}, {}
    for name in statistics:
        moments = statistics[name]
        layers[name] = spread_of(moments)
        if other is not None and name in other:
            distances[name] = _distance(moments, other[name])
    figures = outcome.figures
    del figures.seconds["copy"]  # nothing is copied but a flag a row
    return {
        "rows": statistics.attributes["stop"],
        "failures": len(failures),
        "file": str(statistics.path),
        "layers": layers,
        "frechet": distances,
        **figures.as_dict(),
        "peak_memory_mib": max(peak_memory_mib(), outcome.peak_memory_mib),
    }


def _distance(a: Moments, b: Moments) -> float | None:
    """None where one of them has too few rows for a covariance."""
    return frechet_distance(a, b) if min(a.count, b.count) > 1 else None
