"""job=extract: images -> features on disk. The main job; also featx.extract."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featx.config import Config
from featx.errors import NonFiniteError
from featx.keys import from_keywords, from_omegaconf, saved_yaml
from featx.prepare import Prepared, prepare
from featx.progress import Progress, complain, describe_end, describe_run, facts, say
from featx.store import layout
from featx.store.pack import pack_in_child, packed_size_bound
from featx.store.reader import FeatureStore
from featx.store.session import StoreSession
from featx.store.writer import PartBuilder
from featx.types import Batch, Failure, Status

EXIT_TOO_MANY_FAILURES = 3


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end; what was whole is committed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def extract(**keys: Any) -> FeatureStore:
    """Run the main job from Python: the same keys as the command's, the same store.

        store = featx.extract(model="resnet50", layers=["layer4"], data="photos/", out="runs/p")

    Args:
        keys: every key of the command (`featx --help`). Short forms: `model` a name, `data` a
            folder or the name of a packaged data set, `reduce` a name; each also takes a mapping,
            such as `model={"name": "resnet50", "weights": None}`.

    Returns:
        The store, open for reading. Failed images are rows of NaN with their status; see
        `store.failures`, also when there are more than `max_failures`.

    Raises:
        FeatxError: whatever the command would report with exit code 1 or 2.
    """
    node = from_keywords(keys)
    config = from_omegaconf(node)
    _extract(config, saved_yaml(node))
    return FeatureStore(Path(config.out).expanduser())


def run(config: Config, config_yaml: str) -> int:
    """The command's job: extract, say what happened, return the exit code."""
    summary = _extract(config, config_yaml)
    num_rows, num_failed = summary["rows"], summary["failures"]
    allowed = config.allowed_failures(num_rows)
    if num_failed > allowed or num_failed == num_rows:
        complain(
            f"{num_failed} of {num_rows} images failed, more than max_failures="
            f"{config.max_failures:g} ({allowed} images). Their rows are NaN with a status; "
            f"see {Path(config.out) / layout.FAILURES_CSV}."
        )
        return EXIT_TOO_MANY_FAILURES
    return 0


def _extract(config: Config, config_yaml: str) -> dict[str, Any]:
    out = Path(config.out).expanduser()
    with contextlib.ExitStack() as stack:
        prepared = stack.enter_context(prepare(config, config_yaml))
        session = StoreSession(
            out,
            prepared.header,
            prepared.specs,
            prepared.listing,
            prepared.part_rows,
            config.codec,
            prepared.engine.compute.as_dict(),
        )
        stack.enter_context(session.hold(config.overwrite))
        session.write_config(config_yaml)
        complain(facts([*describe_run(prepared), ("store", _store_text(session))]))
        complain("")
        figures = _run_parts(prepared, session)
        packing = time.perf_counter()
        _pack(config, session)
        figures.seconds["pack"] = time.perf_counter() - packing
        session.write_failures()
        summary = _summary(session, figures)
        session.write_summary(summary)
    if session.failures:
        complain(_failures_text(session.failures))
    for layer, count in summary["faint_rows"].items():
        complain(
            f"warning: {count} rows of {layer} have no value above 6.1e-5; float16 holds so little "
            "with few bits or as zero. Store them with dtype=float32."
        )
    say(describe_end(summary, str(config.out), prepared.specs[0].name))
    return summary


@dataclass
class _Figures:
    """What a run measured: busy seconds per stage, images per second, faint rows per layer."""

    seconds: dict[str, float]
    images_per_second: float | None
    faint_rows: Counter[str]


