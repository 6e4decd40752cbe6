"""Extraction: computes the missing rows of a store, commits them, and packs the store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from featx.base import log_message, shown_path, size_text
from featx.config import Config
from featx.errors import (
    ConfigError,
    StorageError,
    StoreError,
    StoreMismatchError,
    counted,
)
from featx.pipeline.changed_images import changed_images_text, rows_of_two_images
from featx.pipeline.engine_spec import EngineSpec
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.feature_sink import FeatureSink, StorePartTask
from featx.pipeline.finished_run import (
    FileStates,
    finished_summary,
    request_digest,
    weight_states,
)
from featx.pipeline.overwriting import OverwriteMark
from featx.pipeline.row_failures import exit_code
from featx.pipeline.row_updates import (
    check_images,
    compute_lost_rows,
    refresh_text,
    retry_failed_rows,
)
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_driver import RunOutput, drive_run
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.run_observer import RunObserver
from featx.pipeline.run_summary import RunDescription, describe_run
from featx.pipeline.run_target import RunTarget, StoreTarget
from featx.storage import AtomicFolder, is_url, parse_path
from featx.store import (
    Heartbeat,
    Manifest,
    PartBuilder,
    StoreSession,
    layout,
    leftover_bytes,
    load_manifest,
    merge_manifest,
    missing_parts,
    pack_parts,
    read_result,
    reason_to_keep_parts,
)
from featx.types import Failure, Source

Observe = Callable[[RunContext, StoreSession], RunObserver]
"""Creates the observer of a run from its context and its open write session."""


def run_extraction(
    config: Config,
    config_yaml: str,
    engine_spec: EngineSpec,
    known_rows_only: bool = False,
    observe: Observe | None = None,
    source: Source | None = None,
) -> dict[str, Any]:
    """Start or resume the store of a config and complete it; reports progress on stderr.

    Args:
        config: checked config.
        config_yaml: composed config as YAML, without secrets; the store keeps this text.
        engine_spec: how to build the engine that computes the rows.
        known_rows_only: ignore images that the store does not contain yet.
        observe: creates the observer of the run.
        source: data set given as a Python object; None opens the data set of the config.

    Returns:
        content of summary.json.

    Raises:
        FeatxError: the config or the store does not fit, or the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    if _has_only_failures(config):
        log_message(f"every row of {shown_path(parse_path(config.out))} failed: it is begun anew.")
        config = replace(config, overwrite=True)
    marker = OverwriteMark(parse_path(config.out) / layout.OVERWRITE_MARKER, config, source is None)

    def output(config: Config) -> StoreOutput:
        return StoreOutput(config, config_yaml, known_rows_only, observe, source)

    return drive_run(config, config_yaml, engine_spec, marker, output)


def _has_only_failures(config: Config) -> bool:
    """Return whether the store holds no features, and the command does not say what to mend."""
    if config.overwrite or config.retry_failed or config.refresh or config.grow:
        return False
    try:
        summary = read_result(parse_path(config.out) / layout.SUMMARY)
    except (OSError, StoreError):
        return False
    return bool(0 < summary.get("rows", 0) == summary.get("failures"))


def kept_text(out: str) -> str:
    """Say how many rows of the store of an interrupted run are kept.

    Args:
        out: path or URL of the store.
    """
    path = parse_path(out)
    if is_url(path):
        return "stopped; the complete parts are kept, and the same command resumes."
    try:
        manifest = load_manifest(path)[0]
        if manifest is None:
            return "stopped; nothing was written yet."
        missing = [sum(map(len, parts)) for _, parts in missing_parts(path, manifest)]
    except (OSError, StoreError):
        return "stopped; the same command resumes after the last complete part."
    kept = manifest.num_rows - max(missing, default=0)
    return (
        f"stopped; {kept} of {counted(manifest.num_rows, 'row')} are kept in {shown_path(path)}, "
        "and the same command resumes."
    )


def check_extraction(
    config: Config, config_yaml: str, engine_spec: EngineSpec, manifest: Manifest
) -> None:
    """Check that rows which a store has lost can be extracted; nothing is written.

    Images are listed, the model is built, and its settings are compared with those of the store.

    Args:
        config: checked config, as for `run_extraction` with `known_rows_only`.
        config_yaml: composed config as YAML, without secrets.
        engine_spec: how to build the engine that computes the rows.
        manifest: manifest of the store.

    Raises:
        FeatxError: the images, the model or the weights are not those of the store, or not there.
    """
    target = StoreTarget(config, known_rows_only=True)
    with build_run_context(config, config_yaml, engine_spec, target) as context:
        merge_manifest(parse_path(config.out), manifest, context.as_run(), (), grow=False)


