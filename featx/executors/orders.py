"""What a worker is told, and how it does parts: the same for every executor.

A worker decides nothing: every `auto` comes from the driver, the rows from the store's listing. It
compares its fingerprint with the driver's before it computes its first row.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from featx.config import Config
from featx.data import open_source
from featx.errors import ConfigError, RunError
from featx.features import FeatureWork
from featx.fingerprint import differences
from featx.loop import Figures, Interrupted, peak_memory_mib, refuse_failures, run_parts
from featx.machine import take_cpus
from featx.options import ExecutorConfig
from featx.prepare import Prepared, prepare
from featx.progress import Unseen, bottleneck
from featx.store.commit import Disk
from featx.store.heartbeat import Heartbeat
from featx.store.listing import read_listing
from featx.store.manifest import Manifest, read_manifest
from featx.store.part_files import publish_part
from featx.store.session import StoreSession
from featx.store.writer import PartBuilder
from featx.types import Batch, Begun, Failure, LayerSpec, Listing, Part, Source


@dataclass(frozen=True)
class Order:
    """All that a process needs to compute parts of a run as its driver would.

    Attributes:
        root: of the store, absolute.
        config: of the run; the device is the worker's own.
        config_yaml: as the user gave it.
        source: the data set where it can be sent; None where the worker opens the config's.
        manifest: featx.json.
        layers: names of the datasets to compute.
        begun: how every `auto` was decided.
        fingerprint: of the driver, which the worker's has to equal.
        num_rows: of the listing.
        cpus: of the worker, for reading and decoding.
    """

    root: Path
    config: Config
    config_yaml: str
    source: Source | None
    manifest: bytes
    layers: frozenset[str]
    begun: Begun
    fingerprint: Mapping[str, Any]
    num_rows: int
    cpus: int


@dataclass(frozen=True)
class Done:
    """A part that is durable now.

    Attributes:
        failures: its rows that failed.
        faint: layer -> rows that float16 hardly holds.
        seconds: from its first batch to its commit.
        waited: seconds of them in which the device waited for images.
    """

    part: Part
    failures: Sequence[Failure]
    faint: Mapping[str, int]
    seconds: float
    waited: float


@dataclass
class Labour:
    """What a worker, or all of them together, took for its parts.

    Attributes:
        seconds: stage -> busy ones.
        bytes_read: of encoded images.
        peak_memory_mib: of the largest process.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    peak_memory_mib: int = 0

    def add(self, other: Labour) -> None:
        """Take over what another worker, or this one in another turn, took."""
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.bytes_read += other.bytes_read
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)


@dataclass
class Outcome:
    """What came of a run that was spread.

    Attributes:
        faint: layer -> rows that float16 hardly holds.
        peak_memory_mib: of the largest worker.
    """

    figures: Figures
    faint: Counter[str]
    peak_memory_mib: int


_STAGES = ("read", "decode", "wait", "model", "copy", "write")


@dataclass
class Harvest:
    """What the workers of a run did so far, as their driver counts it.

    Args:
        rows_to_do: that they have to compute in all.

    Attributes:
        begun: when the first worker was ready, by time.perf_counter; 0 before that.
        ended: when the last part was committed.
        faint: layer -> rows that float16 hardly holds.
        labour: of workers that came to their end.
    """

    rows_to_do: int
    begun: float = 0.0
    ended: float = 0.0
    rows: int = 0
    faint: Counter[str] = field(default_factory=Counter)
    labour: Labour = field(default_factory=Labour)

    def begin(self) -> None:
        """A worker is ready: from here on the time counts."""
        self.begun = self.begun or time.perf_counter()

    def add(self, done: Done) -> None:
        """One more part is durable."""
        self.begin()
        self.ended = time.perf_counter()
        self.rows += len(done.part)
        self.faint.update(done.faint)

    def refuse_failures(self, order: Order, session: StoreSession) -> None:
        """Raise TooManyFailuresError where going on would only give more of the same."""
        left = self.rows_to_do - self.rows
        left_s = left * (self.ended - self.begun) / max(1, self.rows)
        rows = session.rows_asked
        refuse_failures(order.config, session.num_failed, rows - left, rows, left_s)

    def outcome(self, num_workers: int, order: Order) -> Outcome:
        """The figures of the run, when it is done."""
        seconds = {stage: self.labour.seconds.get(stage, 0.0) for stage in _STAGES}
        took = self.ended - self.begun
        if not self.rows or took <= 0:
            return Outcome(Figures(seconds, None, 0, None), self.faint, 0)
        device = str(order.fingerprint["device"])
        sentence = bottleneck(seconds, took * num_workers, order.cpus, device)
        figures = Figures(seconds, self.rows / took, self.labour.bytes_read, sentence)
        return Outcome(figures, self.faint, self.labour.peak_memory_mib)


def order_of(prepared: Prepared, session: StoreSession, config_yaml: str, cpus: int) -> Order:
    """What the workers of a run are told; they get `cpus` CPUs each.

    Raises:
        ConfigError: the data set is an object that cannot be sent to another process.
    """
    config = prepared.config
    asked = prepared.as_run()
    return Order(
        root=session.root.absolute(),
        config=replace(config, devices=None, executor=ExecutorConfig()),
        config_yaml=config_yaml,
        source=_sendable(prepared),
        manifest=session.manifest.to_json(),
        layers=asked.names,
        begun=Begun(asked.resolved, asked.grid.part_rows),
        fingerprint=prepared.header.fingerprint,
        num_rows=len(prepared.listing),
        cpus=cpus,
    )


