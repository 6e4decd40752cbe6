"""The main job itself: what is missing in a store is computed, committed and packed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from featx.config import Config
from featx.errors import EXIT_TOO_MANY_FAILURES, NonFiniteError
from featx.events import RunEvents, require_tensorboard
from featx.machine import num_cpus
from featx.prepare import Prepared, StorePurpose, prepare
from featx.progress import Progress, bottleneck, complain, describe_run, facts
from featx.store import layout
from featx.store.pack import pack_in_child, packed_size_bound
from featx.store.session import StoreSession
from featx.store.writer import PartBuilder
from featx.types import Batch, Failure, Part, Status

if TYPE_CHECKING:
    from featx.loader import Loader

GRACE_S = 5.0
"""How long a batch may go on after SIGINT or SIGTERM before it is cut short."""


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end; what was whole is committed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def run_extraction(
    config: Config,
    config_yaml: str,
    known_rows_only: bool = False,
    finish: Callable[[Prepared, StoreSession], None] | None = None,
) -> dict[str, Any]:
    """Begin or go on with the store of a config until it is whole; says what happens on stderr.

    Args:
        config: checked.
        config_yaml: as the user gave it, for the store.
        known_rows_only: leave pictures alone that the store does not know.
        finish: called once the store is whole, while the model is still at hand.

    Returns:
        the summary, as in summary.json.

    Raises:
        FeatxError: the config or the store does not fit, or the run failed on its way.
        Interrupted: a signal asked for the end; what was whole is committed.
    """
    out = Path(config.out).expanduser()
    if config.tensorboard:
        require_tensorboard()
    with contextlib.ExitStack() as stack:
        purpose = StorePurpose(config, known_rows_only)
        prepared = stack.enter_context(prepare(config, config_yaml, purpose))
        session = StoreSession(out, prepared.as_run(), prepared.listing, config.grow)
        stack.enter_context(session.hold(config.overwrite))
        session.write_config(config_yaml)
        complain(facts([*describe_run(prepared), ("store", _store_text(session))]))
        complain("")
        events = RunEvents(prepared, session) if config.tensorboard else None
        work = _StoreWork(prepared, session, events)
        figures = run_parts(prepared, work)
        packing = time.perf_counter()
        _pack(config, session)
        figures.seconds["pack"] = time.perf_counter() - packing
        session.write_failures()
        summary = _summary(session, figures, +work.faint)
        session.write_summary(summary)
        if events is not None:
            events.finish()
        if finish is not None:
            finish(prepared, session)
    if session.failures:
        complain(failures_text(session.failures))
    for layer, count in summary["faint_rows"].items():
        complain(
            f"warning: {count} rows of {layer} have no value above 6.1e-5; float16 holds so little "
            "with few bits or as zero. Store them with dtype=float32."
        )
    return summary


def exit_code(config: Config, summary: dict[str, Any]) -> int:
    """0, or that of more failures than max_failures allows, which it then says."""
    num_rows, num_failed = summary["rows"], summary["failures"]
    allowed = config.allowed_failures(num_rows)
    if num_failed <= allowed and num_failed < num_rows:
        return 0
    complain(
        f"{num_failed} of {num_rows} images failed, more than max_failures="
        f"{config.max_failures:g} ({allowed} images). Their rows are NaN with a status; "
        f"see {Path(config.out) / layout.FAILURES_CSV}."
    )
    return EXIT_TOO_MANY_FAILURES


@dataclass
class Figures:
    """What a run measured.

    Attributes:
        seconds: stage -> busy ones.
        images_per_second: None where nothing was left to do.
        bytes_read: of encoded images.
        bottleneck: a sentence on the stage that the others waited for.
    """

    seconds: dict[str, float]
    images_per_second: float | None
    bytes_read: int
    bottleneck: str | None

    def as_dict(self) -> dict[str, Any]:
        """Of summary.json."""
        return {
            "images_per_second": self.images_per_second and round(self.images_per_second, 3),
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "bytes_read": self.bytes_read,
            "bottleneck": self.bottleneck,
        }


class Work(Protocol):
    """What becomes of the batches of a run: rows of a store, or statistics.

    Attributes:
        events: is told of every committed part; None where nobody wants to know.
    """

    events: RunEvents | None

    @property
    def rows_asked(self) -> int:
        """Rows that there are in the end."""

    @property
    def rows_done(self) -> int:
        """Rows in committed parts."""

    def missing(self) -> list[Part]:
        """The parts that are still to be done, in order."""

    def take(self, part: Part, batch: Batch) -> list[Failure]:
        """Compute the next batch of a part; returns its rows that failed."""

    def commit(self) -> None:
        """Make the part durable whose last batch was taken."""


class _StoreWork:
    """Features of the rows, into the parts of a store.

    Args:
        prepared: the run.
        session: its store, held.
        events: sees every batch; None where nobody wants to see any.

    Attributes:
        faint: layer -> rows that float16 hardly holds.
    """

    def __init__(self, prepared: Prepared, session: StoreSession, events: RunEvents | None) -> None:
        self.events = events
        self.faint: Counter[str] = Counter()
        self._prepared = prepared
        self._session = session
        self._builder: PartBuilder | None = None

    @property
    def rows_asked(self) -> int:
        return self._session.rows_asked

    @property
    def rows_done(self) -> int:
        return self._session.rows_done

    def missing(self) -> list[Part]:
        return self._session.missing()

    def take(self, part: Part, batch: Batch) -> list[Failure]:
        if self._builder is None:
            self._builder = PartBuilder(part, self._prepared.specs)
        features, failures = compute_rows(self._prepared, batch, self.faint)
        self._builder.add(batch.start, features, failures)
        if self.events is not None:
            self.events.batch(batch, features, failures)
        return failures

    def commit(self) -> None:
        assert self._builder is not None, "no batch of a part was taken"
        self._session.commit(self._builder)
        self._builder = None


def run_parts(prepared: Prepared, work: Work) -> Figures:
    """Compute and commit what is missing.

    Raises:
        Interrupted: a signal asked for the end; what was whole is committed.
    """
    engine = prepared.engine
    engine.model_seconds = engine.copy_seconds = 0.0
    waited = written = 0.0
    done_before = work.rows_done
    missing = work.missing()
    loader = prepared.loader(engine.compute.batch_size)
    begun = time.perf_counter()
    with loader, _signals() as stop, Progress(work.rows_asked, done_before) as progress:
        batches = loader.batches(missing)
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
            failures = work.take(part, batch)
            if batch.start + batch.count == part.stop:
                writing = time.perf_counter()
                work.commit()
                written += time.perf_counter() - writing
                if work.events is not None:
                    work.events.part(part, _seconds(loader, engine, waited, written))
            progress.step(batch.count, len(failures), wait)
        if stop:
            raise Interrupted(stop[0])
    took = time.perf_counter() - begun
    rows = work.rows_done - done_before
    seconds = _seconds(loader, engine, waited, written)
    if not rows:
        return Figures(seconds, None, loader.times.bytes, None)
    sentence = bottleneck(seconds, took, num_cpus(), engine.device.type)
    return Figures(seconds, rows / took, loader.times.bytes, sentence)


def _seconds(loader: Loader, engine: Any, waited: float, written: float) -> dict[str, float]:
    """Stage -> its busy seconds so far."""
    return {
        "read": loader.times.read,
        "decode": loader.times.decode,
        "wait": waited,
        "model": engine.model_seconds,
        "copy": engine.copy_seconds,
        "write": written,
    }


def compute_rows(
    prepared: Prepared, batch: Batch, faint: Counter[str]
) -> tuple[dict[str, Any], list[Failure]]:
    """Features of the rows of one batch, padding cut off; non-finite and faint rows found.

    Args:
        prepared: the run.
        batch: n rows of it, and padding.
        faint: layer -> rows that float16 hardly holds; added to.

    Returns:
        dataset name -> (n, ...) as stored, and the rows that failed.

    Raises:
        NonFiniteError: a feature is not finite, and nonfinite=error.
    """
    from featx.engine import stored_bits

    values = prepared.engine.run(batch.images, labels_of(prepared, batch))
    failures = failures_of(prepared, batch, values)
    failed = {failure.row for failure in failures}
    ok = [i for i in range(batch.count) if batch.start + i not in failed]
    for name, rows in prepared.engine.faint_rows().items():
        faint[name] += int(rows[ok].sum())
    return {name: stored_bits(value[: batch.count]) for name, value in values.items()}, failures


def failures_of(prepared: Prepared, batch: Batch, values: Mapping[str, Any]) -> list[Failure]:
    """The rows of a batch that failed: in reading, or because a feature is not finite.

    Args:
        prepared: the run.
        batch: n rows of it, and padding.
        values: dataset name -> (B, ...), of any device.

    Raises:
        NonFiniteError: a feature is not finite, and nonfinite=error.
    """
    from featx.engine import finite_rows

    failures = list(batch.failures)
    failed = {failure.row for failure in failures}
    for name, finite in finite_rows(values).items():
        for i in range(batch.count):
            row = batch.start + i
            if finite[i] or row in failed:
                continue
            failed.add(row)
            failures.append(_non_finite(prepared, batch, row, name))
    return failures


def labels_of(prepared: Prepared, batch: Batch) -> Any:
    """(B,) int64 labels of a batch as a tensor, 0 for its padding; None where nobody asks."""
    if prepared.config.target not in ("label", "loss"):
        return None
    import torch

    labels = torch.zeros(len(batch.images), dtype=torch.int64)
    labels[: batch.count] = torch.from_numpy(
        prepared.listing.labels[batch.start : batch.start + batch.count].copy()
    )
    return labels


def _non_finite(prepared: Prepared, batch: Batch, row: int, layer: str) -> Failure:
    """A row whose feature is NaN, infinite or too large: an error, or a failure on record."""
    key = bytes(prepared.listing.keys[row])
    labels = labels_of(prepared, batch)
    reason = prepared.engine.explain(batch.images, labels, row - batch.start, layer)
    if prepared.config.nonfinite == "error":
        wide = prepared.specs[0].dtype == "float32"
        wider = "" if wide else "store larger values: dtype=float32; to "
        raise NonFiniteError(
            f"layer {layer}, row {row} ({os.fsdecode(key)}): {reason}. Nothing committed is lost. "
            f"To {wider}compute more exactly: precision=fp32; to go on and mark such rows: "
            "nonfinite=record. Each needs overwrite=true or a new out."
        )
    return Failure(row, key, Status.NON_FINITE, "NonFiniteError", f"layer {layer}: {reason}")


def _pack(config: Config, session: StoreSession) -> None:
    """The parts into one features.h5, where that is wanted and there is room."""
    if session.packed or not session.whole or config.pack is False:
        return
    needed, free = packed_size_bound(session.stored_bytes()), session.disk.free_bytes()
    if config.pack == "auto" and free < needed:
        complain(
            f"the parts are kept: packing needs {needed} bytes and {free} are free. "
            "featx.open reads parts as well."
        )
        return
    pack_in_child(session.root, session.lock)
    session.after_packing()


def peak_memory_mib() -> int:
    """Of this process, so far."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20


def _summary(session: StoreSession, figures: Figures, faint: Counter[str]) -> dict[str, Any]:
    return {
        "rows": len(session.listing),
        "failures": len(session.failures),
        **figures.as_dict(),
        "faint_rows": dict(faint),
        "layers": [spec.name for spec in session.manifest.layers.values()],
        "bytes": session.stored_bytes(),
        "peak_memory_mib": peak_memory_mib(),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _store_text(session: StoreSession) -> str:
    done, total = session.rows_done, session.rows_asked
    if not done:
        return f"{session.root}, begun"
    return f"{session.root}, {done} of {total} rows are there already"


def failures_text(failures: list[Failure]) -> str:
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
    """SIGINT and SIGTERM end the run after the batch; a second one, or GRACE_S later, at once."""
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(signum: int, frame: object) -> None:
        if stop:
            raise Interrupted(stop[0])
        stop.append(signum)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        complain("\nstopping; the same command goes on from the last whole part")

    def cut_short(signum: int, frame: object) -> None:
        if stop:
            raise Interrupted(stop[0])

    handlers = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGALRM: cut_short}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
