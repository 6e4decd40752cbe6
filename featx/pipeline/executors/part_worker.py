"""How a worker does parts: the same for every executor."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from featx.base.progress import SilentProgress
from featx.errors import FeatxError, RunError
from featx.pipeline.executors.worker_spec import WorkerSpec
from featx.pipeline.executors.worker_stats import PartResult, WorkerStats
from featx.pipeline.loop import run_parts
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import peak_memory_mib
from featx.pipeline.stop_signals import Interrupted
from featx.store.heartbeat import Heartbeat
from featx.types import Batch, Failure, Part

if TYPE_CHECKING:
    from featx.engine.engine import Engine


class PartWorker:
    """Parts of an order, one after the other, each committed and told.

    Args:
        prepared: as ordered.
        order: of the driver.
        tell: is given every part that is durable; called in the thread that commits.
        heart: is told what part is computed.
        stopping: is set when the run is to end after the batch; None where nobody sets it.

    Attributes:
        part: whose batch is being computed; None between two batches.
        seconds: busy ones of stages that not every run has, since `do` began.
    """

    def __init__(
        self,
        prepared: RunContext,
        order: WorkerSpec,
        tell: Callable[[PartResult], None],
        heart: Heartbeat,
        stopping: threading.Event | None = None,
    ) -> None:
        self._maker = order.product.maker(prepared, order.root, heart)
        self._stopping = stopping or threading.Event()
        self.part: Part | None = None
        self.rows_asked = order.num_rows
        self.rows_done = 0
        self.rows_failed = 0  # the driver knows of all workers', and ends the run
        self._prepared = prepared
        self._tell = tell
        self._parts: Iterable[Part] = ()
        self._unseen = SilentProgress()
        self._at: tuple[Part, float] | None = None

    def do(self, parts: Iterable[Part]) -> WorkerStats:
        """Compute and commit parts as they come.

        Raises:
            Interrupted: a signal asked for the end; what was whole is committed.
        """
        self._parts = parts
        self._maker.seconds = dict.fromkeys(self._maker.seconds, 0.0)
        figures = run_parts(self._prepared, self, progress=self._unseen)
        warnings = Counter(figures.decoder_warnings)
        seconds = {stage: value for stage, value in figures.seconds.items() if value is not None}
        return WorkerStats(seconds, figures.bytes_read or 0, peak_memory_mib(), warnings)

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._maker.seconds

    def missing(self) -> Iterable[Part]:
        return self._parts

    def compute(self, engine: Engine, batch: Batch) -> Any:
        return self._maker.compute(engine, batch)

    def take(self, part: Part, batch: Batch, computed: Callable[[], Any]) -> list[Failure]:
        if self._stopping.is_set():
            raise Interrupted(signal.SIGTERM)
        if batch.start == part.start:
            self._at = part, time.perf_counter()
        self.part = part
        failures = self._maker.take(part, batch, computed)
        self.part = None
        return failures

    def finish_part(self) -> Callable[[], None]:
        assert self._at is not None, "no batch of a part was taken"
        part, begun = self._at
        faint, self._maker.faint = self._maker.faint, Counter()
        waited = self._unseen.take_waited()
        commit = self._maker.finish_part()

        def made_durable() -> None:
            failures = commit()
            self.rows_done += len(part)
            self._tell(PartResult(part, failures, +faint, time.perf_counter() - begun, waited))

        return made_durable


def rows_text(parts: Sequence[Part]) -> str:
    """Parts and their rows, for messages: 'part 3 (rows 24 to 31)'."""
    if not parts:
        return "no part"
    if len(parts) > 2:
        return ", ".join(rows_text([part]) for part in parts[:2]) + f" and {len(parts) - 2} more"
    return ", ".join(f"part {part.index} (rows {part.start} to {part.stop - 1})" for part in parts)


@contextlib.contextmanager
def add_worker_context(worker: str, at: Callable[[], str]) -> Iterator[None]:
    """Whatever is raised says by whom and where, in an error that any process can read."""
    try:
        yield
    except Interrupted as interrupted:
        raise RunError(f"{worker}: stopped by {interrupted}; what was whole is committed") from None
    except Exception as error:
        kind = "" if isinstance(error, FeatxError) else f"{type(error).__name__}: "
        raise RunError(f"{worker}, {at()}: {kind}{error}") from error
