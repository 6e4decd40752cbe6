"""Worker spec: what a worker receives from its driver.

A worker decides nothing: every `auto` comes from the driver, the rows from the listing of the
store.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featx.base import num_cpus
from featx.config import Config, ExecutorConfig
from featx.errors import ConfigError
from featx.pipeline.output import Output
from featx.pipeline.output import Session as Session
from featx.pipeline.run_context import EngineSpec, RunContext
from featx.store import heartbeat_name
from featx.types import Part, ResumeState, Source


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a process needs to compute parts of a run with the same values as the driver.

    An executor sets the attributes from `folder` on.

    Attributes:
        driver: name of the heartbeat file of the driver.
        config: config of the run; each worker puts its own device into it.
        source: data set, or None if it cannot be pickled and the worker opens that of the config.
        output: what is computed and where it is committed, as `Output.for_workers` returns it.
        fingerprint: fingerprint of the driver; that of the worker must be equal.
        cpus: number of CPUs of the worker for reading and decoding.
        folder: folder that driver and workers share, for claims and reports.
        kind: what a worker is called: worker, actor or task.
        outlives_driver: whether a worker continues when its driver dies.
    """

    root: Path
    driver: str
    config: Config
    config_yaml: str
    source: Source | None
    engine_spec: EngineSpec
    output: Output[Any, Any]
    resume_state: ResumeState
    fingerprint: Mapping[str, Any]
    num_rows: int
    cpus: int
    parts: Sequence[Part]
    num_workers: int = 1
    folder: Path = Path()
    kind: str = "worker"
    outlives_driver: bool = False


def worker_spec(
    context: RunContext, session: Session, output: Output[Any, Any], config_yaml: str
) -> WorkerSpec:
    """Create the worker spec of a run, without what its executor adds."""
    config = context.config
    return WorkerSpec(
        root=session.root.absolute(),
        driver=heartbeat_name(os.getpid()),
        config=replace(config, executor=ExecutorConfig()),
        config_yaml=config_yaml,
        source=_picklable_source(context),
        engine_spec=context.engine_spec,
        output=output,
        resume_state=ResumeState(context.as_run().resolved, context.part_rows),
        fingerprint=context.header.fingerprint,
        num_rows=len(context.listing),
        cpus=config.cpus_of_worker(num_cpus()),
        parts=session.missing(),
    )


def _picklable_source(context: RunContext) -> Source | None:
    """Data set if it can be pickled, or None for one that workers can open themselves.

    A data set cannot be pickled if it holds locks or open files, for example.
    """
    is_object = context.config.data.name == "python"
    try:
        _SourcePickler(io.BytesIO()).dump(context.source)
        return context.source
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        if is_object:
            raise ConfigError(
                f"the data set given as an object cannot be sent to other processes: {error}. "
                "Define its class in a module that can be imported, open files in its first read, "
                "or leave executor and its options out."
            ) from error
        return None


class _SourcePickler(pickle.Pickler):
    """Pickler that refuses classes of the running script, which other processes cannot import."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse classes and functions of __main__; all other values are pickled as usual."""
        if getattr(value, "__module__", None) == "__main__":
            raise pickle.PicklingError("its class is defined in the script that is run")
        return NotImplemented


class PickledWorkerSpec:
    """Worker spec as bytes, with the import path of the driver.

    The interpreter of a worker may lack folders of that path, so unpickling waits until `open` has
    added them.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._path = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100 - '' too
        self._pickled = pickle.dumps(spec)

    def open(self) -> WorkerSpec:
        """Extend sys.path by the folders of the driver, and unpickle the worker spec."""
        sys.path[:] = [*sys.path, *(folder for folder in self._path if folder not in sys.path)]
        spec: WorkerSpec = pickle.loads(self._pickled)
        return spec
