"""What a worker is told, the same for every executor, and how it gets ready to do it.

A worker decides nothing: every `auto` comes from the driver, the rows from the store's listing. It
compares its fingerprint with the driver's before it computes its first row.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from featx.base.fingerprint import differences
from featx.base.machine import num_cpus, take_cpus
from featx.config import ExecutorConfig
from featx.config.run_config import Config
from featx.errors import ConfigError, RunError
from featx.pipeline.engine_spec import EngineSpec
from featx.pipeline.run_context import RunContext, build_run_context
from featx.sources import open_source
from featx.storage import s3_client
from featx.storage.local_folder import AtomicFolder
from featx.store.heartbeat import Heartbeat, sign_name
from featx.types import Batch, Failure, LayerSpec, Listing, Part, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine.engine import Engine
    from featx.layers.projection import ChosenLayers


class Maker(Protocol):
    """Computes parts batch by batch, and makes each durable.

    Attributes:
        faint: layer -> rows that float16 hardly holds.
        seconds: busy ones of stages that not every run has.
    """

    faint: Counter[str]
    seconds: dict[str, float]

    def compute(self, engine: Engine, batch: Batch) -> Any:
        """What becomes of a batch by itself; in any thread, several at once."""

    def take(self, part: Part, batch: Batch, computed: Callable[[], Any]) -> list[Failure]:
        """Take the next batch of a part, computed as soon as that is done; its failed rows."""

    def finish_part(self) -> Callable[[], Sequence[Failure]]:
        """The part whose last batch was taken; calling what is returned makes it durable.

        What is called returns the failures of the part that is there then.
        """


class PartTask(Protocol):
    """What the workers of a run are to make, and where they commit it; travels with the order.

    Attributes:
        dtype: in which the engine gives its values.
        settings: of the fingerprint, beside those of every run.
        datasets: the names of what is computed.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def datasets(self) -> frozenset[str]: ...

    def check(self, root: Path, fingerprint: Mapping[str, Any]) -> None:
        """Raise RunError where something else was begun in the folder since this was ordered."""

    def listing(self, root: Path, num_rows: int, identity: str) -> Listing | None:
        """The rows of the run, as the folder has them; None where it has not so many."""

    def missing(self, root: Path, parts: Sequence[Part]) -> list[Part]:
        """Those of some parts that nobody has committed yet."""

    def maker(self, prepared: RunContext, root: Path, heart: Heartbeat) -> Maker:
        """What computes the parts and commits each."""


