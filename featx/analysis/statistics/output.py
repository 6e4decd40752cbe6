"""Statistics as the output of a run: sums of the rows of each part, merged into one file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from featx.analysis.engine_specs import FEATURES
from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import PartMoments, StatsLayer
from featx.analysis.statistics.reader import Statistics, summary_of
from featx.analysis.statistics.session import StatsSession, clear_files, spans_in
from featx.analysis.statistics.stats_file import (
    PARTS_FOLDER,
    RESOLVED,
    STATS_IMAGES,
    stored_settings,
)
from featx.analysis.value_settings import model_values, refuse_other_values
from featx.base import differences, log_message, record_use, shown_path, size_text, synchronise
from featx.config import Config
from featx.errors import ConfigError, RunError, StoreMismatchError
from featx.images import PILLOW
from featx.layers import token_geometries
from featx.pipeline import (
    ImagesOfRun,
    Output,
    Rows,
    RunContext,
    RunOutcome,
    changed_failures_text,
    changed_images_text,
    changed_text,
    check_out,
    compare_images,
    describe_run,
    failures_of,
    gone_images_text,
    image_keys,
    list_images,
    peak_memory_mib,
    run_output,
    seconds_of_part,
)
from featx.storage import AtomicFolder, exclusive_lock
from featx.store import (
    Grid,
    add_image_checksums,
    clear_heartbeats,
    content_tags_digest,
    layout,
    read_listing,
    refuse_other_writers,
    report_lost_work,
    write_image_states,
    write_listing,
)
from featx.types import UNKNOWN_IMAGE, Batch, Failure, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import ChosenLayers

COMMIT_BYTES_PER_S = 40e6
"""Bytes of a part's matrices that are built, synced and merged per second on a busy machine."""

COMMIT_SHARE = 0.1
"""Share of the time of a part that its commit may take."""

_RESUMED = ("precision", "compile", "channels_last", "batch_size")
"""Recorded settings that a resume uses again."""

_REFRESH_TEXT = (
    "computes the parts with them again, or everything if the statistics are finished: one row "
    "cannot be taken out of a sum"
)
"""Effect of refresh=true, for messages."""


def run_stats(config: Config, config_yaml: str, source: Source | None = None) -> dict[str, object]:
    """Start or resume the statistics of a config until they are complete.

    Args:
        config_yaml: config as the user gave it, which the file records.
        source: data set object from Python, or None to open that of the config.

    Returns:
        rows, failures, file, layers with their summary, frechet {layer: distance} if another file
        is given, and measurements of the run.

    Raises:
        FeatxError: the config does not fit the statistics in the folder, or the run failed.
        Interrupted: a signal ended the run; complete parts are committed.
    """
    return run_output(StatsOutput(config, source), config_yaml, FEATURES)


class StatsPart:
    """Sums of the rows of a part, on the device."""

    def __init__(self, part: Part, output: StatsOutput) -> None:
        self.part = part
        self.failures: list[Failure] = []
        self.checksums = np.full(len(part), UNKNOWN_IMAGE, dtype=np.uint64)
        self._output = output
        self._moments = {layer.spec.name: PartMoments(part, layer) for layer in output.layers}
        self.moments: dict[str, Moments] = {}  # of all rows, after the last batch

    def add(self, batch: Batch, rows: Rows) -> None:
        """Add the next batch."""
        values, device = rows.features, self._output.context.engine.device
        # The values may come from another CUDA stream: their memory must not be reused before the
        # sums of this stream are complete.
        record_use(values)
        started_at = time.perf_counter()
        failed = [failure.row for failure in rows.failures]
        for name, moments in self._moments.items():
            moments.add(batch.start, values[name], failed, batch.count)
        synchronise(device)
        self._output.seconds["statistics"] += time.perf_counter() - started_at
        self.failures += rows.failures
        if rows.checksums is not None:
            first = batch.start - self.part.start
            self.checksums[first : first + batch.count] = rows.checksums
        if batch.start + batch.count == self.part.stop:
            self.moments = {name: moments.finish() for name, moments in self._moments.items()}
            self._moments = {}  # which hold memory of the device
            synchronise(device)  # another thread, with its own stream, commits


