"""Extraction: computes the missing rows of a store, commits them, and packs the store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base.console import announce, log_message
from featx.config.run_config import Config
from featx.errors import ConfigError, StoreMismatchError, counted
from featx.pipeline.engine_spec import EngineSpec
from featx.pipeline.executors import check_executor, in_process, run_distributed
from featx.pipeline.executors.worker_stats import RunOutcome
from featx.pipeline.feature_sink import FeatureSink, StorePartTask
from featx.pipeline.image_changes import (
    ImageChanges,
    changed_images_text,
    changed_text,
    gone_images_text,
    image_changes,
    mended_images_text,
    rows_of_two_images,
    unknown_images_text,
)
from featx.pipeline.loop import run_parts
from featx.pipeline.overwriting import OverwriteMark, resume_or_overwrite
from featx.pipeline.retry import RetrySink, readable_again
from featx.pipeline.row_failures import exit_code, failures_text
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.run_observer import RunObserver
from featx.pipeline.run_summary import describe_run
from featx.pipeline.run_target import StoreTarget
from featx.storage.s3_path import is_url, parse_path
from featx.store import layout
from featx.store.heartbeat import Heartbeat
from featx.store.pack import pack_in_child, packed_size_bound
from featx.store.session import StoreSession
from featx.types import Source, Status


def run_extraction(
    config: Config,
    config_yaml: str,
    engine_spec: EngineSpec,
    known_rows_only: bool = False,
    observe: Callable[[RunContext, StoreSession], RunObserver] | None = None,
    source: Source | None = None,
) -> dict[str, Any]:
    """Start or resume the store of a config and complete it; reports progress on stderr.

    Args:
        config: checked config.
        config_yaml: config as the user wrote it; the store keeps this text.
        engine_spec: how to build the engine that computes the rows.
        known_rows_only: ignore images that the store does not contain yet.
        observe: creates the observer of the run from its context and its open write session.
        source: data set given as a Python object; None opens the data set of the config.

    Returns:
        content of summary.json.

    Raises:
        FeatxError: the config or the store does not fit, or the run failed.
        Interrupted: SIGINT or SIGTERM arrived; complete parts are committed.
    """
    mark = OverwriteMark(parse_path(config.out) / layout.OVERWRITING, config, source is None)

    def run(config: Config) -> dict[str, Any]:
        return _run(config, config_yaml, engine_spec, mark, known_rows_only, observe, source)

    return resume_or_overwrite(config, mark, run)


def _run(
    config: Config,
    config_yaml: str,
    engine_spec: EngineSpec,
    mark: OverwriteMark,
    known_rows_only: bool,
    observe: Callable[[RunContext, StoreSession], RunObserver] | None,
    source: Source | None,
) -> dict[str, Any]:
    """Run the extraction as `run_extraction` does; overwrite=true deletes an existing store."""
    out = parse_path(config.out)
    _check(config, out, writes_images=observe is not None)
    with contextlib.ExitStack() as stack:
        target = StoreTarget(config, known_rows_only, source)
        context = stack.enter_context(build_run_context(config, config_yaml, engine_spec, target))
        session = StoreSession(out, context.as_run(), context.listing, config.grow)
        stack.enter_context(session.hold(config.overwrite))
        if config.overwrite:
            mark.write(session.disk)
        session.write_config(config_yaml)
        announce([*describe_run(context), ("store", _store_text(session))])
        observer = RunObserver() if observe is None else observe(context, session)
        _compute_lost(context, session)
        _check_images(context, session, only_tell=known_rows_only)
        if config.retry_failed:
            _retry(context, session)
        outcome = (
            run_distributed(context, session, part_task_of(target, context, session), config_yaml)
            if config.is_spread
            else _computed_in_process(context, session, observer)
        )
        figures = outcome.figures
        packing = time.perf_counter()
        _pack(config, session)
        figures.seconds["pack"] = time.perf_counter() - packing
        session.write_failures()
        summary = _summary(session, outcome)
        session.write_summary(summary)
        observer.run_finished()
        if session.whole:
            mark.remove(session.disk)
    _log_row_problems(session, summary["underflow_rows"])
    return summary


def _check(config: Config, out: Path, writes_images: bool) -> None:
    """Refuse impossible requests before images are listed or a model is loaded.

    Args:
        config: checked config.
        out: path of the store.
        writes_images: whether an observer writes images into the folder of the store.
    """
    if config.grow and is_url(out):
        raise ConfigError(
            f"grow=true needs a store on a disk, and {out} lies in an object store: without a lock "
            "two drivers could add different rows. Copy it to a disk, let it grow there, and copy "
            "it back."
        )
    if writes_images and config.data.root and not is_url(out):
        root = Path(config.data.root).expanduser()
        if root.is_dir() and root.resolve() == out.resolve():
            raise ConfigError(
                f"out={config.out} is data.root as well, and heat maps and sprites would become "
                "images of the data set. Choose another folder; below data.root is fine."
            )
    check_executor(config)


def _log_row_problems(session: StoreSession, underflow_rows: Mapping[str, int]) -> None:
    """Report failed rows and underflow rows on stderr.

    Args:
        session: write session of the store.
        underflow_rows: layer -> number of underflow rows.
    """
    if session.failures:
        log_message(failures_text(session.failures))
    for layer, count in underflow_rows.items():
        log_message(
            f"warning: {counted(count, f'row of {layer} has', f'rows of {layer} have')} no value "
            "above 6.1e-5; float16 holds so little with few bits or as zero. dtype=float32 keeps "
            "it."
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


def _check_images(context: RunContext, session: StoreSession, only_tell: bool) -> None:
    """Compare the images with those that the rows in the store were computed from.

    Args:
        context: run context.
        session: write session of the store.
        only_tell: warn about changed images instead of raising. A repair does so, as it refuses
            nothing that it can fix.

    Raises:
        StoreMismatchError: images have changed, and refresh=true was not given or could not compute
            all layers of their rows.
    """
    config, keys = context.config, context.listing.keys
    changes = _changes(context, session)
    if changes.num_unknown:
        log_message(
            f"warning: {unknown_images_text(changes.num_unknown)} (their image checksums were "
            "damaged), so whether these images have changed is not known. overwrite=true computes "
            "all rows again.\n"
        )
    if len(changes.gone):
        log_message(
            f"warning: {gone_images_text(keys, changes.gone)}. Their rows stay as they are.\n"
        )
    if config.refresh:
        log_message(f"{changed_text(len(changes.rows))} since their rows were computed\n")
        rows = _of_runs_asked(session, changes)
        if len(rows):
            _recompute(context, session, rows.tolist(), "refresh")
            changes = _changes(context, session)
    failed = {failure.row for failure in session.failures}
    mended = [row for row in changes.rows.tolist() if row in failed]
    changed = [row for row in changes.rows.tolist() if row not in failed]
    if mended and not config.retry_failed:
        log_message(f"{mended_images_text(keys, mended)}\n")
    if not changed:
        return
    layers = [
        f"layers=[{','.join(sorted(run.names))}]"
        for run, rows in zip(session.manifest.runs, changes.changed, strict=True)
        if np.isin(rows, changed).any()
    ]
    what = _refresh_text(list(dict.fromkeys(layers)))
    text = changed_images_text(session.root, keys, changed, what)
    if not only_tell:
        raise StoreMismatchError(text)
    log_message(f"warning: {text}\n")


def _refresh_text(layers: Sequence[str]) -> str:
    """Clause on what refresh=true computes for runs with these layers.

    Args:
        layers: override `layers=[...]` of each run.
    """
    each = f", once with each of {' and '.join(layers)}" if len(layers) > 1 else f" ({layers[0]})"
    return f"computes those rows anew and no others{each}"


def _changes(context: RunContext, session: StoreSession) -> ImageChanges:
    """Compare the images with the store, and save their states for the next comparison."""
    changes = image_changes(
        context.source,
        context.listing.keys,
        session.root,
        session.manifest,
        read_all=context.config.refresh,
    )
    if changes.states is not None:
        session.write_image_states(changes.states)
    return changes


def _of_runs_asked(session: StoreSession, changes: ImageChanges) -> npt.NDArray[np.int64]:
    """Changed rows of the runs that compute the requested layers."""
    pairs = zip(session.manifest.runs, changes.changed, strict=True)
    return np.unique(
        np.concatenate([[], *(rows for run, rows in pairs if session.makes(run))]).astype(np.int64)
    )


def _compute_lost(context: RunContext, session: StoreSession) -> None:
    """Recompute rows lost with damaged chunks, and merge them with the rows that a repair kept."""
    rows = session.lost_rows()
    if rows:
        log_message(
            f"{counted(len(rows), 'row was', 'rows were')} lost with damaged chunks; no other row "
            "is computed again\n"
        )
        sink = RetrySink(context, session, rows)
        run_parts(context, sink, sink)
        session.survey_again()


def _retry(context: RunContext, session: StoreSession) -> None:
    """Read the failed images again, and recompute the rows of those that can be decoded now."""
    failed = [f.row for f in session.failures if f.status != Status.NON_FINITE]
    rows = readable_again(context, failed)
    log_message(f"{len(rows)} of {counted(len(failed), 'failed image')} can be read now\n")
    if rows:
        _recompute(context, session, rows, "retry_failed")


def _recompute(
    context: RunContext, session: StoreSession, rows: Sequence[int], option: str
) -> None:
    """Recompute some rows in place; no other row changes.

    Args:
        context: run context.
        session: write session of the store.
        rows: rows of the listing.
        option: name of the option that requests this, for messages.

    Raises:
        ConfigError: the requested layers are not exactly those of one run.
    """
    if not session.parts_with(rows):
        together = [f"layers=[{','.join(sorted(run.names))}]" for run in session.manifest.runs]
        raise ConfigError(
            f"{option}=true computes all layers again that were computed together. Give it with "
            f"the layers of one run: {', '.join(dict.fromkeys(together))}."
        )
    session.unpack()
    sink = RetrySink(context, session, rows)
    run_parts(context, sink, sink)
    session.survey_again()


def _computed_in_process(
    context: RunContext, session: StoreSession, observer: RunObserver
) -> RunOutcome:
    """Compute the missing parts in this process."""
    with Heartbeat(session.disk, str(context.engine.device)) as heartbeat:
        sink = FeatureSink(context, session.commit, heartbeat, observer)
        return in_process.run(context, session, sink, observer)


def part_task_of(target: StoreTarget, context: RunContext, session: StoreSession) -> StorePartTask:
    """Part task for the workers of a distributed run.

    Args:
        target: run target of the store.
        context: run context of the driver.
        session: write session of the store.
    """
    return StorePartTask(
        dtype=target.dtype,
        settings=target.settings,
        datasets=frozenset(spec.name for spec in context.specs),
        manifest=session.manifest.to_json(),
    )


def _pack(config: Config, session: StoreSession) -> None:
    """Pack the parts into one features.h5, if the config asks for it and there is room."""
    if session.packed or not session.whole or _is_mixed(session) or config.pack is False:
        return
    if is_url(session.root):
        log_message(
            "the parts are kept: an object store has no disk to pack on. featx.open reads parts."
        )
        return
    needed, free = packed_size_bound(session.stored_bytes()), session.disk.free_bytes()
    if config.pack == "auto" and free < needed:
        log_message(
            f"the parts are kept: packing needs {needed} bytes and {free} are free. "
            "featx.open reads parts as well."
        )
        return
    pack_in_child(session.root, session.lock)
    session.after_packing()


def _is_mixed(session: StoreSession) -> bool:
    """Whether layers of some failed rows were computed from different images; reports them.

    Raises:
        StoreMismatchError: the same holds for rows that have not failed.
    """
    runs = session.manifest.runs
    if len(runs) == 1:
        return False
    mixed = rows_of_two_images(session.root, session.manifest).tolist()
    if not mixed:
        return False
    failed = {failure.row for failure in session.failures}
    layers = dict.fromkeys(f"layers=[{','.join(sorted(run.names))}]" for run in runs)
    if ok := [row for row in mixed if row not in failed]:
        keys = session.listing.keys
        what = _refresh_text(list(layers))
        raise StoreMismatchError(changed_images_text(session.root, keys, ok, what))
    log_message(
        f"the parts are kept: "
        f"{counted(len(mixed), 'failed image has', 'failed images have')} been mended for some "
        "layers only. "
        f"retry_failed=true with each of {' and '.join(layers)} computes the others.\n"
    )
    return True


def _summary(session: StoreSession, outcome: RunOutcome) -> dict[str, Any]:
    """Content of summary.json."""
    return {
        "rows": len(session.listing),
        "failures": len(session.failures),
        **outcome.figures.as_dict(),
        "underflow_rows": dict(+outcome.underflow_rows),
        "layers": [spec.name for spec in session.manifest.layers.values()],
        "bytes": session.stored_bytes(),
        "peak_memory_mib": max(peak_memory_mib(), outcome.peak_memory_mib),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _store_text(session: StoreSession) -> str:
    """Line of the table before a run on the rows that the store already has."""
    done, total = session.rows_done, session.rows_asked
    if not done:
        return f"{session.root}, begun"
    return f"{session.root}, {done} of {total} rows are there already"
