"""Features as the output of a run: a store, which is started, resumed, filled and packed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from featx.base import log_message, shown_path, size_text
from featx.config import Config
from featx.errors import ConfigError, RunError, StorageError
from featx.pipeline.changed_images import ImageChanges, row_checksums
from featx.pipeline.finished_run import FinishedRun, present_rows_text
from featx.pipeline.loop import RunObserver
from featx.pipeline.output import Output, seconds_of_part
from featx.pipeline.provenance import layer_line
from featx.pipeline.row_failures import Rows, compute_rows
from featx.pipeline.row_updates import (
    check_images,
    check_images_before_adding,
    compute_lost_rows,
    has_mixed_rows,
    retry_failed_rows,
)
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_listing import check_out, list_images
from featx.pipeline.run_metrics import RunOutcome, peak_memory_mib
from featx.pipeline.run_summary import describe_run
from featx.storage import AtomicFolder, is_url, open_folder, s3_client
from featx.store import (
    Manifest,
    PartBuilder,
    StoreSession,
    add_image_checksums,
    begin_part,
    commit_part,
    layout,
    leftover_bytes,
    load_manifest,
    merge_manifest,
    missing_parts,
    pack_parts,
    part_names,
    read_listing,
    read_manifest,
    reason_to_keep_parts,
    refuse_difference,
)
from featx.types import Batch, Failure, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import CapturePoint, ChosenLayers, StoredReduce

Observe = Callable[[RunContext, StoreSession], RunObserver]
"""Creates the observer of a run from its context and its open write session."""


@dataclass(eq=False)
class FeaturePart:
    part: Part
    builder: PartBuilder
    underflow_rows: Counter[str] = field(default_factory=Counter)

    def add(self, batch: Batch, rows: Rows) -> None:
        self.builder.add(batch.start, rows.features, rows.failures, rows.checksums, rows.damaged)
        self.underflow_rows += rows.underflow_rows


class FeatureOutput(Output[FeaturePart, StoreSession]):
    """The store in `out`; see `run_extraction`.

    With `known_rows_only` changed images lead to a warning instead of an error.
    """

    # In workers:
    _sent_manifest: bytes  # featx.json when the run was started
    _manifest: Manifest
    _disk: AtomicFolder

    def __init__(
        self,
        config: Config,
        config_yaml: str = "",
        known_rows_only: bool = False,
        observe: Observe | None = None,
        source: Source | None = None,
    ) -> None:
        super().__init__(config, source)
        self.dtype = config.dtype
        self.settings = {"dtype": config.dtype, "codec": config.codec}
        self.marker = self.root / layout.OVERWRITE_MARKER
        self._config_yaml = config_yaml
        self._known_rows_only = known_rows_only
        self._num_recomputed = 0
        self._changes: ImageChanges | None = None
        self._observe = observe
        self._listed: tuple[Source, Listing] | None = None
        self._finished: FinishedRun | None = None
        # An observer has work to do at the end, and a data set that is a Python object has no
        # identity beyond its listing.
        self._is_recognised = observe is None and source is None and not known_rows_only

    @functools.cached_property
    def _stored(self) -> Manifest | None:
        """Manifest of the store that is resumed."""
        check_out(self.root, self.config)
        return None if self.config.overwrite else load_manifest(self.root)[0]

    def list_images(self) -> tuple[Source, Listing]:
        """Open the data set once; rows of the store come first, new rows follow."""
        if self._listed is None:
            self._listed = list_images(
                self.config, self._stored, self._known_rows_only, self.source
            )
        return self._listed

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Select the layers that the store lacks or has not finished; all, if none is left.

        A request for [layer3, layer4] computes only layer3 if the store already holds layer4, so
        the model runs no deeper than necessary.
        """
        stored = self._stored
        if stored is None or len(listing) > stored.num_rows:
            return chosen
        unfinished = {name for run, _ in missing_parts(self.root, stored) for name in run.names}
        finished = set(stored.layers) - unfinished
        fresh = [pair for pair in chosen if pair[0].name not in finished]
        if not fresh:
            return chosen
        for point, reduce in chosen:
            if point.name in finished:
                _refuse_another_layer(self.root, stored, point, reduce, self.config)
        return fresh

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Choices of the first run of the store, and rows per part of the run with these layers."""
        if self._stored is None:
            return None
        holders = [run for run in self._stored.runs if run.names & names]
        part_rows = holders[0].grid.part_rows if holders else None
        first = self._stored.runs[0]
        settings = first.header.fingerprint
        return ResumeState(first.resolved, settings, part_rows, has_new_layers=not holders)

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Limits by `layout.PART_BYTES` and by `seconds_of_part`.

        Raises ConfigError if a row is larger than a chunk can be.
        """
        for spec in specs:
            if spec.row_bytes > layout.MAX_CHUNK_BYTES:
                raise ConfigError(
                    f"a row of {spec.name} has the shape {list(spec.shape)} and takes "
                    f"{size_text(spec.row_bytes)}; HDF5 holds rows below 4 GiB. Choose a "
                    "reduction, such as reduce=avg or reduce=grid."
                )
        row_bytes = sum(spec.row_bytes for spec in specs)
        seconds = seconds_of_part(work_s, self.config.executor.task_seconds)
        return layout.PART_BYTES / max(1, row_bytes), seconds

    def begin(self) -> dict[str, Any] | None:
        """Recognise a store that the same command has completed.

        Refuses grow=true in an object store, and images in a folder of the data set.
        """
        if self.config.grow and is_url(self.root):
            raise ConfigError(
                f"grow=true needs a store on a disk, and {self.root} lies in an object store: "
                "without a lock two drivers could add different rows. Copy it to a disk, let it "
                "grow there, and copy it back."
            )
        # An observer writes images into the folder of the store.
        if self._observe is not None and self.config.data.root and not is_url(self.root):
            root = Path(self.config.data.root).expanduser()
            if root.is_dir() and root.resolve() == self.root.resolve():
                raise ConfigError(
                    f"out={self.config.out} is data.root as well, and heat maps and sprites would "
                    "become images of the data set. Choose another folder; below data.root is fine."
                )
        check_out(self.root, self.config)
        if not self._is_recognised:
            return None
        self._finished = FinishedRun(self.config)
        return self._finished.summary(self.list_images)

    def planned(self, context: RunContext) -> tuple[int, int]:
        """Number of rows that a run would compute, and bytes of all features of the store then.

        Raises StoreMismatchError if the run does not fit the store.
        """
        requested, stored = context.as_run(), self._stored
        if stored is None:
            return requested.grid.num_rows, requested.num_bytes
        unfinished = [run for run, _ in missing_parts(self.root, stored)]
        merged = merge_manifest(self.root, stored, requested, unfinished, self.config.grow)
        missing = missing_parts(self.root, merged)
        parts = [part for run, gaps in missing if run.names == requested.names for part in gaps]
        return sum(map(len, parts)), sum(run.num_bytes for run in merged.runs)

    @contextlib.contextmanager
    def open(self, context: RunContext) -> Iterator[None]:
        """Hold the store; write the config into it."""
        self._check_room(context)
        self.context = context
        config, requested = self.config, context.as_run()
        recompute = bool(config.refresh) or config.retry_failed
        self.session = StoreSession(self.root, requested, context.listing, config.grow, recompute)

        def check_before_adding() -> None:
            self._changes = check_images_before_adding(context, self.write_session)

        with self.session.hold(self.config.overwrite, check_before_adding):
            self.session.write_config(self._config_yaml)
            yield

    def _check_room(self, context: RunContext) -> None:
        """Refuse a new store for which the disk has no room, and parts that are no object."""
        if self.config.codec != "none":
            return
        if is_url(self.root):
            part_bytes = context.row_bytes * min(context.part_rows, len(context.listing))
            if part_bytes > s3_client.MAX_PUT_BYTES:
                raise ConfigError(
                    f"a part of {context.part_rows} rows has {size_text(part_bytes)}; an object "
                    f"store takes at most {size_text(s3_client.MAX_PUT_BYTES)} in one request. "
                    "Give a smaller part_rows, or a reduction, such as reduce=avg."
                )
            return
        if self.config.overwrite or self._stored is not None:
            return
        needed = context.row_bytes * len(context.listing)
        free = AtomicFolder(self.root).free_bytes() + leftover_bytes(self.root)
        if needed > free:
            raise StorageError(
                f"the features need {size_text(needed)}, and {size_text(free)} are free at "
                f"{self.root}. Nothing was written. Free some space and give the same command "
                "again, or choose another out=DIR or a reduction, such as reduce=avg."
            )

    def describe(self) -> list[tuple[str, str]]:
        done = self.num_committed
        state = "new"
        if done:
            state = present_rows_text(self.config, self.context.source, self.context.listing, done)
        return describe_run(self.context, f"{shown_path(self.root)}, {state}")

    def observer(self) -> RunObserver:
        if self._observe is None:
            return RunObserver()
        return self._observe(self.context, self.write_session)

    def update_rows(self) -> None:
        """Compute lost rows, rows of changed images, and rows whose images failed."""
        context, session = self.context, self.write_session
        before, self._changes = self._changes, None  # large arrays
        self._num_recomputed += compute_lost_rows(context, session)
        self._num_recomputed += check_images(context, session, self._known_rows_only, before)
        if self.config.retry_failed:
            self._num_recomputed += retry_failed_rows(context, session)

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        return compute_rows(self.context, engine, batch)

    def begin_part(self, part: Part) -> FeaturePart:
        specs, listing = self.context.specs, self.context.listing
        if self.session is not None:
            return FeaturePart(part, self.session.begin_part(part, specs))
        return FeaturePart(part, begin_part(self._disk, part, specs, self._manifest, listing))

    def commit(self, rows: FeaturePart) -> Sequence[Failure]:
        self.underflow_rows += rows.underflow_rows
        if self.session is not None:
            return self.session.commit(rows.builder)
        return commit_part(self._disk, rows.builder, self._manifest, self.context.listing)

    def finish(self, outcome: RunOutcome) -> dict[str, object]:
        """Pack the parts if the config asks for it; write and return the summary."""
        started_at = time.perf_counter()
        session = self.write_session
        _pack(self.context, session)
        outcome.metrics.seconds["pack"] = time.perf_counter() - started_at
        if unfinished := session.unfinished_runs():
            names = ",".join(sorted(unfinished[0].names))
            log_message(
                f"{shown_path(self.root)} is not complete: it lacks rows of 'layers=[{names}]', "
                "which the command with these layers computes."
            )
        session.write_failures()
        checksums = row_checksums(self.root, session.manifest)
        add_image_checksums(session.disk, self.root / layout.IMAGES, checksums)
        request = None
        if session.is_complete and self._finished is not None:
            request = self._finished.digest(session.manifest, session.listing)
        labels = np.array(session.listing.labels)
        labels[[failure.row for failure in session.failures]] = -1
        summary = {
            "rows": len(session.listing),
            "failures": len(session.failures),
            "classes": int(np.count_nonzero(np.bincount(labels[labels >= 0]))),  # with an ok row
            **outcome.metrics.as_dict(),
            "rows_recomputed": self._num_recomputed,
            "underflow_rows": dict(+outcome.underflow_rows),
            "layers": [spec.name for spec in session.manifest.layers.values()],
            "bytes": session.stored_bytes(),
            "peak_memory_mib": max(peak_memory_mib(), outcome.peak_memory_mib),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
            "request": request,
        }
        session.write_summary(summary)
        return summary

    @property
    def is_whole(self) -> bool:
        """Whether the store misses no part of any run."""
        return self.write_session.is_complete

    def for_workers(self) -> Self:
        """Copy with the manifest of the store, and without what belongs to the driver."""
        other = super().for_workers()
        other._sent_manifest = self.write_session.manifest.to_json()
        other._listed = other._observe = other._finished = None
        other.__dict__.pop("_stored", None)
        return other

    def join(self, context: RunContext) -> None:
        """Begin to compute parts in a worker, with its own run context."""
        super().join(context)
        self._disk = open_folder(self.root)
        self._manifest = Manifest.from_json(self._sent_manifest, self.root)

    def check_unchanged(self, fingerprint: Mapping[str, object]) -> None:
        """Raise RunError if the manifest of the store has changed since the run was started."""
        if read_manifest(self.root) != Manifest.from_json(self._sent_manifest, self.root):
            raise RunError(
                f"the manifest of {self.root} has changed since this run was started: another run "
                "has overwritten or extended the store. Run the same command again."
            )

    def stored_listing(self, num_rows: int, identity: str) -> Listing | None:
        return read_listing(self.root, num_rows, identity)

    def uncommitted(self, parts: Sequence[Part]) -> list[Part]:
        there = part_names(self.root)
        return [part for part in parts if layout.part_name(part.index) not in there]


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
        {f"layer {point.name}": {**asdict(before), "fingerprint_entry": line}},
        {f"layer {point.name}": {**asdict(now), "fingerprint_entry": layer_line(now, config)}},
    )


def _pack(context: RunContext, session: StoreSession) -> None:
    """Pack the parts into one features.h5, if the config asks for it and there is room."""
    if session.is_packed or not session.is_complete:
        return
    if has_mixed_rows(context, session) or context.config.pack is False:
        return
    if is_url(session.root):
        log_message(
            "the parts are kept: an object store has no disk to pack on. featx.open reads parts."
        )
        return
    stored_bytes = session.stored_bytes()
    reason = reason_to_keep_parts(stored_bytes, session.disk.free_bytes())
    if context.config.pack == "auto" and reason is not None:
        log_message(f"the parts are kept: {reason}. featx.open reads parts as well.")
        return
    pack_parts(session.root)
    session.finish_packing()