class StoreOutput(RunOutput[StoreSession]):
    """The store in `out`.

    Args:
        config: checked config.
        config_yaml: composed config as YAML, without secrets.
        known_rows_only: ignore images that the store does not contain yet, and warn about changed
            images instead of raising.
        observe: creates the observer of the run.
        source: data set given as a Python object; None opens the data set of the config.
    """

    _target: StoreTarget

    def __init__(
        self,
        config: Config,
        config_yaml: str,
        known_rows_only: bool = False,
        observe: Observe | None = None,
        source: Source | None = None,
    ) -> None:
        super().__init__(config)
        self._config_yaml = config_yaml
        self._known_rows_only = known_rows_only
        self._observe = observe
        self._source = source
        self._out = parse_path(config.out)
        self._weights: FileStates | None = None
        # An observer has work to do at the end, and a data set that is a Python object has no
        # identity beyond its listing.
        self._is_recognised = observe is None and source is None and not known_rows_only

    def check_context(self, context: RunContext) -> None:
        """Refuse a new store for which the disk has no room."""
        needed = context.row_bytes * len(context.listing)
        is_new = not self.config.overwrite and load_manifest(self._out)[0] is None
        if not is_new or self.config.codec != "none" or is_url(self._out):
            return
        free = AtomicFolder(self._out).free_bytes() + leftover_bytes(self._out)
        if needed > free:
            raise StorageError(
                f"the features need {size_text(needed)}, and {size_text(free)} are free at "
                f"{self._out}. Nothing was written. Free some space, choose another out=DIR, or a "
                "reduction, such as reduce=avg. Afterwards:"
            )

    def check(self) -> None:
        """Refuse grow=true in an object store, and images in a folder of the data set."""
        if self.config.grow and is_url(self._out):
            raise ConfigError(
                f"grow=true needs a store on a disk, and {self._out} lies in an object store: "
                "without a lock two drivers could add different rows. Copy it to a disk, let it "
                "grow there, and copy it back."
            )
        # An observer writes images into the folder of the store.
        if self._observe is not None and self.config.data.root and not is_url(self._out):
            root = Path(self.config.data.root).expanduser()
            if root.is_dir() and root.resolve() == self._out.resolve():
                raise ConfigError(
                    f"out={self.config.out} is data.root as well, and heat maps and sprites would "
                    "become images of the data set. Choose another folder; below data.root is fine."
                )

    def open_target(self) -> RunTarget:
        """Read the manifest of the store."""
        self._target = StoreTarget(self.config, self._known_rows_only, self._source)
        return self._target

    def finished_summary(self) -> dict[str, Any] | None:
        """Recognise a store that the same command has completed."""
        if not self._is_recognised:
            return None
        self._weights = weight_states(self.config)
        return finished_summary(self.config, self._target, self._weights)

    @contextlib.contextmanager
    def open_session(self, context: RunContext) -> Iterator[StoreSession]:
        """Hold the store; write the config into it."""
        session = StoreSession(self._out, context.as_run(), context.listing, self.config.grow)
        with session.hold(self.config.overwrite):
            session.write_config(self._config_yaml)
            yield session

    def describe(self, context: RunContext, session: StoreSession) -> RunDescription:
        """Describe the run before it starts."""
        done, total = session.num_committed, session.num_rows
        state = f"{done} of {total} rows are there already" if done else "new"
        return describe_run(context, ("store", f"{shown_path(session.root)}, {state}"))

    def observer(self, context: RunContext, session: StoreSession) -> RunObserver:
        """Return the observer of the job."""
        return RunObserver() if self._observe is None else self._observe(context, session)

    def update_rows(self, context: RunContext, session: StoreSession) -> None:
        """Compute lost rows, rows of changed images, and rows whose images failed."""
        compute_lost_rows(context, session)
        check_images(context, session, only_warn=self._known_rows_only)
        if self.config.retry_failed:
            retry_failed_rows(context, session)

    def sink(
        self,
        context: RunContext,
        session: StoreSession,
        heartbeat: Heartbeat,
        observer: RunObserver,
    ) -> FeatureSink:
        """Return the sink that builds parts of the store."""

        def commit(builder: PartBuilder) -> Sequence[Failure]:
            failures = session.commit(builder)
            heartbeat.set_failures(session.num_failed)
            return failures

        return FeatureSink(context, session.begin_part, commit, heartbeat, observer)

    def part_task(self, context: RunContext, session: StoreSession) -> StorePartTask:
        """Return the part task of workers."""
        return part_task_of(self._target, context, session)

    def complete(self, session: StoreSession, outcome: RunOutcome) -> None:
        """Pack the parts, if the config asks for it."""
        started_at = time.perf_counter()
        _pack(self.config, session)
        outcome.metrics.seconds["pack"] = time.perf_counter() - started_at

    def summary(self, session: StoreSession, outcome: RunOutcome) -> dict[str, Any]:
        """Return and write the content of summary.json."""
        summary = {
            "rows": len(session.listing),
            "failures": len(session.failures),
            "classes": len(session.listing.classes),
            **outcome.metrics.as_dict(),
            "underflow_rows": dict(+outcome.underflow_rows),
            "layers": [spec.name for spec in session.manifest.layers.values()],
            "bytes": session.stored_bytes(),
            "peak_memory_mib": max(peak_memory_mib(), outcome.peak_memory_mib),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
            "request": self._request(session),
        }
        session.write_summary(summary)
        return summary

    def _request(self, session: StoreSession) -> str | None:
        """Digest by which `finished` recognises this command; None while parts are missing."""
        if not session.is_complete or not self._is_recognised:
            return None
        return request_digest(self.config, session.manifest, session.listing, self._weights)

    def is_whole(self, session: StoreSession) -> bool:
        """Return whether the store misses no part of any run."""
        return session.is_complete


