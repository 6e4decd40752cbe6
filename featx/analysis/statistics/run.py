"""job=stats: the statistics of layers over a data set, computed part by part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from featx.analysis.engine_specs import FEATURES
from featx.analysis.statistics.covariance import gaussian_distance
from featx.analysis.statistics.covariance import spread as spread_of
from featx.analysis.statistics.frechet import refuse_other_values
from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.position_norms import norms_summary
from featx.analysis.statistics.reader import Statistics
from featx.analysis.statistics.session import FAILURES_CSV, MomentsOfParts, StatsSession
from featx.analysis.statistics.sink import StatsPartTask, StatsSink, tree_of
from featx.analysis.statistics.stats_file import PARTS_FOLDER, STATS_FILE, STATS_IMAGES
from featx.analysis.statistics.target import StatsTarget
from featx.analysis.statistics.tokens import explain_missing_norms
from featx.base import log_message, shown_path, size_text
from featx.config import Config
from featx.errors import ConfigError, StoreMismatchError
from featx.pipeline import (
    ImagesOfRun,
    OverwriteMark,
    RunContext,
    RunDescription,
    RunObserver,
    RunOutput,
    RunTarget,
    changed_failures_text,
    changed_images_text,
    changed_text,
    compare_images,
    describe_run,
    drive_run,
    gone_images_text,
    peak_memory_mib,
)
from featx.pipeline.executors import RunOutcome
from featx.storage import TEMPORARY_PREFIX, AtomicFolder, exclusive_lock
from featx.store import (
    Grid,
    Heartbeat,
    clear_heartbeats,
    layout,
    refuse_other_writers,
    report_lost_work,
    write_image_states,
)
from featx.types import Failure, Source

_REFRESH_TEXT = (
    "computes the parts with them again, or everything if the statistics are finished: one row "
    "cannot be taken out of a sum"
)
"""Effect of refresh=true, for messages."""


def run_stats(config: Config, config_yaml: str, source: Source | None = None) -> dict[str, Any]:
    """Start or resume the statistics of a config until they are complete.

    Args:
        config: checked config with job=stats.
        config_yaml: config as the user gave it, which the file records.
        source: data set object from Python, or None to open that of the config.

    Returns:
        rows, failures, file, layers with their summary, frechet {layer: distance} if another file
        is given, and measurements of the run.

    Raises:
        FeatxError: the config does not fit the statistics in the folder, or the run failed.
        Interrupted: a signal ended the run; complete parts are committed.
    """
    path = Path(config.out).expanduser() / layout.STATS_OVERWRITE_MARKER
    marker = OverwriteMark(path, config, source is None)

    def output(config: Config) -> StatsOutput:
        return StatsOutput(config, source)

    return drive_run(config, config_yaml, FEATURES, marker, output)


class StatsOutput(RunOutput[StatsSession]):
    """Statistics in the folder `out`, which may also contain a store.

    Args:
        config: checked config with job=stats.
        source: data set object from Python, or None to open that of the config.
    """

    _target: StatsTarget

    def __init__(self, config: Config, source: Source | None = None) -> None:
        super().__init__(config)
        self._source = source
        self._out = Path(config.out).expanduser()
        self._reference: Statistics | None = None

    def check(self) -> None:
        """Open the statistics of stats.reference."""
        if self.config.stats.reference is not None:
            self._reference = Statistics(self.config.stats.reference)

    def open_target(self) -> RunTarget:
        """Read the settings of existing statistics."""
        self._target = StatsTarget(self.config, self._source)
        return self._target

    def check_context(self, context: RunContext) -> None:
        """Check that a distance to stats.reference can be computed."""
        if self._reference is not None:
            _check_reference(self._reference, self._target, context)

    @contextlib.contextmanager
    def open_session(self, context: RunContext) -> Iterator[StatsSession]:
        """Lock the folder, delete leftovers, and find complete parts."""
        disk = AtomicFolder(self._out)
        disk.make_folder(self._out)
        with exclusive_lock(self._out / layout.LOCK) as lock:
            # With the lock held and no other writer alive, the remaining heartbeat files are of
            # dead processes.
            refuse_other_writers(self._out)
            report_lost_work(self._out)
            clear_heartbeats(disk)
            _clear(disk, self.config.overwrite)
            parts = MomentsOfParts(tree_of(context, self._target.layers, disk))
            parts.survey()
            yield StatsSession(parts, Grid(len(context.listing), context.part_rows), lock)

    def describe(self, context: RunContext, session: StatsSession) -> RunDescription:
        """Return the rows of the table before a run."""
        return _describe(context, self._target, session)

    def update_rows(self, context: RunContext, session: StatsSession) -> None:
        """Compare the images; with refresh=true, discard the parts with changed ones."""
        _check_images(context, session.parts)
        session.write_failures()

    def sink(
        self,
        context: RunContext,
        session: StatsSession,
        heartbeat: Heartbeat,
        observer: RunObserver,
    ) -> StatsSink:
        """Return the sink that sums the rows of parts."""
        target = self._target
        return StatsSink(context, target.layers, target.axes, session.commit, heartbeat)

    def part_task(self, context: RunContext, session: StatsSession) -> StatsPartTask:
        """Return the part task of workers, and write the listing for them."""
        if session.missing():
            session.write_listing(context.listing)
        target = self._target
        return StatsPartTask(target.dtype, target.settings, tuple(target.layers), target.axes)

    def complete(self, session: StatsSession, outcome: RunOutcome) -> None:
        """Merge the parts; the merge counts as writing."""
        started_at = time.perf_counter()
        session.parts.finish()
        seconds = outcome.metrics.seconds
        if (write_s := seconds["write"]) is not None:
            seconds["write"] = write_s + time.perf_counter() - started_at

    def summary(self, session: StatsSession, outcome: RunOutcome) -> dict[str, Any]:
        """Return the summary of the finished file."""
        return _summary(Statistics(session.parts.path), self._reference, session.failures, outcome)


def _check_images(context: RunContext, parts: MomentsOfParts) -> None:
    """Compare the images with those of the existing statistics.

    With refresh=true, files that contain changed images are deleted and computed again.
    """
    keys, config = context.listing.keys, context.config
    states_file = parts.path.with_name(STATS_IMAGES)
    checksums, done = parts.image_checksums()
    recorded = ImagesOfRun(0, checksums, done)
    changes = compare_images(context.source, keys, [recorded], states_file, read_all=config.refresh)
    if len(changes.gone):
        log_message(
            f"{gone_images_text(keys, changes.gone)}. Statistics keep them.", level="warning"
        )
    rows = changes.rows.tolist()
    if config.refresh:
        log_message(f"{changed_text(len(rows))} since the statistics were taken")
        parts.discard(rows)
    failed = {failure.row for failure in parts.failures}
    if not config.refresh and (changed := [row for row in rows if row not in failed]):
        raise StoreMismatchError(changed_images_text(parts.path, keys, changed, _REFRESH_TEXT))
    if not config.refresh and rows:
        log_message(f"{changed_failures_text(keys, rows)}")
    if changes.states is not None:
        write_image_states(parts.disk, states_file, changes.states)


def _clear(disk: AtomicFolder, overwrite: bool) -> None:
    """Delete unfinished files of killed processes; with overwrite, all statistics."""
    names = (STATS_FILE, FAILURES_CSV, STATS_IMAGES, layout.STATS_OVERWRITE_MARKER, layout.TRACE)
    for pattern in (
        *(f"{TEMPORARY_PREFIX}{name}.*" for name in names),
        f"{layout.WORKERS}/{TEMPORARY_PREFIX}*",
    ):
        for leftover in disk.root.glob(pattern):
            disk.remove(leftover)
    if overwrite:
        for name in (PARTS_FOLDER, FAILURES_CSV, STATS_FILE, STATS_IMAGES):
            disk.remove(disk.root / name)


def _check_reference(reference: Statistics, target: StatsTarget, context: RunContext) -> None:
    """Check, before hours of work, that a distance to the other statistics can be computed."""
    common = [layer for layer in target.layers if layer.spec.name in reference]
    if not common:
        names = ", ".join(layer.spec.name for layer in target.layers)
        raise ConfigError(
            f"stats.reference={reference.path} has statistics of {', '.join(reference)}, "
            f"of none of {names}."
        )
    for layer in common:
        about = reference.about(layer.spec.name)
        header = context.header
        run_values = {
            "target": target.settings.get("target"),
            "weights_sha256": header.weights_sha256,
            "transform": header.transform,
            **layer.attributes,
        }
        refuse_other_values(run_values, about, f"this run and {reference.path}, {layer.spec.name}")
        if about["kind"] != "full":
            raise ConfigError(
                f"stats.reference={reference.path} keeps only the variances of {layer.spec.name}; "
                "a distance needs stats.covariance=full there, too."
            )


def _describe(context: RunContext, target: StatsTarget, session: StatsSession) -> RunDescription:
    """Describe the run before it starts."""
    lines = []
    for layer in target.layers:
        numbers = layer.dim**2 if layer.kind == "full" else layer.dim
        each = "" if layer.positions is None else f", {layer.positions} rows per image"
        lines.append(
            f"{layer.spec.name}  {layer.spec.shape}  {layer.dim} features{each}, {layer.kind}, "
            f"{size_text(8 * numbers)}"
        )
    done, total = session.num_committed, session.num_rows
    state = f"{done} of {total} rows are there already" if done else "new"
    output = ("statistics", f"{shown_path(session.parts.path)}, {state}")
    return describe_run(context, output, "\n".join(lines))


def _summary(
    statistics: Statistics,
    reference: Statistics | None,
    failures: Sequence[Failure],
    outcome: RunOutcome,
) -> dict[str, Any]:
    """Return the result of the run as JSON types."""
    layers, distances = {}, {}
    for name in statistics:
        moments = statistics[name]
        norms = None if moments.norms is None else norms_summary(moments.norms)
        reason = None
        if moments.norms is None:
            about = statistics.about(name)
            reason = explain_missing_norms(about["shape"], about)
        layers[name] = {
            **spread_of(moments),
            "token_norms": norms,
            "no_token_norms": reason,
        }
        if reference is not None and name in reference:
            distances[name] = _distance(moments, reference[name])
    figures = outcome.metrics
    del figures.seconds["copy"]  # only one flag per row is copied
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
    """Return the Fréchet distance, or None if one of them has too few rows for a covariance."""
    return gaussian_distance(a, b) if min(a.count, b.count) > 1 else None
