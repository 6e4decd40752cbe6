"""Job folder: what the driver of a run and its workers share beside the store.

It holds the worker spec, reports of workers, and claims. A worker decides nothing: every `auto`
comes from the driver, the rows from the listing of the store.

A claim is a file that exists once for each part, so the first worker that creates it computes the
part; it contains the number of the worker. A worker that is lost is replaced by one whose number is
larger by the number of workers: both have the same place, so the replacement finds the parts that
the lost one had claimed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from featx.base import num_cpus
from featx.config import Config, ExecutorConfig
from featx.errors import ConfigError
from featx.pipeline.output import AnyOutput, Session
from featx.pipeline.run_context import EngineSpec, RunContext
from featx.storage import open_folder
from featx.store import content_tags_digest, heartbeat_name, layout
from featx.types import Json, Part, ResumeState, Source

SPEC = "worker-spec.pkl"
"""Name of the file with the worker spec."""

CLAIMS = "claims"
"""Name of the folder of all claims."""

_LIST_S = 5.0
"""Seconds for which a worker relies on its last look at the claims of the others."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a process needs to compute parts of a run with the same values as the driver.

    An executor sets the attributes from `folder` on.

    Attributes:
        driver: name of the heartbeat file of the driver.
        config: config of the run; each worker puts its own device into it.
        source: data set, or None if it cannot be pickled and the worker opens that of the config.
        content_tags: digest of the content tags that this data set must have; None if it has none.
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
    content_tags: str | None
    engine_spec: EngineSpec
    output: AnyOutput
    resume_state: ResumeState
    fingerprint: Json
    num_rows: int
    cpus: int
    parts: Sequence[Part]
    num_workers: int = 1
    folder: Path = Path()
    kind: str = "worker"
    outlives_driver: bool = False


def worker_spec(
    context: RunContext, session: Session, output: AnyOutput, config_yaml: str
) -> WorkerSpec:
    """Create the worker spec of a run, without what its executor adds."""
    config = context.config
    source: Source | None = context.source
    try:
        _SourcePickler(io.BytesIO()).dump(source)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        # It holds locks or open files, for example.
        if config.data.name == "python":
            raise ConfigError(
                f"the data set given as an object cannot be sent to other processes: {error}. "
                "Define its class in a module that can be imported, open files in its first read, "
                "or leave executor and its options out."
            ) from error
        source = None  # workers open it themselves
    return WorkerSpec(
        root=session.root.absolute(),
        driver=heartbeat_name(os.getpid()),
        config=replace(config, executor=ExecutorConfig()),
        config_yaml=config_yaml,
        source=source,
        content_tags=content_tags_digest(context.listing) if source is None else None,
        engine_spec=context.engine_spec,
        output=output,
        resume_state=ResumeState(
            context.as_run().resolved, context.header.fingerprint, context.part_rows
        ),
        fingerprint=context.header.fingerprint,
        num_rows=len(context.listing),
        cpus=config.cpus_of_worker(num_cpus()),
        parts=session.missing(),
    )


class _SourcePickler(pickle.Pickler):
    """Pickler that refuses classes of the running script, which other processes cannot import."""

    def reducer_override(self, value: object) -> Any:
        """Refuse classes and functions of __main__; all other values are pickled as usual."""
        if getattr(value, "__module__", None) == "__main__":
            raise pickle.PicklingError("its class is defined in the script that is run")
        return NotImplemented


def dump_spec(spec: WorkerSpec) -> bytes:
    """Pickle a worker spec, with the current folder and the import path of the driver."""
    path = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100 - '' too
    return pickle.dumps((Path.cwd(), path, pickle.dumps(spec)))


def read_spec(folder: Path) -> WorkerSpec:
    """Read the worker spec that the driver has written to the folder of the workers.

    The current folder and the import path of the driver become those of this process: its
    interpreter may lack folders of that path, which unpickling needs.
    """
    current, path, pickled = pickle.loads((folder / SPEC).read_bytes())
    # Relative paths of the command start there: an actor of Ray starts where `ray start` was given.
    # A machine without this folder computes only if the command's paths are absolute.
    with contextlib.suppress(OSError):
        os.chdir(current)
    sys.path[:] = [*sys.path, *(each for each in path if each not in sys.path)]
    spec: WorkerSpec = pickle.loads(pickled)
    return spec


@dataclass(frozen=True)
class WorkerError:
    """Exception that ended a worker: class, message, traceback, and the parts in progress."""

    kind: str
    text: str
    trace: str
    where: str


