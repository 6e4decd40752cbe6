"""A store being written: begun or gone on with, part by part, until it is whole.

The descriptor (featx.json) is written first and fixes the run: its settings, its datasets, its
rows per part. The existence of a part's file is the record that the part is done.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from featx.errors import StoreError, StoreMismatchError
from featx.fingerprint import differences, digest
from featx.store import layout
from featx.store.commit import TEMPORARY, Disk, exclusive_lock
from featx.store.files import open_hdf5
from featx.store.writer import PartBuilder, read_failures
from featx.types import Failure, LayerSpec, Listing, Part, StoreHeader

logger = logging.getLogger(__name__)

_NEEDED = ("fingerprint", "fingerprint_sha256", "num_rows", "part_rows", "codec", "layers")


def listing_digest(listing: Listing) -> str:
    """sha256 over keys, labels and classes: the identity of the rows and their order."""
    sha = hashlib.sha256(f"{listing.keys.dtype.itemsize} {len(listing)}".encode())
    sha.update(listing.keys.tobytes())
    sha.update(listing.labels.astype("<i8").tobytes())
    sha.update(json.dumps(listing.classes).encode())
    return sha.hexdigest()


def read_descriptor(root: Path) -> dict[str, Any] | None:
    """featx.json of a store, or None where no store was begun.

    Raises:
        StoreError: it is there and cannot be read, or is of a newer format.
    """
    path = root / layout.DESCRIPTOR
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    try:
        descriptor = json.loads(text)
        version = int(descriptor["featx_format"])
        missing = set(_NEEDED) - set(descriptor)
        if version <= layout.FORMAT and missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path} is damaged ({error}). If the store can go, start anew with overwrite=true; "
            "its parts still open in h5py."
        ) from error
    if version > layout.FORMAT:
        raise StoreError(
            f"{path} has store format {version}, this featx reads up to {layout.FORMAT}. "
            "Upgrade featx: pip install -U featx."
        )
    assert isinstance(descriptor, dict)
    return descriptor


class StoreSession:
    """One process's turn at writing one store, under an exclusive lock."""

    def __init__(
        self,
        root: Path,
        header: StoreHeader,
        specs: Sequence[LayerSpec],
        listing: Listing,
        part_rows: int,
        codec: str,
        resolved: Mapping[str, Any],
    ) -> None:
        self.root = root
        self.header = header
        self.specs = tuple(specs)
        self.listing = listing
        self.grid = layout.Grid(len(listing), part_rows)
        self.codec = codec
        self.resolved = dict(resolved)
        self.disk = Disk(root)
        self.failures: list[Failure] = []
        self._done: set[int] = set()
        self.packed = False

    @contextlib.contextmanager
    def hold(self, overwrite: bool = False) -> Iterator[StoreSession]:
        """Lock the store, begin it or check that it is the same run, and find what is done.

        Raises:
            StoreLockedError: another process is writing it.
            StoreMismatchError: it was begun with other settings.
        """
        self.disk.make_folder(self.root)
        with exclusive_lock(self.root / layout.LOCK):
            if overwrite:
                self._clear()
            self._begin()
            self._survey()
            yield self

    def missing(self) -> list[Part]:
        """The parts that are still to be done, in order."""
        return [self.grid.part(i) for i in range(len(self.grid)) if i not in self._done]

    @property
    def rows_done(self) -> int:
        """Rows in committed parts."""
        return sum(len(self.grid.part(i)) for i in self._done)

    def commit(self, builder: PartBuilder) -> None:
        """Make one part durable; from here on no crash takes it away."""
        data = builder.build(self.header, self.listing, self.grid, self.codec)
        path = self._part_path(builder.part.index)
        if not self.disk.publish(path, data) and (problem := self._problem(path, builder.part)):
            raise StoreError(f"{path} appeared meanwhile and does not count: {problem}.")
        self._done.add(builder.part.index)
        self.failures.extend(builder.failures)
        if builder.failures:
            rows = csv_rows(sorted(builder.failures, key=lambda failure: failure.row))
            self.disk.append(self.root / layout.FAILURES_CSV, rows)

    def write_summary(self, entry: Mapping[str, Any]) -> None:
        """summary.json: this run's figures on top, the earlier runs' under `runs`."""
        path = self.root / layout.SUMMARY
        try:
            runs = json.loads(path.read_bytes()).get("runs", [])
        except (OSError, ValueError):
            runs = []
        text = json.dumps({**entry, "runs": [*runs, dict(entry)]}, indent=2) + "\n"
        self.disk.replace(path, text.encode())

    def write_config(self, yaml_text: str) -> None:
        """.hydra/config.yaml: the configuration of the last run into this store."""
        folder = self.root / ".hydra"
        self.disk.make_folder(folder)
        self.disk.replace(folder / "config.yaml", yaml_text.encode())

    def write_failures(self) -> None:
        """failures.csv anew, in order of rows, from what the parts hold."""
        ordered = sorted(self.failures, key=lambda failure: failure.row)
        text = "row,key,status,error,message\r\n" + csv_rows(ordered)
        self.disk.replace(self.root / layout.FAILURES_CSV, text.encode("utf-8", "surrogateescape"))

    def part_bytes(self) -> int:
        """Bytes of all committed parts on disk."""
        return sum(self._part_path(index).stat().st_size for index in self._done)

    def drop_parts(self) -> None:
        """Delete the parts, and their folder where nothing else lies in it.

        Only after the packed file was published.
        """
        assert self.packed
        self._remove_parts()

    def _part_path(self, index: int) -> Path:
        return self.root / layout.PARTS / layout.part_name(index)

    def _descriptor(self) -> dict[str, Any]:
        return {
            "featx_format": layout.FORMAT,
            "fingerprint": dict(self.header.fingerprint),
            "fingerprint_sha256": digest(self.header.fingerprint),
            "num_rows": len(self.listing),
            "part_rows": self.grid.part_rows,
            "codec": self.codec,
            "layers": [asdict(spec) for spec in self.specs],
            "resolved": self.resolved,
            "model": self.header.model,
            "weights": self.header.weights,
            "weights_sha256": self.header.weights_sha256,
            "transform": self.header.transform,
            "versions": dict(self.header.versions),
        }

    def _begin(self) -> None:
        text = json.dumps(self._descriptor(), indent=2) + "\n"
        before = read_descriptor(self.root)
        if before is None and not self.disk.publish(self.root / layout.DESCRIPTOR, text.encode()):
            before = read_descriptor(self.root)  # where locks do not work: somebody was first
        if before is not None:
            refuse_difference(self.root, before["fingerprint"], self.header.fingerprint)
            fixed, now = ("num_rows", "part_rows", "codec", "layers"), json.loads(text)
            refuse_difference(self.root, *({key: d[key] for key in fixed} for d in (before, now)))
        listing = self.root / layout.LISTING
        if listing.exists() and (problem := self._listing_problem(listing)):
            self._quarantine(listing, problem)
        if not listing.exists():
            self.disk.publish(listing, listing_file(self.listing))
        self.disk.make_folder(self.root / layout.PARTS)

    def _survey(self) -> None:
        """Find the committed parts, read their failures, and clear what a crash left behind."""
        packed = self.root / layout.PACKED
        parts = self.root / layout.PARTS
        for folder in (self.root, parts, self.root / ".hydra"):
            for leftover in folder.glob(f"{TEMPORARY}*"):
                self.disk.remove(leftover)
        if packed.exists():
            whole = Part(0, 0, len(self.listing))
            problem = self._problem(packed, whole) or self._read_failures(packed)
            if problem is None:
                self._done = set(range(len(self.grid)))
                self.packed = True
                self.drop_parts()
            else:
                self._quarantine(packed, problem)
        if not self.packed:
            expected = {layout.part_name(i): i for i in range(len(self.grid))}
            for path in sorted(parts.glob(layout.PART_GLOB)):
                index = expected.get(path.name)
                if index is None:
                    self._quarantine(path, "there is no such part in this run")
                    continue
                problem = self._problem(path, self.grid.part(index)) or self._read_failures(path)
                if problem is None:
                    self._done.add(index)
                else:
                    self._quarantine(path, problem)
        self.write_failures()

    def _problem(self, path: Path, part: Part) -> str | None:
        """Why a file cannot count as rows [start, stop) of this run, or None."""
        try:
            with open_hdf5(path) as file:
                if file.attrs["fingerprint"] != digest(self.header.fingerprint):
                    return "it is of another run"
                if int(file.attrs.get("start", 0)) != part.start:
                    return "it holds the rows of another part"
                if path.name == layout.PACKED and not file.attrs["complete"]:
                    return "it is not complete"
                for name in (layout.KEY, layout.LABEL, layout.STATUS):
                    if file[name].shape != (len(part),):
                        return f"dataset {name} has shape {file[name].shape}"
                if not np.array_equal(
                    file[layout.KEY][:], self.listing.keys[part.start : part.stop]
                ):
                    return "its keys are not those of the listing"
                for spec in self.specs:
                    dataset = file[f"{layout.FEATURES}/{spec.name}"]
                    if dataset.shape != (len(part), *spec.shape) or dataset.dtype != spec.dtype:
                        return f"dataset {spec.name} has shape {dataset.shape}, {dataset.dtype}"
                return None
        except layout.UNREADABLE as error:
            return _damage(path, error)

    def _read_failures(self, path: Path) -> str | None:
        """Take over the failures of a committed file; why that cannot be, or None."""
        try:
            with open_hdf5(path) as file:
                self.failures.extend(read_failures(file))
        except layout.UNREADABLE as error:
            return _damage(path, error)
        return None

    def _quarantine(self, path: Path, problem: str) -> None:
        target = self.disk.set_aside(path, self.root / layout.QUARANTINE)
        logger.warning("%s does not count: %s. Moved to %s.", path, problem, target)

    def _listing_problem(self, path: Path) -> str | None:
        """Why a file cannot count as the listing of this run, or None."""
        try:
            with open_hdf5(path) as file:
                columns = {layout.KEY: self.listing.keys, layout.LABEL: self.listing.labels}
                for name, values in columns.items():
                    if file[name].shape != values.shape or not np.array_equal(file[name], values):
                        return f"its dataset {name} is not that of this run"
        except layout.UNREADABLE as error:
            return _damage(path, error)
        return None

    def _clear(self) -> None:
        """Delete a store, its descriptor last; in a folder that is no store, nothing."""
        ours = (layout.DESCRIPTOR, layout.LISTING, layout.PACKED)
        if not any((self.root / name).exists() for name in ours):
            return
        self._remove_parts()
        names = (layout.PACKED, layout.FAILURES_CSV, layout.SUMMARY, layout.LISTING)
        for name in (*names, ".hydra", layout.DESCRIPTOR):
            self.disk.remove(self.root / name)

    def _remove_parts(self) -> None:
        parts = self.root / layout.PARTS
        for pattern in (layout.PART_GLOB, f"{TEMPORARY}*"):
            for path in parts.glob(pattern):
                self.disk.remove(path)
        with contextlib.suppress(OSError):  # not ours alone, or not there
            parts.rmdir()