def _run_parts(prepared: Prepared, session: StoreSession) -> _Figures:
    """Compute and commit what is missing."""
    from featx.loader import Loader

    engine = prepared.engine
    engine.model_seconds = engine.copy_seconds = 0.0
    waited = written = 0.0
    faint: Counter[str] = Counter()
    done_before = session.rows_done
    missing = session.missing()
    loader = Loader(
        prepared.source,
        prepared.listing,
        prepared.engine.backbone.preprocess,
        prepared.policy,
        prepared.reference,
        engine.compute.batch_size,
    )
    begun = time.perf_counter()
    with loader, _signals() as stop, Progress(len(session.listing), done_before) as progress:
        batches = loader.batches(missing)
        builder: PartBuilder | None = None
        while True:
            waiting = time.perf_counter()
            following = next(batches, None)
            wait = time.perf_counter() - waiting
            waited += wait
            if following is None:
                break
            if stop:
                raise Interrupted(stop[0])
            part, batch = following
            if builder is None:
                builder = PartBuilder(part, prepared.specs)
            features, failures = _compute(prepared, batch, faint)
            builder.add(batch.start, features, failures)
            if batch.start + batch.count == part.stop:
                writing = time.perf_counter()
                session.commit(builder)
                written += time.perf_counter() - writing
                builder = None
            progress.step(batch.count, len(failures), wait)
    took = time.perf_counter() - begun
    seconds = {
        "read": loader.times.read,
        "decode": loader.times.decode,
        "wait": waited,
        "model": engine.model_seconds,
        "copy": engine.copy_seconds,
        "write": written,
    }
    rows = session.rows_done - done_before
    return _Figures(seconds, rows / took if rows else None, +faint)


def _compute(
    prepared: Prepared, batch: Batch, faint: Counter[str]
) -> tuple[dict[str, Any], list[Failure]]:
    """Features of the rows of one batch, padding cut off; non-finite and faint rows found."""
    from featx.engine import finite_rows

    values = prepared.engine.run(batch.images)
    finite = finite_rows(values)
    failures = list(batch.failures)
    failed = {failure.row for failure in failures}
    for name, rows in finite.items():
        for i in range(batch.count):
            row = batch.start + i
            if rows[i] or row in failed:
                continue
            failed.add(row)
            failures.append(_non_finite(prepared, batch, row, name))
    ok = [i for i in range(batch.count) if batch.start + i not in failed]
    for name, rows in prepared.engine.faint_rows().items():
        faint[name] += int(rows[ok].sum())
    return {name: value[: batch.count].numpy() for name, value in values.items()}, failures


def _non_finite(prepared: Prepared, batch: Batch, row: int, layer: str) -> Failure:
    """A row whose feature is NaN, infinite or too large: an error, or a failure on record."""
    key = bytes(prepared.listing.keys[row])
    reason = prepared.engine.explain(batch.images, row - batch.start, layer)
    if prepared.config.nonfinite == "error":
        raise NonFiniteError(
            f"layer {layer}, row {row} ({os.fsdecode(key)}): {reason}. Nothing committed is lost. "
            "To store larger values: dtype=float32; to compute more exactly: precision=fp32; to "
            "go on and mark such rows: nonfinite=record. Each needs overwrite=true or a new out."
        )
    return Failure(row, key, Status.NON_FINITE, "NonFiniteError", f"layer {layer}: {reason}")


def _pack(config: Config, session: StoreSession) -> None:
    """The parts into one features.h5, where that is wanted and there is room."""
    if session.packed or config.pack is False:
        return
    needed, free = packed_size_bound(session.part_bytes()), session.disk.free_bytes()
    if config.pack == "auto" and free < needed:
        complain(
            f"the parts are kept: packing needs {needed} bytes and {free} are free. "
            "featx.open reads parts as well."
        )
        return
    pack_in_child(session.root)
    session.packed = True
    session.drop_parts()


def _summary(session: StoreSession, figures: _Figures) -> dict[str, Any]:
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    packed = session.root / layout.PACKED
    return {
        "rows": len(session.listing),
        "failures": len(session.failures),
        "images_per_second": figures.images_per_second and round(figures.images_per_second, 3),
        "seconds": {stage: round(value, 3) for stage, value in figures.seconds.items()},
        "faint_rows": dict(figures.faint_rows),
        "bytes": packed.stat().st_size if session.packed else session.part_bytes(),
        "peak_memory_mib": peak >> 20,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _store_text(session: StoreSession) -> str:
    done, total = session.rows_done, len(session.listing)
    if not done:
        return f"{session.root}, begun"
    return f"{session.root}, {done} of {total} rows are there already"


def _failures_text(failures: list[Failure]) -> str:
    counts = Counter(failure.status for failure in failures)
    lines = [f"{len(failures)} images failed:"]
    for status, count in counts.most_common():
        example = next(f for f in failures if f.status == status)
        lines.append(
            f"  {count} {status.label}, such as {os.fsdecode(example.key)}: {example.message}"
        )
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the run after the batch; a second one ends it at once."""
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(signum: int, frame: object) -> None:
        if stop:
            raise Interrupted(signum)
        stop.append(signum)
        complain("\nstopping; the same command goes on from the last whole part")

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