class StatsOutput(Output[StatsPart, StatsSession]):
    """Statistics in the folder `out`, which may also contain a store. `layers`, those whose
    statistics are computed, are known after `part_limits`.
    """

    dtype = "float32"  # before any cast to the dtype of a store

    def __init__(self, config: Config, source: Source | None = None) -> None:
        super().__init__(config, source)
        self.root = Path(config.out).expanduser()
        self.marker = self.root / layout.STATS_OVERWRITE_MARKER
        self.seconds = {"statistics": 0.0}
        self.layers: list[StatsLayer] = []
        self.settings = {
            "dtype": self.dtype,
            "stats.observation": config.stats.observation,
            "stats.covariance": config.stats.covariance,
        }
        if config.takes_gradients:
            self.settings["target"] = config.target
        self._reference: Statistics | None = None

    def list_images(self) -> tuple[Source, Listing]:
        """Return the source and its listing in the order of the data set.

        A store in the same folder may have another order.
        """
        source, listing = list_images(self.config, source=self.source)
        if listing.content_tags is not None:
            # Statistics store no tag per row, so the digest covers all.
            self.settings["data.content_tags"] = content_tags_digest(listing)
        return source, listing

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Return all layers, because one file contains them together."""
        return chosen

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Return the resume state: the `auto` values chosen before the first part, or None."""
        stored = None if self.config.overwrite else stored_settings(self.root)
        if stored is None:
            return None
        settings, resolved = stored
        resolved |= {key: settings[key] for key in _RESUMED}
        resolved["fold_batchnorm"] = settings.get("fold_batchnorm", False)
        resolved["jpeg"] = settings.get("jpeg", PILLOW)
        resolved["heif"] = settings.get("version.pillow_heif")
        return ResumeState(resolved, settings, settings["part_rows"], "the statistics were")

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Return the maximum number of rows and of seconds per part.

        As for a store, but longer if writing and merging the matrices would take a large share of
        the time.
        """
        places = token_geometries(specs, engine.backbone, engine.traced)
        options, size = self.config.stats, engine.backbone.preprocess.crop
        self.layers = [StatsLayer.of(spec, options, size, places.get(spec.name)) for spec in specs]
        by_position = any(layer.axis is not None for layer in self.layers)
        if options.observation == "position" and not by_position:
            raise ConfigError(
                "stats.observation=position has no effect: the rows of these layers are vectors. "
                "Leave it out, or take layers with maps or tokens, or another reduction."
            )
        full = self.config.stats.covariance == "full"
        numbers = sum(layer.dim ** (2 if full else 1) for layer in self.layers)
        commit_s = 8 * numbers / COMMIT_BYTES_PER_S
        seconds = seconds_of_part(work_s, self.config.executor.task_seconds)
        return float("inf"), max(seconds, commit_s / COMMIT_SHARE)

    def begin(self) -> None:
        """Open the statistics of stats.reference."""
        check_out(self.root, self.config)
        if self.config.stats.reference is not None:
            self._reference = Statistics(self.config.stats.reference)

    @contextlib.contextmanager
    def open(self, context: RunContext) -> Iterator[None]:
        """Lock the folder, delete leftovers, and find complete parts."""
        self.context = context
        if self._reference is not None:
            _check_reference(self._reference, self, context)
        disk = AtomicFolder(self.root)
        disk.make_folder(self.root)
        with exclusive_lock(self.root / layout.LOCK) as lock:
            # With the lock held and no other writer alive, the remaining heartbeat files are of
            # dead processes.
            refuse_other_writers(self.root)
            report_lost_work(self.root)
            clear_heartbeats(disk)
            clear_files(disk, self.config.overwrite)
            self.session = self._open_session(lock)
            self.session.survey()
            self.session.write_failures()
            yield

    def _open_session(self, lock: int = -1) -> StatsSession:
        context = self.context
        grid = Grid(len(context.listing), context.part_rows)
        of_run = context.as_run().resolved
        resolved = {key: of_run[key] for key in RESOLVED if key in of_run}
        disk = AtomicFolder(self.root)
        return StatsSession(disk, context.header, grid, self.layers, resolved, lock)

    def describe(self) -> list[tuple[str, str]]:
        lines = []
        for layer in self.layers:
            numbers = layer.dim**2 if layer.kind == "full" else layer.dim
            each = "" if layer.positions is None else f", {layer.positions} rows per image"
            each = ", mean over positions" if layer.averaged else each
            lines.append(
                f"{layer.spec.name}  {layer.captured}  {layer.dim} features{each}, {layer.kind}, "
                f"{size_text(8 * numbers)}"
            )
        done = self.num_committed
        state = f"{done} of {self.num_rows} rows are there already" if done else "new"
        output = f"{shown_path(self.write_session.path)}, {state}"
        return describe_run(self.context, output, "\n".join(lines))

    def update_rows(self) -> None:
        """Compare the images; with refresh=true, discard the parts with changed ones."""
        _check_images(self.context, self.write_session)
        self.write_session.write_failures()

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        """Compute the values of a batch, which stay on the device."""
        context = self.context
        labels, keys = context.labels_and_keys(batch)
        rows = engine.rows(batch.images, labels, on_device=True, keys=keys)
        failures = failures_of(context, engine, batch, rows.finite)
        return Rows(rows.features, failures, checksums=batch.checksums)

    def begin_part(self, part: Part) -> StatsPart:
        return StatsPart(part, self)

    def commit(self, rows: StatsPart) -> Sequence[Failure]:
        session = self._open_session() if self.session is None else self.session
        failures = session.publish(rows.part, rows.failures, rows.moments, rows.checksums)
        if self.session is not None:
            session.record_commit(rows.part, failures)
        return failures

    def finish(self, outcome: RunOutcome) -> dict[str, object]:
        """Merge the parts, which counts as writing; return the summary of the finished file."""
        started_at = time.perf_counter()
        session, seconds = self.write_session, outcome.metrics.seconds
        session.finish()
        session.write_failures()
        states_file = session.path.with_name(STATS_IMAGES)
        add_image_checksums(session.disk, states_file, session.checksums)
        if (write_s := seconds["write"]) is not None:
            seconds["write"] = write_s + time.perf_counter() - started_at
        del seconds["copy"]  # only one flag per row is copied
        return {
            **summary_of(Statistics(session.path), self._reference, session.failures),
            **outcome.metrics.as_dict(),
            "peak_memory_mib": max(peak_memory_mib(), outcome.peak_memory_mib),
        }

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing: `finish` raises otherwise."""
        return True

    def for_workers(self) -> Self:
        """Copy without what belongs to the driver; the listing is written for workers."""
        if self.missing():
            folder = self.write_session.folder
            write_listing(self.write_session.disk, folder / layout.LISTING, self.context.listing)
        other = super().for_workers()
        other._reference = None
        return other

    def check_unchanged(self, fingerprint: Mapping[str, object]) -> None:
        stored = stored_settings(self.root)
        if stored is not None and differences(stored[0], fingerprint):
            raise RunError(
                f"the statistics in {self.root} have other settings than this run: another run has "
                "overwritten them. Run the same command again."
            )

    def stored_listing(self, num_rows: int, identity: str) -> Listing | None:
        """Read the listing that the driver has written; it is deleted with the parts."""
        return read_listing(self.root / PARTS_FOLDER, num_rows, identity)

    def uncommitted(self, parts: Sequence[Part]) -> list[Part]:
        spans = spans_in(self.root / PARTS_FOLDER)
        return [
            part
            for part in parts
            if not any(start <= part.start and part.stop <= stop for start, stop in spans)
        ]