def part_task_of(target: StoreTarget, context: RunContext, session: StoreSession) -> StorePartTask:
    """Part task for the workers of a distributed run."""
    return StorePartTask(
        dtype=target.dtype,
        settings=target.settings,
        datasets=frozenset(spec.name for spec in context.specs),
        manifest=session.manifest.to_json(),
    )


def store_exit_code(config: Config, summary: dict[str, Any]) -> int:
    """Exit code of an extraction: 0, or EXIT_TOO_MANY_FAILURES with a message on stderr.

    Args:
        config: config of the run.
        summary: content of summary.json.
    """
    failures = parse_path(config.out) / layout.FAILURES_CSV
    return exit_code(
        config,
        summary["rows"],
        summary["failures"],
        f"Their rows are NaN with a status; see {failures}.",
    )


def _pack(config: Config, session: StoreSession) -> None:
    """Pack the parts into one features.h5, if the config asks for it and there is room."""
    if session.is_packed or not session.is_complete:
        return
    mixed = _mixed_rows(session)
    _check_mixed_rows_failed(session, mixed)
    if mixed:
        _log_mixed_rows(session, len(mixed))
        return
    if config.pack is False:
        return
    if is_url(session.root):
        log_message(
            "the parts are kept: an object store has no disk to pack on. featx.open reads parts."
        )
        return
    stored_bytes = session.stored_bytes()
    reason = reason_to_keep_parts(stored_bytes, session.disk.free_bytes())
    if config.pack == "auto" and reason is not None:
        log_message(f"the parts are kept: {reason}. featx.open reads parts as well.")
        return
    pack_parts(session.root, session.lock, stored_bytes)
    session.finish_packing()


def _mixed_rows(session: StoreSession) -> list[int]:
    """Rows whose layers were computed from different images in different runs."""
    if len(session.manifest.runs) == 1:
        return []
    rows: list[int] = rows_of_two_images(session.root, session.manifest).tolist()
    return rows


def _check_mixed_rows_failed(session: StoreSession, mixed: list[int]) -> None:
    """Raise a StoreMismatchError if a row of `mixed` has not failed."""
    failed = {failure.row for failure in session.failures}
    if ok := [row for row in mixed if row not in failed]:
        what = refresh_text(_layers_options(session))
        raise StoreMismatchError(changed_images_text(session.root, session.listing.keys, ok, what))


def _log_mixed_rows(session: StoreSession, num_mixed: int) -> None:
    """Log why the parts are kept: failed images were mended for some of the layers only."""
    log_message(
        f"the parts are kept: "
        f"{counted(num_mixed, 'failed image has', 'failed images have')} been mended for some "
        "layers only. "
        f"retry_failed=true with each of {' and '.join(_layers_options(session))} computes the "
        "others."
    )


def _layers_options(session: StoreSession) -> list[str]:
    """The option `layers` of each run of the store, without repeats."""
    runs = session.manifest.runs
    return list(dict.fromkeys(f"layers=[{','.join(sorted(run.names))}]" for run in runs))
