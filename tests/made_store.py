"""Made-up runs for the store's tests: their rows are known, so what is read can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from featx.store import layout
from featx.store.manifest import Run
from featx.store.pack import pack
from featx.store.session import StoreSession
from featx.store.writer import PartBuilder
from featx.types import Failure, LayerSpec, Listing, Part, Status, StoreHeader


def make_spec(name: str, shape: tuple[int, ...], dtype: str = "float32") -> LayerSpec:
    return LayerSpec(name, name, "output", "gem", {"p": 3.0}, shape, dtype, "float32")


def make_header(**fingerprint: Any) -> StoreHeader:
    return StoreHeader(
        fingerprint={"model": "toy", "size": [224, 224], **fingerprint},
        config="model: toy\n",
        model="toy",
        weights="random",
        weights_sha256="ab" * 32,
        transform="resize 224",
        versions={"featx": "0", "torch": "2"},
    )


def make_listing(num_rows: int) -> Listing:
    keys = np.array(sorted(b"%s/%04d.jpg" % ((b"cat", b"dog")[i % 2], i) for i in range(num_rows)))
    labels = np.arange(num_rows, dtype=np.int64) % 3 - 1
    return Listing(keys.astype("S12"), labels, ("cat", "dög"))


@dataclass(frozen=True)
class MadeRun:
    """One run with all its rows; `features` holds what the engine would hand over."""

    listing: Listing
    specs: tuple[LayerSpec, ...]
    header: StoreHeader
    part_rows: int
    codec: str
    features: Mapping[str, np.ndarray]
    failures: tuple[Failure, ...] = ()
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> layout.Grid:
        return layout.Grid(len(self.listing), self.part_rows)

    def as_run(self) -> Run:
        return Run(self.header, self.specs, self.grid, self.codec, self.resolved)

    def expected(self, name: str) -> np.ndarray:
        """What the store must give back: NaN in failed rows."""
        rows = self.features[name].copy()
        rows[[failure.row for failure in self.failures]] = np.nan
        return rows

    def status(self) -> np.ndarray:
        status = np.zeros(len(self.listing), dtype=np.uint8)
        for failure in self.failures:
            status[failure.row] = failure.status
        return status

    def session(self, root: Path) -> StoreSession:
        return StoreSession(
            root,
            self.header,
            self.specs,
            self.listing,
            self.part_rows,
            self.codec,
            self.resolved,
        )

    def builder(self, part: Part, batch: int | None = None) -> PartBuilder:
        """A part with all its rows, added in batches."""
        builder = PartBuilder(part, self.specs)
        batch = batch or len(part)
        for start in range(part.start, part.stop, batch):
            stop = min(start + batch, part.stop)
            rows = {name: values[start:stop] for name, values in self.features.items()}
            failed = [f for f in self.failures if start <= f.row < stop]
            builder.add(start, rows, failed)
        return builder

    def write(self, root: Path, parts: Iterable[int] | None = None, packed: bool = False) -> Path:
        """Commit parts, all of them if not told which, in the order given; then pack."""
        session = self.session(root)
        with session.hold():
            order = range(len(self.grid)) if parts is None else parts
            for index in order:
                session.commit(self.builder(self.grid.part(index)))
            if packed:
                pack(root)
                session.after_packing()
        return root

    def changed(self, **fingerprint: Any) -> MadeRun:
        """The same run with another fingerprint."""
        header = replace(self.header, fingerprint={**self.header.fingerprint, **fingerprint})
        return replace(self, header=header)


def make_run(
    num_rows: int = 21,
    part_rows: int = 8,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtype: str = "float32",
    codec: str = "none",
    failed: Iterable[int] = (),
    seed: int = 0,
) -> MadeRun:
    """A run with random rows; some of them failed, for reasons in turn."""
    shapes = {"flat": (5,), "map": (3, 2, 2)} if shapes is None else shapes
    rng = np.random.default_rng(seed)
    listing = make_listing(num_rows)
    reasons = [Status.MISSING, Status.DECODE_ERROR, Status.NON_FINITE]
    failures = tuple(
        Failure(
            row, bytes(listing.keys[row]), reasons[row % 3], "OSError", f"row {row}: bröken, \n 'x'"
        )
        for row in failed
    )
    return MadeRun(
        listing,
        tuple(make_spec(name, shape, dtype) for name, shape in shapes.items()),
        make_header(seed=seed),
        part_rows,
        codec,
        {name: rng.normal(size=(num_rows, *shape)).astype(dtype) for name, shape in shapes.items()},
        failures,
    )


def dataset_digests(path: Path) -> dict[str, str]:
    """sha256 of the values of every dataset of a file, with shape and type."""
    found = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            text = f"{item.shape} {item.dtype} ".encode() + np.ascontiguousarray(item[()]).tobytes()
            found[name] = hashlib.sha256(text).hexdigest()

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


def temporary_files(root: Path) -> list[Path]:
    return sorted(root.rglob(".tmp-*"))
