"""TensorBoard events of a run: histograms and timings, and at its end graph and projector.

The run never depends on them. If they cannot be written, a warning is logged and the run continues.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import log_message
from featx.errors import FeatxError, MissingExtraError, first_line
from featx.export.tensorboard.projector import write_projector
from featx.pipeline import RunObserver
from featx.storage import TEMPORARY_PREFIX
from featx.store import FeatureStore, layout
from featx.types import Array, Batch, Failure, Part

if TYPE_CHECKING:
    from featx.pipeline import RunContext
    from featx.store import StoreSession

_CHUNK = 1 << 18
"""Number of values that are counted at a time, so that their bin numbers stay in the CPU cache."""

_BITS = {
    "float16": (np.uint16, 6),
    "bfloat16": (np.uint16, 3),
    "float32": (np.uint32, 19),
}
"""dtype -> unsigned integer of the same size, and the number of low bits that a bin ignores."""


class Histogram:
    """Counts of values of one dtype in bins that are the same for every stream.

    A bin contains all values with the same leading bits: sign, exponent and 4 bits of the fraction.
    There are 16 bins between two powers of two, 1024 bins for float16 and 8192 for the other
    dtypes, and a shift finds the bin of a value, in 0.4 times the time of np.histogram. A dtype is
    'float16', 'bfloat16' (as uint16, as in the store) or 'float32'.
    """

    def __init__(self, dtype: str) -> None:
        self._unsigned, self._shift = _BITS[dtype]
        self._num_bins = 1 << (8 * np.dtype(self._unsigned).itemsize - self._shift)
        self._counts = np.zeros(self._num_bins, dtype=np.int64)
        bits = np.arange(self._num_bins // 2) << self._shift
        if dtype == "bfloat16":
            bits, dtype = bits << 16, "float32"
        real = np.dtype(dtype)
        magnitudes = bits.astype(f"u{real.itemsize}").view(real)
        # Beyond the largest number, the bits are those of infinity and NaN.
        largest = np.finfo(real).max
        magnitudes = np.where(np.isfinite(magnitudes), magnitudes, largest).astype(np.float64)
        magnitudes = np.append(magnitudes, largest)
        self._edges = np.concatenate([-magnitudes[:0:-1], magnitudes])

    def add(self, values: Array) -> None:
        """Count finite values, an array of any shape."""
        bits = values.view(self._unsigned).ravel(order="K")  # memory order, which needs no copy
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            bins = np.right_shift(chunk, self._shift, dtype=np.intp)
            self._counts += np.bincount(bins, minlength=self._num_bins)

    def take(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the counts so far, and reset them. Return (k + 1,) edges and (k,) counts of bins
        in rising order; neighbouring bins without values are one bin. Both are empty if there are
        no values.
        """
        half = self._num_bins // 2  # the sign is the first bit
        counts = np.concatenate([self._counts[half:][::-1], self._counts[:half]])
        self._counts[:] = 0
        used = np.flatnonzero(counts)
        edges = np.union1d(used, used + 1)
        return self._edges[edges], counts[edges[:-1]]


PROJECTOR_ROWS = 1000
"""Number of rows in the projector with tensorboard=true."""

_GRAPH = ".graph"
"""Ending of the name of an event file that contains the graph."""


def require_tensorboard() -> None:
    """Raise MissingExtraError if the package `tensorboard` is missing or cannot be imported.

    Everything that a run needs is imported, so that nothing can be missing later.
    """
    try:
        import tensorboard.plugins.projector.projector_config_pb2  # noqa: F401
        import torch.utils.tensorboard  # noqa: F401
    except (ImportError, TypeError) as error:  # TypeError: incompatible version of protobuf
        reason = str(error).splitlines()[0]
        raise MissingExtraError(
            "the key tensorboard needs the package tensorboard, which cannot be imported "
            f'({reason}): pip install "featx[tensorboard]".'
        ) from error