@dataclass
class WorkerReport:
    """Report of a worker: first without its measurements when it is ready, at last with them.

    Attributes:
        underflow_rows: layer -> number of underflow rows in these parts.
        seconds: stage -> busy seconds; without parts that were interrupted, as for what follows.
        decoder_warnings: warning of a decoder -> number of images.
        ended_by: what ended it before all was done: TIME_LIMIT or the name of a signal.
        activity: what it did until then, as text.
    """

    num_parts: int = 0
    underflow_rows: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    peak_memory_mib: int = 0
    decoder_warnings: dict[str, int] = field(default_factory=dict)
    ended_by: str | None = None
    activity: str = ""
    error: WorkerError | None = None

    def add(self, other: WorkerReport) -> None:
        """Add the measurements of another worker, or of further parts of the same one."""
        for name in ("underflow_rows", "seconds", "decoder_warnings"):
            values = getattr(self, name)
            for key, value in getattr(other, name).items():
                values[key] = values.get(key, 0) + value
        self.num_parts += other.num_parts
        self.bytes_read += other.bytes_read
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> WorkerReport | None:
        """Read a report; None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            values: dict[str, Any] = json.loads(path.read_bytes())
            error = values.pop("error")
            return cls(**values, error=error and WorkerError(**error))
        return None


def shared_folder(options: ExecutorConfig, session: Session) -> Path:
    """Folder in which the pool of a run makes its own one; all machines see it."""
    if options.shared_folder is None:
        return session.root.absolute() / layout.JOBS
    folder = Path(options.shared_folder).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"executor.folder={options.shared_folder}: {error.strerror}. It holds what tasks share "
            "and their logs; choose a folder that all machines can write to."
        ) from error
    return folder


def ready_path(spec: WorkerSpec, number: int) -> Path:
    return spec.folder / f"ready-{number}.json"


def result_path(spec: WorkerSpec, number: int) -> Path:
    return spec.folder / f"result-{number}.json"


def inherited_parts(spec: WorkerSpec, number: int, missing: Iterable[Part]) -> list[Part]:
    """Those of some missing parts that a worker or one before it at its place has claimed.

    They are in the order in which it computes them.
    """
    indices = {part.index for part in missing} & _claimed_indices(spec)
    claimed = [part for part in _parts_in_order(spec, number) if part.index in indices]
    owners = [_owner(spec, part) for part in claimed]
    return [
        part
        for part, owner in zip(claimed, owners, strict=True)
        if owner is not None and (owner - number) % spec.num_workers == 0
    ]


def release_parts(spec: WorkerSpec, parts: Iterable[Part]) -> None:
    """Delete the claims of some parts, so that any worker may claim them."""
    for part in parts:
        open_folder(spec.folder).remove(_claim_path(spec, part))


class PartClaims:
    """Parts that a worker may still claim."""

    def __init__(self, spec: WorkerSpec, number: int) -> None:
        self._spec = spec
        self._number = number
        self._disk = open_folder(spec.folder)
        self._order = _parts_in_order(spec, number)
        self._listed_at = 0.0

    def has_unclaimed(self) -> bool:
        """Look at the store and the claims; return whether a missing part is not claimed."""
        claimed = _claimed_indices(self._spec)
        missing = self._spec.output.uncommitted(self._order)
        self._order = [part for part in missing if part.index not in claimed]
        self._listed_at = time.monotonic()
        return bool(self._order)

    def parts(self) -> Iterator[Part]:
        """Claim parts and yield them, at least one if any is left; ends early when few are left.

        The loader reads ahead across these parts. The last ones are for workers without a part.
        """
        while self._order:
            if time.monotonic() - self._listed_at > _LIST_S and not self.has_unclaimed():
                return
            part = self._order.pop(0)
            is_new = self._disk.create(_claim_path(self._spec, part), str(self._number))
            # An object store may have taken a claim whose answer was lost.
            if is_new or _owner(self._spec, part) == self._number:
                yield part
                if len(self._order) <= self._spec.num_workers:
                    return
            else:
                self.has_unclaimed()  # another worker is at the same rows


def _parts_in_order(spec: WorkerSpec, number: int) -> list[Part]:
    """Parts in the order of one worker: its own share first, so that neighbours stay together."""
    start = number % spec.num_workers * len(spec.parts) // spec.num_workers
    return [*spec.parts[start:], *spec.parts[:start]]


def _claimed_indices(spec: WorkerSpec) -> set[int]:
    """Indices of the parts that are claimed, also of those that are committed."""
    return {int(path.name) for path in (spec.folder / CLAIMS).glob("[0-9]*")}


def _claim_path(spec: WorkerSpec, part: Part) -> Path:
    return spec.folder / CLAIMS / str(part.index)


def _owner(spec: WorkerSpec, part: Part) -> int | None:
    """Number of the worker that has claimed a part; None if that is not written yet."""
    with contextlib.suppress(OSError, ValueError):
        return int(_claim_path(spec, part).read_bytes())
    return None
