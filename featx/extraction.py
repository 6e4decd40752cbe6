"""The main job itself: what is missing in a store is computed, committed and packed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from featx.config import Config
from featx.events import RunEvents, require_tensorboard
from featx.loop import (
    Figures,
    exit_code,
    failures_of,
    failures_text,
    labels_of,
    peak_memory_mib,
    run_parts,
)
from featx.prepare import Prepared, StorePurpose, prepare
from featx.progress import complain, describe_run, facts
from featx.store import layout
from featx.store.pack import pack_in_child, packed_size_bound
from featx.store.session import StoreSession
from featx.store.writer import PartBuilder
from featx.types import Batch, Failure, Part, Source


def run_extraction(
    config: Config,
    config_yaml: str,
    known_rows_only: bool = False,
    finish: Callable[[Prepared, StoreSession], None] | None = None,
    source: Source | None = None,
) -> dict[str, Any]:
    """Begin or go on with the store of a config until it is whole; says what happens on stderr.

    Args:
        config: checked.
        config_yaml: as the user gave it, for the store.
        known_rows_only: leave pictures alone that the store does not know.
        finish: called once the store is whole, while the model is still at hand.
        source: the data set, where it is an object from Python; None opens the config's.

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
        purpose = StorePurpose(config, known_rows_only, source)
        prepared = stack.enter_context(prepare(config, config_yaml, purpose))
        session = StoreSession(out, prepared.as_run(), prepared.listing, config.grow)
        stack.enter_context(session.hold(config.overwrite))
        session.write_config(config_yaml)
        complain(facts([*describe_run(prepared), ("store", _store_text(session))]))
        complain("")
        events = RunEvents(prepared, session) if config.tensorboard else None
        work = _StoreWork(prepared, session, events)
        figures = run_parts(prepared, work, session.disk, events)
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


def store_exit_code(config: Config, summary: dict[str, Any]) -> int:
    """0, or that of more failed rows than max_failures allows, which it then says."""
    failures = Path(config.out) / layout.FAILURES_CSV
    return exit_code(
        config,
        summary["rows"],
        summary["failures"],
        f"Their rows are NaN with a status; see {failures}.",
    )


class _StoreWork:
    """Features of the rows, into the parts of a store.

    Args:
        prepared: the run.
        session: its store, held.
        events: sees every batch; None where nobody wants to see any.

    Attributes:
        faint: layer -> rows that float16 hardly holds.
        seconds: there are no stages beside those of every run.
    """

    def __init__(self, prepared: Prepared, session: StoreSession, events: RunEvents | None) -> None:
        self.faint: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._events = events
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
        if self._events is not None:
            self._events.batch(batch, features, failures)
        return failures

    def hand_over(self) -> Callable[[], None]:
        assert self._builder is not None, "no batch of a part was taken"
        builder, self._builder = self._builder, None
        return functools.partial(self._session.commit, builder)


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
