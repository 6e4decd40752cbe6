"""Worker: computes missing parts of a run until none is left, and commits them.

It shares nothing with its driver and the other workers but the folder of the store, and a folder
with the worker spec, claims of parts and reports of workers (`job_folder`). It compares its
fingerprint with that of the driver before it computes its first row.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from featx.base import (
    differences,
    end_with_parent,
    keep_freed_memory,
    own_process,
    signal_handlers,
    take_cpus,
)
from featx.errors import RunError, exit_text
from featx.pipeline.executors.job_folder import (
    SPEC,
    PartClaims,
    WorkerError,
    WorkerReport,
    WorkerSpec,
    inherited_parts,
    read_spec,
    ready_path,
    result_path,
)
from featx.pipeline.loop import PartRows, run_parts
from featx.pipeline.row_failures import Rows
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.stop_signals import Interrupted
from featx.sources import open_source
from featx.storage import open_folder, s3_outage
from featx.store import Heartbeat, content_tags_digest, merge_listing
from featx.types import Batch, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import ChosenLayers

TIME_LIMIT = "its time limit"
"""Value of `WorkerReport.ended_by` for a worker that its time limit ended."""


@s3_outage.waiting_limit()  # the driver has written to the store, so an outage is temporary
def run_worker(
    spec: WorkerSpec, number: int, device: str, left_s: float | None = None
) -> WorkerReport:
    """Compute and commit parts until all are claimed; report how that ended."""
    own_process()
    if device == "cpu":
        keep_freed_memory()  # before any thread allocates
    started_at, ready_at = time.monotonic(), 0.0
    report, worker = WorkerReport(), None
    folder = open_folder(spec.folder)
    claims = PartClaims(spec, number)
    try:
        with _interrupted_at_end(left_s) as ended_by:
            missing = spec.output.uncommitted(spec.parts)
            inherited = inherited_parts(spec, number, missing)
            if inherited or claims.has_unclaimed():
                name = f"{spec.kind} {number} on {device}"
                root = open_folder(spec.root)
                heartbeat = Heartbeat(root, name, spec.driver, spec.outlives_driver)
                with heartbeat, worker_context(spec, device) as context:
                    ready_at = time.monotonic()
                    worker = PartWorker(context, spec, heartbeat, report, ready_path(spec, number))
                    # One at a time, so that another death is known to belong to its part.
                    for part in inherited:
                        worker.compute_parts([part])
                    while claims.has_unclaimed():
                        worker.compute_parts(claims.parts())
    except Interrupted as interrupted:
        report.ended_by = ended_by[0] or str(interrupted)
        ran_s = time.monotonic() - started_at
        ready_s = ready_at - started_at
        report.activity = (
            f"ready after {ready_s:.0f} s, computed for {ran_s - ready_s:.0f} s"
            if ready_at
            else f"not ready after {ran_s:.0f} s"
        )
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a worker's boundary: the driver raises it
        where = rows_text([] if worker is None else worker.parts_in_progress)
        kind, text = type(error).__name__, str(error)
        if isinstance(error, SystemExit):  # of the user's code
            kind, text = RunError.__name__, exit_text(error)
        report.error = WorkerError(kind, text, traceback.format_exc(), where)
    if not _is_left_behind(spec):
        folder.replace(result_path(spec, number), report.to_json().encode())
    return report


def _is_left_behind(spec: WorkerSpec) -> bool:
    """Return whether the run has ended without this worker, so that its folder is gone.

    Slurm and Ray may lose a worker that is still alive, on a node without network for instance.
    """
    with contextlib.suppress(OSError):  # the disk does not answer now
        return not (spec.folder / SPEC).exists()
    return False


def rows_text(parts: Sequence[Part]) -> str:
    """Parts and their rows for messages: 'part 3 (rows 24 to 31)'."""
    if not parts:
        return "no part"
    if len(parts) > 2:
        return ", ".join(rows_text([part]) for part in parts[:2]) + f" and {len(parts) - 2} more"
    return ", ".join(f"part {part.index} (rows {part.start} to {part.stop - 1})" for part in parts)


class _WorkerTarget:
    """Run target of a worker, with the values of its worker spec."""

    def __init__(self, spec: WorkerSpec, source: Source, listing: Listing) -> None:
        self.dtype = spec.output.dtype
        self.settings = dict(spec.output.settings)
        self._spec = spec
        self._data_set = source, listing

    def list_images(self) -> tuple[Source, Listing]:
        return self._data_set

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        return [pair for pair in chosen if pair[0].name in self._spec.output.datasets]

    def resume_state(self, names: set[str]) -> ResumeState | None:
        return self._spec.resume_state

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """No limits, as the rows per part come from the driver."""
        return float("inf"), float("inf")  # the resume state fixes the rows per part


@contextlib.contextmanager
def worker_context(spec: WorkerSpec, device: str) -> Iterator[RunContext]:
    """Build the run context of a worker on a device, such as 'cuda:1'."""
    take_cpus(spec.cpus)
    spec.output.check_unchanged(spec.fingerprint)
    config = replace(spec.config, device=device)
    source = spec.source
    listing = spec.output.stored_listing(spec.num_rows, spec.fingerprint["listing"])
    if listing is None:
        raise RunError(f"{spec.root} has no listing of {spec.num_rows} rows that is readable.")
    if source is None:
        source = open_source(config.data)
        # The data set may have changed while the worker waited for a machine, which the driver
        # would refuse as well. From here on the source can tell if it changes.
        listed = merge_listing(spec.root, listing, source.listing()).head(spec.num_rows)
        if content_tags_digest(listed) != spec.content_tags:
            raise RunError(
                f"images of {config.data.root} have changed since the run began. Nothing "
                "committed is lost; run the same command again, which compares them with "
                "those of the committed rows."
            )
    target = _WorkerTarget(spec, source, listing)
    with build_run_context(config, spec.config_yaml, spec.engine_spec, target) as context:
        if changed := differences(spec.fingerprint, context.header.fingerprint):
            lines = [f"  {key}: the driver has {was!r}, this {new!r}" for key, was, new in changed]
            raise RunError(
                "this worker would compute other values than the driver:\n" + "\n".join(lines)
            )
        yield context


class PartWorker:
    """Part sink of a worker: commits parts to the output, and adds them to its report.

    The report is written to `path` at once, as the worker is ready, and after each commit.
    """

    def __init__(
        self,
        context: RunContext,
        spec: WorkerSpec,
        heartbeat: Heartbeat,
        report: WorkerReport,
        path: Path,
    ) -> None:
        self._output = spec.output
        self._output.join(context)
        self._context = context
        self._spec = spec
        self._heartbeat = heartbeat
        self._report = report
        self._path = path
        self._folder = open_folder(spec.folder)
        self._parts: Iterable[Part] = ()
        self._held: dict[int, Part] = {}  # parts that are computed or committed now, by index
        self._failed_row: int | None = None  # first row of the batch that raised an exception
        self.num_rows = spec.num_rows
        self.num_committed = 0
        self.seconds: Mapping[str, float] = {}
        self.num_failed = 0  # the driver counts the failures of all workers and ends the run
        self._write_report()

    def compute_parts(self, parts: Iterable[Part]) -> None:
        """Compute and commit parts as the iterable yields them, and add their measurements."""
        self._parts = parts
        self.seconds = self._output.seconds = dict.fromkeys(self._output.seconds, 0.0)
        figures = run_parts(self._context, self, heartbeat=self._heartbeat, shows_progress=False)
        seconds = {stage: value for stage, value in figures.seconds.items() if value is not None}
        self._report.add(
            WorkerReport(
                seconds=seconds,
                bytes_read=figures.bytes_read or 0,
                peak_memory_mib=peak_memory_mib(),
                decoder_warnings=dict(figures.decoder_warnings),
            )
        )

    @property
    def parts_in_progress(self) -> list[Part]:
        """Part in which an error occurred, or those that come into question."""
        held, row = list(self._held.values()), self._failed_row
        return [part for part in held if row is None or part.start <= row < part.stop]

    def missing(self) -> Iterator[Part]:
        for part in self._parts:
            self._held[part.index] = part
            yield part

    def compute(self, engine: Engine, batch: Batch) -> Rows:
        try:
            return self._output.compute(engine, batch)
        except Exception:
            self._failed_row = batch.start
            raise

    def begin_part(self, part: Part) -> PartRows:
        rows: PartRows = self._output.begin_part(part)
        return rows

    def commit(self, rows: PartRows) -> None:
        self._output.commit(rows)
        self.num_committed += len(rows.part)
        del self._held[rows.part.index]
        self._report.num_parts += 1
        self._report.underflow_rows = dict(self._output.underflow_rows)
        self._write_report()

    def _write_report(self) -> None:
        if not _is_left_behind(self._spec):
            self._folder.write_best_effort(self._path, self._report.to_json())


@contextlib.contextmanager
def _interrupted_at_end(left_s: float | None) -> Iterator[list[str | None]]:
    """Raise Interrupted within the block when this worker is to end. Yield [what told it to, or
    None for the signal of the exception].

    SIGTERM tells it to end, and so does a timer in this process: Slurm announces a time limit up to
    a minute early, which may be all of a short limit.
    """
    ended_by: list[str | None] = [None]

    def end(signum: int, frame: object) -> None:
        raise Interrupted(signal.SIGTERM)

    def limit_reached() -> None:  # in the thread of the timer; signals arrive in the main thread
        ended_by[0] = TIME_LIMIT
        os.kill(os.getpid(), signal.SIGTERM)  # `end`, or the handler of a run in progress

    timer = threading.Timer(left_s or 0.0, limit_reached)
    timer.daemon = True
    if left_s is not None:
        timer.start()
    try:
        with signal_handlers({signal.SIGTERM: end}):
            yield ended_by
    finally:
        timer.cancel()


def main(folder: str, number: str, device: str, parent: str = "") -> None:
    """Run a worker of this machine; with the process id of a parent it dies with that process."""
    # It ends without a traceback, also while later imports run; the driver says what ended it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if parent:
        end_with_parent(int(parent))
    run_worker(read_spec(Path(folder)), int(number), device)


if __name__ == "__main__":
    main(*sys.argv[1:])