class RunEvents(RunObserver):
    """Run observer that writes OUT/tensorboard; a step is the number of rows of the store so far.

    Events are written when a part is committed, so a resumed run continues with the next step.
    """

    wants_parts = True

    def __init__(self, context: RunContext, session: StoreSession) -> None:
        self._context = context
        self._session = session
        self._folder = session.root / layout.TENSORBOARD / f"run-{_run_number(session)}"
        self._histograms = {spec.name: Histogram(spec.dtype) for spec in context.specs}
        self._failures = 0
        self._seconds: Mapping[str, float] = {}
        self._since = time.perf_counter()
        self._path: Path | None = None
        self._failed = False

    def batch_computed(
        self, batch: Batch, features: Mapping[str, Array], failures: Sequence[Failure]
    ) -> None:
        """Count the values (n, ...) of the rows that did not fail, by dataset name, as stored."""
        self._failures += len(failures)
        if self._failed:
            return
        ok = np.ones(batch.count, dtype=bool)
        ok[[failure.row - batch.start for failure in failures]] = False
        for name, values in features.items():
            self._histograms[name].add(values[ok] if failures else values)

    def part_committed(self, part: Part, seconds: Mapping[str, float]) -> None:
        """Write the histograms and timings of the rows since the last call; `seconds` has stage ->
        busy seconds of the run so far.
        """
        if self._failed:
            return
        now = time.perf_counter()
        scalars = {
            f"seconds/{stage}": value - self._seconds.get(stage, 0.0)
            for stage, value in seconds.items()
        }
        scalars["run/images_per_second"] = len(part) / (now - self._since)
        scalars["run/failures"] = self._failures
        self._failures, self._seconds, self._since = 0, dict(seconds), now
        try:
            self._write(part.stop, scalars)
        except OSError as error:
            self._failed = True
            log_message(
                f"{_failure_text(error)} The run continues without events.", level="warning"
            )

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append scalars, and the histograms since the last call, to the file of this process.

        SummaryWriter would do it in a thread, whose errors end in a traceback on stderr.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard import RecordWriter, summary

        make: Any = summary  # its functions have no type annotations
        now = time.time()
        summaries = [make.scalar(tag, value) for tag, value in scalars.items()]
        for name, histogram in self._histograms.items():
            edges, counts = histogram.take()
            if len(counts):
                middles = edges[:-1] / 2 + edges[1:] / 2
                sums = float(counts @ middles), float(counts @ middles**2)
                limits = edges[0], edges[-1]
                bins = edges[1:].tolist(), counts.tolist()
                tag = f"activations/{name}"
                summaries.append(make.histogram_raw(tag, *limits, int(counts.sum()), *sums, *bins))
        events = [Event(wall_time=now, step=step, summary=each) for each in summaries]
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            name = f"events.out.tfevents.{time.time():020.9f}.{socket.gethostname()}.{os.getpid()}"
            self._path = self._folder / name
            events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
        with self._path.open("ab") as file:
            for event in events:
                RecordWriter(file).write(event.SerializeToString())

    def run_finished(self) -> None:
        """Write the graph of the model and the projector, after all features are computed."""
        try:
            if not self._failed:
                self._write_graph()
            option = self._context.config.tensorboard
            num_rows = PROJECTOR_ROWS if option is True else option
            store = FeatureStore(self._session.root, verify="rows")
            runs = self._session.manifest.runs
            layers = dict.fromkeys(spec.name for run in runs for spec in run.layers)
            layers_in_store = [name for name in layers if name in store]
            write_projector(self._session.disk, self._context, store, layers_in_store, num_rows)
        except (OSError, FeatxError) as error:
            log_message(f"{_failure_text(error)} The store is not affected.", level="warning")
            return
        log_message(f"tensorboard --logdir {self._folder.parent} shows the run")

    def _write_graph(self) -> None:
        """Write the graph to a separate file, which gets its name at the end, once per run."""
        if any(self._folder.glob(f"*{_GRAPH}")):
            return
        import torch
        from torch.utils.tensorboard import SummaryWriter

        module, x = self._context.engine.without_hooks()
        trace: Any = torch.jit.trace  # it has no type annotations
        temporary = self._folder / f"{TEMPORARY_PREFIX}graph"
        with torch.no_grad(), warnings.catch_warnings():
            # Tracing is deprecated and warns about everything that it cannot follow, which is
            # acceptable in a graph for viewing.
            warnings.simplefilter("ignore")
            try:
                # add_graph itself would trace strictly, which refuses models that return a dict,
                # run the model three more times, and print errors to stdout.
                traced = trace(module, (x,), strict=False, check_trace=False)
                with SummaryWriter(str(temporary), filename_suffix=_GRAPH) as writer:
                    writer.add_graph(traced, (x,))
                for path in list(temporary.iterdir()):
                    path.rename(self._folder / path.name)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's module runs in it
                reason = first_line(error)
                log_message(f"tensorboard: no graph of this model, torch.jit.trace fails: {reason}")
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


def _run_number(session: StoreSession) -> int:
    """Return the index of the last run that starts at or before the first missing part.

    If no part is missing, part 0 takes its place.

    Layers that are added to a store start at row 0 again, so they need their own curves.
    """
    first = next((part.index for part in session.missing()), 0)
    starts = [run.grid.first_part for run in session.manifest.runs]
    return sum(start <= first for start in starts) - 1


def _failure_text(error: Exception) -> str:
    return f"events for TensorBoard could not be written: {error}".rstrip(".") + "."