def _check_images(context: RunContext, session: StatsSession) -> None:
    """Compare the images with those of the existing statistics.

    With refresh=true, files that contain changed images are deleted and computed again.
    """
    keys, config = context.listing.keys, context.config
    states_file = session.path.with_name(STATS_IMAGES)
    recorded = ImagesOfRun(0, session.checksums, session.is_done)
    changes = compare_images(
        context.source, keys, [recorded], states_file, read_all=config.refresh is True
    )
    if len(changes.gone):
        gone = image_keys(context.source, keys[changes.gone])
        log_message(f"{gone_images_text(gone)}. Statistics keep them.", level="warning")
    rows = changes.rows.tolist()
    images = image_keys(context.source, keys[rows])
    if config.refresh and (config.refresh is True or rows):
        log_message(f"{changed_text(len(images))} since the statistics were taken")
        session.discard(rows)
    failed = {failure.row for failure in session.failures}
    if not config.refresh and (changed := [row for row in rows if row not in failed]):
        images = image_keys(context.source, keys[changed])
        raise StoreMismatchError(changed_images_text(session.path, images, _REFRESH_TEXT))
    if not config.refresh and rows:
        log_message(changed_failures_text(images))
    if changes.states is not None:
        write_image_states(session.disk, states_file, changes.states, changes.checksums)


def _check_reference(reference: Statistics, output: StatsOutput, context: RunContext) -> None:
    """Check, before hours of work, that a distance to the other statistics can be computed."""
    common = [layer for layer in output.layers if layer.spec.name in reference]
    if not common:
        names = ", ".join(layer.spec.name for layer in output.layers)
        raise ConfigError(
            f"stats.reference={reference.path} has statistics of {', '.join(reference)}, "
            f"of none of {names}."
        )
    for layer in common:
        about = reference.about(layer.spec.name)
        header = context.header
        run_values = {
            "target": output.settings.get("target"),
            **model_values(header.fingerprint),
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