def _damage(path: Path, error: Exception) -> str:
    """The problem of a damaged file; raises StoreError where only the system could not read it."""
    if not layout.is_damage(error):
        raise StoreError(
            f"cannot read {path}: {error}. When it can be read, give the same command again."
        ) from error
    return f"it cannot be read ({error})"


def refuse_difference(root: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StoreMismatchError where two fingerprints differ, naming the keys and both values."""
    changed = differences(before, now)
    if not changed:
        return
    lines = [f"  {key}: the store has {old!r}, now {new!r}" for key, old, new in changed]
    raise StoreMismatchError(
        f"{root} was begun with other settings:\n" + "\n".join(lines) + "\n"
        "Features of both would be mixed. Give the old settings to go on, out=DIR for a new "
        "store, or overwrite=true to delete this one."
    )


def csv_rows(failures: Sequence[Failure]) -> str:
    """Lines of failures.csv: row, key, status name, error type, message."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for failure in failures:
        key = failure.key.decode("utf-8", "surrogateescape")
        writer.writerow([failure.row, key, failure.status.label, failure.error, failure.message])
    return buffer.getvalue()


def listing_file(listing: Listing) -> memoryview:
    """samples.h5 as bytes: /key, /label and /classes of all rows."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=layout.LIBVER) as file:
        file.attrs["featx_format"] = layout.FORMAT
        file[layout.KEY] = listing.keys
        file[layout.LABEL] = listing.labels
        file[layout.CLASSES] = layout.text_array(listing.classes)
    return buffer.getbuffer()
