"""TensorBoard events of a run: histograms and timings, and at its end graph and projector.

The run never depends on them. If they cannot be written, a warning is logged and the run continues.
"""

from __future__ import annotations

import io
import os
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import log_message
from featx.errors import FeatxError, MissingExtraError
from featx.export.tensorboard.histogram import Histogram
from featx.export.tensorboard.projector import write_projector
from featx.pipeline import RunObserver
from featx.store import FeatureStore, layout
from featx.types import Batch, Failure, Part

if TYPE_CHECKING:
    from featx.pipeline import RunContext
    from featx.store import StoreSession

PROJECTOR_ROWS = 1000
"""Number of rows in the projector with tensorboard=true."""

_HISTOGRAM_TEXT = "Values as stored, of the rows of a part that did not fail."
"""Description of the histograms in TensorBoard."""
_GRAPH = ".graph"
"""Ending of the name of an event file that contains the graph."""


def require_tensorboard() -> None:
    """Check that the package `tensorboard` is complete.

    Everything that a run needs is imported, so that nothing can be missing later.

    Raises:
        MissingExtraError: it is missing or cannot be imported.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.plugins.histogram.metadata
        import tensorboard.plugins.projector.projector_config_pb2
        import tensorboard.summary.writer.record_writer
        import tensorboard.util.tensor_util  # noqa: F401
    except (ImportError, TypeError) as error:  # TypeError: incompatible version of protobuf
        reason = str(error).splitlines()[0]
        raise MissingExtraError(
            "the key tensorboard needs the package tensorboard, which cannot be imported "
            f'({reason}): pip install "featx[tensorboard]".'
        ) from error


class RunEvents(RunObserver):
    """Run observer that writes OUT/tensorboard; a step is the number of rows of the store so far.

    Events are written when a part is committed, so a resumed run continues with the next step.

    Args:
        context: the run.
        session: write session of its store.

    Attributes:
        wants_parts: asks the run to report every committed part.
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
        self, batch: Batch, features: Mapping[str, npt.NDArray[Any]], failures: Sequence[Failure]
    ) -> None:
        """Count the values of the rows that did not fail.

        Args:
            batch: n rows of the run.
            features: dataset name -> (n, ...) values as stored.
            failures: rows that failed.
        """
        self._failures += len(failures)
        if self._failed:
            return
        ok = np.ones(batch.count, dtype=bool)
        ok[[failure.row - batch.start for failure in failures]] = False
        for name, values in features.items():
            self._histograms[name].add(values[ok] if failures else values)

    def part_committed(self, part: Part, seconds: Mapping[str, float]) -> None:
        """Write the histograms and timings of a committed part.

        Args:
            part: rows since the last call.
            seconds: stage -> busy seconds of the run so far.
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
            self._append(_part_record(part.stop, scalars, self._histograms))
        except OSError as error:
            self._failed = True
            log_message(
                f"{_failure_text(error)} The run continues without events.", level="warning"
            )

    def run_finished(self) -> None:
        """Write the graph of the model and the projector, after all features are computed."""
        try:
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

    def _append(self, records: bytes) -> None:
        """Append records to the event file of this process."""
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / _event_file_name()
            records = _version_record() + records
        with self._path.open("ab") as file:
            file.write(records)

    def _write_graph(self) -> None:
        """Write the graph to a separate file, once per run."""
        if any(self._folder.glob(f"*{_GRAPH}")):
            return
        module, x = self._context.engine.without_hooks()
        try:
            record = _graph_record(module, x)
        except Exception as error:  # noqa: BLE001 - the user's module runs in it
            reason = str(error).strip().splitlines() or [type(error).__name__]
            log_message(f"tensorboard: no graph of this model, torch.jit.trace fails: {reason[0]}")
            return
        self._session.disk.make_folder(self._folder)
        path = self._folder / (_event_file_name() + _GRAPH)
        self._session.disk.replace(path, _version_record() + record)


def _run_number(session: StoreSession) -> int:
    """Return the index of the last run that starts at or before the first missing part.

    If no part is missing, part 0 takes its place.

    Layers that are added to a store start at row 0 again, so they need their own curves.
    """
    first = next((part.index for part in session.missing()), 0)
    starts = [run.grid.first_part for run in session.manifest.runs]
    return sum(start <= first for start in starts) - 1


def _failure_text(error: Exception) -> str:
    """Return the warning for events that cannot be written."""
    return f"events for TensorBoard could not be written: {error}".rstrip(".") + "."


def _event_file_name() -> str:
    """Return a new file name; TensorBoard reads the files of a folder in the order of names."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return (
        f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
    )


def _record(**fields: Any) -> bytes:
    """Serialise one event in the framing of event files."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()


def _version_record() -> bytes:
    """Return the record that every event file begins with."""
    return _record(file_version="brain.Event:2")


def _part_record(
    step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
) -> bytes:
    """Serialise timings and histograms of one part, and reset the histograms."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    summary = Summary()
    for tag, value in scalars.items():
        summary.value.add(tag=tag, simple_value=value)
    metadata = create_summary_metadata(display_name="", description=_HISTOGRAM_TEXT)
    for name, histogram in histograms.items():
        tensor = make_tensor_proto(histogram.take())
        summary.value.add(tag=f"activations/{name}", metadata=metadata, tensor=tensor)
    return _record(step=step, summary=summary)


def _graph_record(module: Any, x: Any) -> bytes:
    """Trace a module with a batch (1, 3, H, W) and serialise its graph.

    The result is that of add_graph of torch.utils.tensorboard. That function traces strictly, so a
    model that returns a dict has no graph, and runs the model three more times to verify the trace.
    """
    import torch
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.versions_pb2 import VersionDef
    from torch.jit._trace import TracerWarning
    from torch.utils.tensorboard._pytorch_graph import parse

    trace: Any = torch.jit.trace  # torch.jit.trace has no type annotations
    with torch.no_grad(), warnings.catch_warnings():
        # Tracing is deprecated and warns about everything that it cannot follow, which is
        # acceptable in a graph for viewing.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", TracerWarning)
        traced = trace(module, (x,), strict=False, check_trace=False)
        nodes = parse(traced.inlined_graph, traced)  # type: ignore[no-untyped-call]
    graph = GraphDef(node=nodes, versions=VersionDef(producer=22))
    return _record(graph_def=graph.SerializeToString())