def _sendable(prepared: Prepared) -> Source | None:
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


class _Ordered:
    """What `prepare` asks of a store, answered from an order instead."""

    def __init__(self, order: Order, source: Source, listing: Listing) -> None:
        self.dtype = order.config.dtype
        self.settings = {"dtype": order.config.dtype, "codec": order.config.codec}
        self.folder: Path | None = order.root
        self._order = order
        self._found = source, listing

    def list_images(self) -> tuple[Source, Listing]:
        return self._found

    def unfinished(self, listing: Listing, chosen: list[Any]) -> list[Any]:
        return [pair for pair in chosen if pair[0].name in self._order.layers]

    def begun(self, names: set[str]) -> Begun | None:
        return self._order.begun

    def part_limits(
        self, engine: Any, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        return float("inf"), float("inf")  # the order says how many rows a part has


@contextlib.contextmanager
def prepared_as_ordered(order: Order, device: str) -> Iterator[Prepared]:
    """Everything a worker needs to compute parts, on one device.

    Raises:
        RunError: this worker would compute other values than the driver, or has no listing.
        FeatxError: model or data set are not to be had here.
    """
    take_cpus(order.cpus)
    if read_manifest(order.root) != Manifest.from_json(order.manifest, order.root):
        raise RunError(f"{order.root} was begun anew or went on otherwise since this was ordered.")
    config = replace(order.config, device=device)
    source = order.source
    if source is None:
        source = open_source(config.data)
        source.listing()  # which makes it ready to read
    listing = read_listing(order.root, order.num_rows, order.fingerprint["listing"])
    if listing is None:
        raise RunError(f"{order.root} has no listing of {order.num_rows} rows that is readable.")
    purpose = _Ordered(order, source, listing)
    with prepare(config, order.config_yaml, purpose) as prepared:
        # A listing from the store has no marks; its rows are compared all the same.
        marks = {"data.marks": order.fingerprint.get("data.marks")}
        now = {**prepared.header.fingerprint, **(marks if marks["data.marks"] else {})}
        if changed := differences(order.fingerprint, now):
            lines = [f"  {key}: the driver has {was!r}, this {new!r}" for key, was, new in changed]
            raise RunError(
                "this worker would compute other values than the driver:\n" + "\n".join(lines)
            )
        yield prepared


class PartWork(FeatureWork):
    """Parts of an order, one after the other, each committed and told.

    Args:
        prepared: as ordered.
        order: of the driver.
        tell: is given every part that is durable; called in the thread that commits.
        heart: is told what part is computed.
        stopping: is set when the run is to end after the batch; None where nobody sets it.

    Attributes:
        part: whose batch is being computed; None between two batches.
    """

    def __init__(
        self,
        prepared: Prepared,
        order: Order,
        tell: Callable[[Done], None],
        heart: Heartbeat,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(prepared, self._publish, heart)
        self._stopping = stopping or threading.Event()
        self.part: Part | None = None
        self.rows_asked = order.num_rows
        self.rows_done = 0
        self.rows_failed = 0  # the driver knows of all workers', and ends the run
        self._prepared = prepared
        self._manifest = Manifest.from_json(order.manifest, order.root)
        self._disk = Disk(order.root)
        self._tell = tell
        self._parts: Iterable[Part] = ()
        self._unseen = Unseen()
        self._begun = 0.0
        self._open: dict[int, tuple[float, float, Counter[str]]] = {}

    def do(self, parts: Iterable[Part]) -> Labour:
        """Compute and commit parts as they come.

        Raises:
            Interrupted: a signal asked for the end; what was whole is committed.
        """
        self._parts = parts
        figures = run_parts(self._prepared, self, progress=self._unseen)
        return Labour(figures.seconds, figures.bytes_read, peak_memory_mib())

    def missing(self) -> Iterable[Part]:
        return self._parts

    def take(self, part: Part, batch: Batch) -> list[Failure]:
        if self._stopping.is_set():
            raise Interrupted(signal.SIGTERM)
        if batch.start == part.start:
            self._begun = time.perf_counter()
        self.part = part
        failures = super().take(part, batch)
        self.part = None
        return failures

    def hand_over(self) -> Callable[[], None]:
        assert self._builder is not None, "no batch of a part was taken"
        waited = self._unseen.take_waited()
        self._open[self._builder.part.index] = self._begun, waited, self.faint
        self.faint = Counter()
        return super().hand_over()

    def _publish(self, builder: PartBuilder) -> None:
        failures = publish_part(self._disk, builder, self._manifest, self._prepared.listing)
        self.rows_done += len(builder.part)
        begun, waited, faint = self._open.pop(builder.part.index)
        seconds = time.perf_counter() - begun
        self._tell(Done(builder.part, failures, +faint, seconds, waited))


def rows_text(parts: Sequence[Part]) -> str:
    """Parts and their rows, for messages: 'part 3 (rows 24 to 31)'."""
    if not parts:
        return "no part"
    if len(parts) > 2:
        return ", ".join(rows_text([part]) for part in parts[:2]) + f" and {len(parts) - 2} more"
    return ", ".join(f"part {part.index} (rows {part.start} to {part.stop - 1})" for part in parts)