class Session(Protocol):
    """The folder that a driver holds: what is asked for, what is there, and what is missing.

    Attributes:
        lock: the descriptor that holds it.
    """

    root: Path
    disk: AtomicFolder
    lock: int

    @property
    def rows_asked(self) -> int:
        """Rows that there are in the end."""

    @property
    def rows_done(self) -> int:
        """Rows in committed parts."""

    @property
    def num_failed(self) -> int:
        """Rows in committed parts whose image failed."""

    def missing(self) -> list[Part]:
        """The parts that are still to be done, in order."""

    def committed(self, part: Part, failures: Sequence[Failure]) -> None:
        """A part is durable; its failures are noted."""

    def arrived(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Those of some parts that other processes have committed, with their failures."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that a process needs to compute parts of a run as its driver would.

    Attributes:
        root: of the store, absolute.
        driver: the name of its sign of life.
        config: of the run; the device is the worker's own.
        config_yaml: as the user gave it.
        source: the data set where it can be sent; None where the worker opens the config's.
        engine_spec: of the engine that computes.
        product: what is made.
        begun: how every `auto` was decided.
        fingerprint: of the driver, which the worker's has to equal.
        num_rows: of the listing.
        cpus: of the worker, for reading and decoding.
    """

    root: Path
    driver: str
    config: Config
    config_yaml: str
    source: Source | None
    engine_spec: EngineSpec
    product: PartTask
    begun: ResumeState
    fingerprint: Mapping[str, Any]
    num_rows: int
    cpus: int


def worker_spec(
    prepared: RunContext, session: Session, product: PartTask, config_yaml: str
) -> WorkerSpec:
    """What the workers of a run are told.

    Raises:
        ConfigError: the data set is an object that cannot be sent to another process.
    """
    config = prepared.config
    return WorkerSpec(
        root=session.root.absolute(),
        driver=sign_name(os.getpid()),
        config=replace(config, devices=None, executor=ExecutorConfig()),
        config_yaml=config_yaml,
        source=_sendable(prepared),
        engine_spec=prepared.engine_spec,
        product=product,
        begun=ResumeState(prepared.as_run().resolved, prepared.part_rows),
        fingerprint=prepared.header.fingerprint,
        num_rows=len(prepared.listing),
        cpus=config.cpus_of_worker(num_cpus()),
    )


def _sendable(prepared: RunContext) -> Source | None:
    """The data set, unless it holds what does not travel: locks and open files."""
    of_python = prepared.config.data.name == "python"
    try:
        _Travelling(io.BytesIO()).dump(prepared.source)
        return prepared.source
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        if of_python:
            raise ConfigError(
                f"the data set given as an object cannot be sent to other processes: {error}. "
                "Define its class in a module that can be imported, open files in its first read, "
                "or leave devices and executor out."
            ) from error
        return None


class _Travelling(pickle.Pickler):
    """Refuses what another process could not import."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__":
            raise pickle.PicklingError("its class is defined in the script that is run")
        return NotImplemented


class PickledWorkerSpec:
    """An order as it travels to an interpreter that may not know all folders of this one's path."""

    def __init__(self, order: WorkerSpec) -> None:
        self._path = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100 - '' too
        self._pickled = pickle.dumps(order)  # for what it names may lie in these folders

    def open(self) -> WorkerSpec:
        """The order; this interpreter knows the folders from now on."""
        sys.path[:] = [*sys.path, *(folder for folder in self._path if folder not in sys.path)]
        order: WorkerSpec = pickle.loads(self._pickled)
        return order


class _WorkerTarget:
    """What `build_run_context` asks of a purpose, answered from an order instead."""

    def __init__(self, order: WorkerSpec, source: Source, listing: Listing) -> None:
        self.dtype = order.product.dtype
        self.settings = dict(order.product.settings)
        self.folder: Path | None = order.root
        self._order = order
        self._found = source, listing

    def list_images(self) -> tuple[Source, Listing]:
        return self._found

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        return [pair for pair in chosen if pair[0].name in self._order.product.datasets]

    def begun(self, names: set[str]) -> ResumeState | None:
        return self._order.begun

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        return float("inf"), float("inf")  # the order says how many rows a part has


@contextlib.contextmanager
def worker_context(order: WorkerSpec, device: str) -> Iterator[RunContext]:
    """Everything a worker needs to compute parts, on one device.

    The driver has written to the store before, so an object store that does not answer is waited
    for.

    Raises:
        RunError: this worker would compute other values than the driver, or has no listing.
        FeatxError: model or data set are not to be had here.
    """
    with s3_client.patience():
        take_cpus(order.cpus)
        order.product.check(order.root, order.fingerprint)
        config = replace(order.config, device=device)
        source = order.source
        if source is None:
            source = open_source(config.data)
            source.listing()  # which makes it ready to read
        listing = order.product.listing(order.root, order.num_rows, order.fingerprint["listing"])
        if listing is None:
            raise RunError(
                f"{order.root} has no listing of {order.num_rows} rows that is readable."
            )
        purpose = _WorkerTarget(order, source, listing)
        with build_run_context(config, order.config_yaml, order.engine_spec, purpose) as prepared:
            if changed := differences(order.fingerprint, prepared.header.fingerprint):
                lines = [
                    f"  {key}: the driver has {was!r}, this {new!r}" for key, was, new in changed
                ]
                raise RunError(
                    "this worker would compute other values than the driver:\n" + "\n".join(lines)
                )
            yield prepared
