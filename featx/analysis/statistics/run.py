"""job=stats: the statistics of layers over a data set, computed part by part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from featx.analysis.engine_specs import FEATURES
from featx.analysis.statistics.covariance import frechet_distance
from featx.analysis.statistics.covariance import spread as spread_of
from featx.analysis.statistics.frechet_distance import refuse_other_values
from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.session import FAILURES_CSV, MomentsOfParts, StatsSession
from featx.analysis.statistics.sink import StatsPartTask, StatsSink, tree_of
from featx.analysis.statistics.stats_file import PARTS_FOLDER, STATS_FILE, STATS_IMAGES, Statistics
from featx.analysis.statistics.target import StatsTarget
from featx.base.console import announce, log_message
from featx.base.text import size_text
from featx.config.run_config import Config
from featx.errors import ConfigError, StoreMismatchError
from featx.pipeline.executors import check_executor, in_process, run_distributed
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.image_changes import (
    ImagesOfRun,
    changed_images_text,
    changed_text,
    compare_images,
    gone_images_text,
    mended_images_text,
)
from featx.pipeline.overwriting import OverwriteMark, resume_or_overwrite
from featx.pipeline.row_failures import failures_text
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.run_summary import describe_run
from featx.storage.local_folder import TEMPORARY, AtomicFolder, exclusive_lock
from featx.store.heartbeat import Heartbeat, clear_signs, refuse_other_writers
from featx.store.image_states import keep_image_states
from featx.store.layout import LOCK, STATS_OVERWRITING, TRACE, WORKERS, Grid
from featx.types import Failure, Source

_ANEW = (
    "computes anew the files of parts that hold them, and the whole where it is finished: a sum "
    "does not lose one row"
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
    path = Path(config.out).expanduser() / STATS_OVERWRITING
    mark = OverwriteMark(path, config, source is None)

    def run(config: Config) -> dict[str, Any]:
        """Run with one config."""
        return _run(config, config_yaml, mark, source)

    return resume_or_overwrite(config, mark, run)


def _run(
    config: Config, config_yaml: str, mark: OverwriteMark, source: Source | None
) -> dict[str, Any]:
    """Run as `run_stats` does; overwrite=true deletes existing statistics."""
    out = Path(config.out).expanduser()
    check_executor(config)
    reference = None if config.stats.reference is None else Statistics(config.stats.reference)
    with contextlib.ExitStack() as stack:
        target = StatsTarget(config, source)
        context = stack.enter_context(build_run_context(config, config_yaml, FEATURES, target))
        if reference is not None:
            _check_reference(reference, target, context)
        disk = AtomicFolder(out)
        disk.make_folder(out)
        lock = stack.enter_context(exclusive_lock(out / LOCK))
        # With the lock held and no other writer alive, the remaining heartbeat files are of dead
        # processes.
        refuse_other_writers(out)
        clear_signs(disk)
        _clear(disk, config.overwrite)
        if config.overwrite:
            # Written between the deletion and the first part: after a kill, the same command
            # resumes instead of deleting the new parts.
            mark.write(disk)
        parts = MomentsOfParts(tree_of(context, target.layers, disk))
        parts.survey()
        _refuse_changed_images(context, parts)
        grid = Grid(len(context.listing), context.part_rows)
        session = StatsSession(parts, grid, lock)
        announce(_begin_text(context, target, session, parts.path))
        outcome = _computed(context, target, session, config_yaml)
        figures = outcome.figures
        # The merge of the last parts counts as writing.
        merging = time.perf_counter()
        parts.finish()
        written = figures.seconds["write"]
        if written is not None:
            figures.seconds["write"] = written + time.perf_counter() - merging
        session.write_failures()
        mark.remove(disk)
    if parts.failures:
        log_message(failures_text(parts.failures))
    return _summary(Statistics(parts.path), reference, parts.failures, outcome)


def _refuse_changed_images(context: RunContext, parts: MomentsOfParts) -> None:
    """Compare the images with those of the existing statistics.

    With refresh=true, files that contain changed images are deleted and computed again.

    Raises:
        StoreMismatchError: images have changed, and refresh=true was not given.
    """
    keys, config = context.listing.keys, context.config
    states_file = parts.path.with_name(STATS_IMAGES)
    checksums, done = parts.image_checksums()
    before = ImagesOfRun(0, checksums, done)
    changes = compare_images(context.source, keys, [before], states_file, read_all=config.refresh)
    if len(changes.gone):
        log_message(f"warning: {gone_images_text(keys, changes.gone)}. Statistics keep them.\n")
    rows = changes.rows.tolist()
    if config.refresh:
        log_message(f"{changed_text(len(rows))} since the statistics were taken\n")
        parts.discard(rows)
    failed = {failure.row for failure in parts.failures}
    if not config.refresh and (changed := [row for row in rows if row not in failed]):
        raise StoreMismatchError(changed_images_text(parts.path, keys, changed, _ANEW))
    if not config.refresh and rows:
        log_message(f"{mended_images_text(keys, rows)}\n")
    if changes.states is not None:
        keep_image_states(parts.disk, states_file, changes.states)


def _computed(
    context: RunContext, target: StatsTarget, session: StatsSession, config_yaml: str
) -> RunOutcome:
    """Compute the missing parts, in this process or in those that the config requests."""
    if not context.config.is_spread:
        with Heartbeat(session.disk, str(context.engine.device)) as heartbeat:
            sink = StatsSink(context, target.layers, target.axes, session.commit, heartbeat)
            return in_process.run(context, session, sink)
    part_task = StatsPartTask(target.dtype, target.settings, tuple(target.layers), target.axes)
    if session.missing():
        session.write_listing(context.listing)
    return run_distributed(context, session, part_task, config_yaml)


def _clear(disk: AtomicFolder, overwrite: bool) -> None:
    """Delete unfinished files of killed processes; with overwrite, all statistics."""
    names = (STATS_FILE, FAILURES_CSV, STATS_IMAGES, STATS_OVERWRITING, TRACE)
    for pattern in (*(f"{TEMPORARY}{name}.*" for name in names), f"{WORKERS}/{TEMPORARY}*"):
        for leftover in disk.root.glob(pattern):
            disk.remove(leftover)
    if overwrite:
        for name in (PARTS_FOLDER, FAILURES_CSV, STATS_FILE, STATS_IMAGES):
            disk.remove(disk.root / name)


def _check_reference(reference: Statistics, target: StatsTarget, context: RunContext) -> None:
    """Check, before hours of work, that a distance to the other statistics can be computed.

    Raises:
        ConfigError: they have no layer in common, or store only variances.
        StoreMismatchError: they are from another model or transform.
    """
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
        mine = {
            "target": target.settings.get("target"),
            "weights_sha256": header.weights_sha256,
            "transform": header.transform,
            **layer.attributes,
        }
        refuse_other_values(mine, about, f"this run and {reference.path}, {layer.spec.name}")
        if about["kind"] != "full":
            raise ConfigError(
                f"stats.reference={reference.path} keeps only the variances of {layer.spec.name}; "
                "a distance needs stats.covariance=full there, too."
            )


def _begin_text(
    context: RunContext, target: StatsTarget, session: StatsSession, path: Path
) -> list[tuple[str, str]]:
    """Return the lines of text that describe the run before it starts."""
    lines = []
    for layer in target.layers:
        numbers = layer.dim**2 if layer.kind == "full" else layer.dim
        each = "" if layer.positions is None else f", {layer.positions} rows a picture"
        lines.append(
            f"{layer.spec.name}  {layer.spec.shape}  {layer.dim} features{each}, {layer.kind}, "
            f"{size_text(8 * numbers)}"
        )
    rows = [
        (name, "\n".join(lines) if name == "layers" else text)
        for name, text in describe_run(context)
    ]
    done, total = session.rows_done, session.rows_asked
    state = f"{done} of {total} rows are there already" if done else "begun"
    return [*rows, ("statistics", f"{path}, {state}")]


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
        layers[name] = spread_of(moments)
        if reference is not None and name in reference:
            distances[name] = _distance(moments, reference[name])
    figures = outcome.figures
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
    return frechet_distance(a, b) if min(a.count, b.count) > 1 else None
