"""Extraction: opens an output, computes what is missing, commits it, and finishes the output."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from featx.base import announce, log_message, shown_path
from featx.config import Config
from featx.errors import StoreError, StoreMismatchError, counted
from featx.pipeline.executors import EXECUTORS, run_distributed
from featx.pipeline.feature_output import FeatureOutput, Observe
from featx.pipeline.finished_run import command_digest
from featx.pipeline.loop import run_parts
from featx.pipeline.output import AnyOutput
from featx.pipeline.row_failures import exit_code, failures_text
from featx.pipeline.run_context import EngineSpec, build_run_context
from featx.pipeline.run_metrics import RunOutcome, metrics_of, peak_memory_mib
from featx.storage import check_writable, is_url, parse_path
from featx.store import (
    DamagedManifestError,
    FeatureStore,
    Heartbeat,
    Manifest,
    layout,
    load_manifest,
    merge_manifest,
    missing_parts,
    read_result,
)
from featx.types import Json, Source, Status, with_features


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
        config_yaml: composed config as YAML, without secrets; the store keeps this text.
        known_rows_only: ignore images that the store does not contain yet.
        source: data set given as a Python object; None opens the data set of the config.

    Returns:
        content of summary.json.

    Raises:
        FeatxError: the config or the store does not fit, or the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    if not known_rows_only and _has_only_failures(config):
        log_message(f"every row of {shown_path(parse_path(config.out))} failed: starting again.")
        config = replace(config, overwrite=True, refresh=False)
    output = FeatureOutput(config, config_yaml, known_rows_only, observe, source)
    return run_output(output, config_yaml, engine_spec)


def _has_only_failures(config: Config) -> bool:
    """Return whether the store holds no features, and the command does not say what to mend.

    A row that failed in some layers has features of those of other runs, so only stores whose runs
    have the same layers are looked at.
    """
    if config.overwrite or config.retry_failed or config.refresh is True or config.grow:
        return False
    root = parse_path(config.out)
    try:
        summary = read_result(root / layout.SUMMARY)
        if not 0 < summary.get("rows", 0) == summary.get("failures"):
            return False
        manifest, _ = load_manifest(root)
        if manifest is None or len({run.names for run in manifest.runs}) > 1:
            return False
        # A run that was killed before it wrote its summary may have committed rows since.
        status = FeatureStore(root).status
    except (OSError, StoreError):
        return False
    return not bool((with_features(status) | (status == Status.ABSENT)).any())


def kept_text(out: str) -> str:
    """Describe how many rows of the store of an interrupted run are kept."""
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
    Raises FeatxError if the images, the model or the weights are not those of the store, or not
    there.
    """
    output = FeatureOutput(config, known_rows_only=True)
    with build_run_context(config, config_yaml, engine_spec, output) as context:
        merge_manifest(parse_path(config.out), manifest, context.as_run(), (), grow=False)


def run_output(output: AnyOutput, config_yaml: str, engine_spec: EngineSpec) -> dict[str, object]:
    """Start or resume a run and complete its output; reports progress on stderr.

    With overwrite=true, a marker file with a digest of the command is written before the first part
    and deleted when everything is complete. A killed process leaves it behind, and the same command
    then resumes instead of deleting what it has computed. A finished output has no marker, and is
    deleted.

    Returns:
        summary of the run.

    Raises:
        FeatxError: the config or the folder does not fit, or the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    config = output.config
    # A data set that is a Python object is not in the digest, so nothing is resumed then.
    is_marked = config.overwrite and output.source is None
    mark = command_digest(config).encode() if is_marked else None
    with metrics_of(config.log.metrics, config.out) as summary:
        is_started = False  # by this command, which has not finished
        if mark is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                is_started = output.marker.read_bytes() == mark
        if is_started:
            log_message(
                f"{output.root} was started by this command with overwrite=true and is not "
                "finished: it is resumed. To start from the first row again, delete the folder."
            )
            resumed = output.with_config(replace(config, overwrite=False))
            try:
                summary |= _run(resumed, config_yaml, engine_spec, mark)
                return summary
            # Images or libraries have changed since, so a resume is impossible. Other errors, such
            # as a disk that cannot be read now, are passed on: computed parts may still be there.
            except (StoreMismatchError, DamagedManifestError) as error:
                log_message(
                    f"{error}\nIt cannot be resumed; overwrite=true starts it again from the "
                    "first row."
                )
        summary |= _run(output, config_yaml, engine_spec, mark)
        return summary


def _run(
    output: AnyOutput, config_yaml: str, engine_spec: EngineSpec, mark: bytes | None
) -> dict[str, object]:
    """Run once: open the output, compute and commit what is missing, and finish it."""
    config = output.config
    if config.is_distributed:
        EXECUTORS.get(config.executor.name).check(config.executor, config)
    if (summary := output.begin()) is not None:
        return summary
    if not is_url(output.root):
        check_writable(output.root)  # before images are listed and the model is built
    with (
        build_run_context(config, config_yaml, engine_spec, output) as context,
        output.open(context),
    ):
        session = output.write_session
        if config.overwrite and mark is not None:
            session.disk.replace(output.marker, mark)
        announce(output.describe())
        observer = output.observer()
        output.update_rows()
        if config.is_distributed:
            outcome = run_distributed(context, session, output.for_workers(), config_yaml)
        else:
            disk = session.disk
            with Heartbeat(disk, str(context.engine.device)) as heartbeat:
                metrics = run_parts(context, output, disk, observer, heartbeat)
                outcome = RunOutcome(metrics, output.underflow_rows, peak_memory_mib())
        summary = output.finish(outcome)
        failures = session.failures
        observer.run_finished()
        if output.is_whole:
            session.disk.remove(output.marker)
    if failures:
        log_message(failures_text(failures))
    for layer, count in (+outcome.underflow_rows).items():
        log_message(
            f"{counted(count, f'row of {layer} has', f'rows of {layer} have')} no value "
            "above 6.1e-5; float16 holds so little with few bits or as zero. dtype=float32 keeps "
            "it.",
            level="warning",
        )
    return summary


def store_exit_code(config: Config, summary: Json) -> int:
    """Exit code of an extraction: 0, or EXIT_TOO_MANY_FAILURES with a message on stderr."""
    failures = parse_path(config.out) / layout.FAILURES_CSV
    return exit_code(
        config,
        summary["rows"],
        summary["failures"],
        f"Their rows are NaN with a status; see {failures}.",
    )
