"""job=stats itself: the statistics of layers over a data set, computed part by part."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from featx.config import Config
from featx.decode import PILLOW
from featx.devices import synchronise
from featx.distance import refuse_other_values
from featx.errors import ConfigError
from featx.loop import (
    Figures,
    failures_of,
    failures_text,
    labels_of,
    peak_memory_mib,
    run_parts,
)
from featx.moments import Moments, PartMoments, StatsLayer
from featx.prepare import PART_SECONDS, Prepared, check_out, list_images, prepare
from featx.progress import complain, describe_run, facts, size_text
from featx.projection import frechet_distance, spread
from featx.reduce import channel_axis, positions_last
from featx.stats_file import PARTS_FOLDER, STATS_FILE, Statistics, begun_settings
from featx.stats_parts import MomentsOfParts
from featx.store.commit import TEMPORARY, Disk, exclusive_lock
from featx.store.failures import failures_csv
from featx.store.layout import LOCK, Grid
from featx.types import Batch, Begun, Failure, LayerSpec, Listing, Part, Source

FAILURES_CSV = "stats-failures.csv"

COMMIT_BYTES_PER_S = 40e6
"""Bytes of a part's matrices that are built, synced and merged in a second, on a busy machine."""

COMMIT_SHARE = 0.1
"""Of a part's time that its commit may take."""

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
        self._begun = None if config.overwrite else begun_settings(self.folder)

    def list_images(self) -> tuple[Source, Listing]:
        """The rows as the data set lists them; a store in the same folder has its own order."""
        return list_images(self._config, source=self._source)

    def unfinished(self, listing: Listing, chosen: list[Any]) -> list[Any]:
        """All layers: one file holds them together."""
        return chosen

    def begun(self, names: set[str]) -> Begun | None:
        """What was decided before the first part was done."""
        if self._begun is None:
            return None
        resolved = {key: self._begun[key] for key in _RESOLVED}
        resolved["fold"] = self._begun.get("fold", False)
        resolved["jpeg"] = self._begun.get("jpeg", PILLOW)
        resolved["heif"] = self._begun.get("version.pillow_heif")
        return Begun(resolved, self._begun["part_rows"], "the statistics were")

    def part_limits(
        self, engine: Any, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """A minute of work, more where writing and merging the matrices would take much of it.

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
        return float("inf"), max(PART_SECONDS, commit_s / COMMIT_SHARE)

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
    out = Path(config.out).expanduser()
    other = None if config.stats.against is None else Statistics(config.stats.against)
    with contextlib.ExitStack() as stack:
        purpose = StatsPurpose(config, source)
        prepared = stack.enter_context(prepare(config, config_yaml, purpose))
        if other is not None:
            _check_against(other, purpose, prepared)
        disk = Disk(out)
        disk.make_folder(out)
        stack.enter_context(exclusive_lock(out / LOCK))
        _clear(disk, config.overwrite)
        parts = MomentsOfParts(
            disk, out / STATS_FILE, prepared.header, len(prepared.listing), purpose.layers
        )
        parts.survey()
        work = _StatsWork(prepared, purpose, parts)
        complain(facts(_begin_text(prepared, purpose, work, parts.path)))
        complain("")
        figures = run_parts(prepared, work, disk)
        merging = time.perf_counter()
        parts.finish()
        figures.seconds["write"] += time.perf_counter() - merging
        work.write_failures()
    if parts.failures:
        complain(failures_text(parts.failures))
    return _summary(Statistics(parts.path), other, parts.failures, figures)


class _StatsWork:
    """Moments of the rows, on the device, and their parts.

    Attributes:
        seconds: that the sums took, beside the model.
    """

    def __init__(self, prepared: Prepared, purpose: StatsPurpose, parts: MomentsOfParts) -> None:
        self.seconds = {"statistics": 0.0}
        self._prepared = prepared
        self._purpose = purpose
        self._parts = parts
        self._part: Part | None = None
        self._moments: dict[str, PartMoments] = {}
        self._failures: list[Failure] = []
        self.write_failures()

    @property
    def rows_asked(self) -> int:
        return len(self._prepared.listing)

    @property
    def rows_done(self) -> int:
        return self.rows_asked - sum(len(part) for part in self.missing())

    @property
    def rows_failed(self) -> int:
        return len(self._parts.failures)

    def missing(self) -> list[Part]:
        grid = Grid(self.rows_asked, self._prepared.part_rows)
        parts = [grid.part(index) for index in range(len(grid))]
        return [part for part in parts if not self._parts.has(part)]

    def take(self, part: Part, batch: Batch) -> list[Failure]:
        if self._part is None:
            layers = self._purpose.layers
            self._part, self._failures = part, []
            self._moments = {layer.spec.name: PartMoments(part, layer) for layer in layers}
        engine = self._prepared.engine
        values = engine.run_on_device(batch.images, labels_of(self._prepared, batch))
        failures = failures_of(self._prepared, batch, values)
        begun = time.perf_counter()
        failed = [failure.row for failure in failures]
        for name, moments in self._moments.items():
            rows = values[name][: batch.count]
            axis = self._purpose.axes.get(name)
            rows = rows if axis is None else positions_last(rows, axis)
            moments.add(batch.start, rows, failed)
        synchronise(engine.device)
        self.seconds["statistics"] += time.perf_counter() - begun
        self._failures += failures
        return failures

    def hand_over(self) -> Callable[[], None]:
        assert self._part is not None, "no batch of a part was taken"
        found = {name: moments.finish() for name, moments in self._moments.items()}
        part, failures = self._part, self._failures
        self._part, self._moments, self._failures = None, {}, []
        return functools.partial(self._commit, part, failures, found)

    def _commit(self, part: Part, failures: list[Failure], found: dict[str, Any]) -> None:
        self._parts.commit(part, failures, found)
        if failures:
            self.write_failures()

    def write_failures(self) -> None:
        """The list beside the file, from what the parts hold; apart from that of a store."""
        path = self._parts.path.with_name(FAILURES_CSV)
        self._parts.disk.replace(path, failures_csv(self._parts.failures))


def _clear(disk: Disk, overwrite: bool) -> None:
    """Delete what a killed process left half written; with overwrite, all statistics."""
    for name in (STATS_FILE, FAILURES_CSV):
        for leftover in disk.root.glob(f"{TEMPORARY}{name}.*"):
            disk.remove(leftover)
    if overwrite:
        for name in (PARTS_FOLDER, FAILURES_CSV, STATS_FILE):
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
    prepared: Prepared, purpose: StatsPurpose, work: _StatsWork, path: Path
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
    done, total = work.rows_done, work.rows_asked
    state = f"{done} of {total} rows are there already" if done else "begun"
    return [*rows, ("statistics", f"{path}, {state}")]


def _summary(
    statistics: Statistics, other: Statistics | None, failures: Sequence[Failure], figures: Figures
) -> dict[str, Any]:
    layers, distances = {}, {}
    for name in statistics:
        moments = statistics[name]
        layers[name] = spread(moments)
        if other is not None and name in other:
            distances[name] = _distance(moments, other[name])
    del figures.seconds["copy"]  # nothing is copied but a flag a row
    return {
        "rows": statistics.attributes["stop"],
        "failures": len(failures),
        "file": str(statistics.path),
        "layers": layers,
        "frechet": distances,
        **figures.as_dict(),
        "peak_memory_mib": peak_memory_mib(),
    }


def _distance(a: Moments, b: Moments) -> float | None:
    """None where one of them has too few rows for a covariance."""
    return frechet_distance(a, b) if min(a.count, b.count) > 1 else None
