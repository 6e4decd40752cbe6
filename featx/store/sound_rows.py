"""Sound rows of a damaged file: those with intact chunks in all layers of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import FeatxError
from featx.store import layout
from featx.store.chunk_table import DatasetEntry, RawBytes, find_table
from featx.store.dtypes import NAN, from_raw, raw_dtype
from featx.store.hdf5_files import (
    chunks_with_verdict,
    failures_agree,
    open_metadata,
    open_raw,
    raise_unless_damage,
    suppress_damage,
)
from featx.store.manifest import Manifest, Run, num_runs_of
from featx.store.result_files import read_failures_csv
from featx.store.row_file import PartBuilder
from featx.types import UNKNOWN_IMAGE, Array, Failure, Listing, Part, Status, with_features

_LOST_TEXT = b"lost with a damaged file"
"""Placeholder for an unknown exception or message of a failure."""


@dataclass(frozen=True)
class FoundRows:
    """Rows of one dataset of a damaged file, (n, ...) as stored.

    `good` tells whether a row agrees with the checksum of its chunk; others are meaningless.
    """

    values: Array
    good: npt.NDArray[np.bool_]

    def complete(self, other: FoundRows | None) -> FoundRows:
        """Replace bad rows by those that were read by another method."""
        shape, dtype = self.values.shape, self.values.dtype
        if other is None or (other.values.shape, other.values.dtype) != (shape, dtype):
            return self
        values = self.values.copy()
        values[~self.good] = other.values[~self.good]
        return FoundRows(values, self.good | other.good)


class DamagedFile:
    """Part or features.h5 from which every intact chunk can be read; see `open_damaged`.

    `start` is its first row in the store, and `fingerprint_sha256` None if it is unknown.
    """

    def __init__(self, path: Path, raw: RawBytes, file: h5py.File | None) -> None:
        self._path, self._raw, self._file = path, raw, file
        self._entries: dict[str, DatasetEntry] = {}
        self.fingerprint_sha256: str | None = None
        self.num_runs, self.start = 1, 0
        with suppress_damage():
            if (table := find_table(raw)) is not None:
                self._entries, header = dict(table.entries()), table.header
                self.num_runs, self.start = int(header["num_runs"]), int(header["start"])
                self.fingerprint_sha256 = str(header["fingerprint"])
        with suppress_damage():
            if self.fingerprint_sha256 is None and file is not None:
                self.fingerprint_sha256 = str(file.attrs["fingerprint"])
                self.start = int(file.attrs.get("start", 0))
                self.num_runs = num_runs_of(file)

    def rows(self, name: str, start: int, stop: int) -> FoundRows | None:
        """Read rows [start, stop) of a dataset; None if their addresses are unknown."""
        rows = None
        for read in (self._read_by_table, self._read_by_hdf5):
            with suppress_damage():
                read_rows = read(name, start, stop)
                rows = read_rows if rows is None else rows.complete(read_rows)
            if rows is not None and rows.good.all():
                break
        return rows

    def reason(self, row: int, status: int) -> tuple[Status, str, str] | None:
        """Status, exception and message of a row; None if the file does not say that it failed.

        Texts that the file has lost are those of failures.csv of its store.
        """
        try:
            reason = Status(status)
            failures = self._failures
            texts = (_LOST_TEXT, _LOST_TEXT) if failures is None else failures[row]
        except (ValueError, KeyError):
            return None
        if _LOST_TEXT in texts and row in self._recorded:
            _, label, error, message = self._recorded[row]
            if label == reason.label:
                return reason, error, message
        error, message = (text.decode("utf-8", "surrogateescape") for text in texts)
        return reason, error, message

    @cached_property
    def _recorded(self) -> dict[int, tuple[str, str, str, str]]:
        """Content of failures.csv."""
        return read_failures_csv(layout.store_root(self._path) / layout.FAILURES_CSV)

    @cached_property
    def _failures(self) -> dict[int, tuple[bytes, bytes]] | None:
        """Row -> exception and message of all failed rows, or None if the rows are unknown."""
        names = [f"{layout.FAILURES}/{name}" for name in layout.FAILURE_COLUMNS]
        with suppress_damage():
            count = self._entries[names[0]].shape[0]
            rows, errors, messages = (self._read_all_by_table(name, count) for name in names)
            if rows is None:  # the status column tells the same rows
                [num_rows] = self._entries[layout.STATUS].shape
                status = self._read_all_by_table(layout.STATUS, num_rows)
                rows = (
                    None if status is None else np.flatnonzero(~with_features(status)) + self.start
                )
            if rows is not None and len(rows) == count:
                lost = np.full(count, _LOST_TEXT)
                texts = [lost if values is None else values for values in (errors, messages)]
                return dict(
                    zip(rows.tolist(), zip(*(t.tolist() for t in texts), strict=True), strict=True)
                )
        with suppress_damage():
            if self._file is not None and failures_agree(self._file):
                rows, errors, messages = (self._file[name][:].tolist() for name in names)
                return dict(zip(rows, zip(errors, messages, strict=True), strict=True))
        return None

    def _read_all_by_table(self, name: str, count: int) -> Array | None:
        """First `count` rows of a dataset by the table, or None unless all of them are good."""
        rows = self._read_by_table(name, 0, count)
        return rows.values if rows is not None and rows.good.all() else None

    def _read_by_table(self, name: str, start: int, stop: int) -> FoundRows | None:
        entry = self._entries.get(name)
        if entry is None or stop > entry.shape[0]:
            return None
        values = np.zeros((stop - start, *entry.shape[1:]), entry.raw_dtype)
        good = np.zeros(stop - start, np.bool_)
        step = entry.chunk_rows
        for chunk in range(start // step, -(-stop // step)):
            with suppress_damage():
                if (chunk_values := entry.read_chunk(self._raw, chunk)) is None:
                    continue
                first = chunk * step
                low, high = max(start, first), min(stop, first + len(chunk_values))
                values[low - start : high - start] = chunk_values[low - first : high - first]
                good[low - start : high - start] = True
        return FoundRows(values, good)

    def _read_by_hdf5(self, name: str, start: int, stop: int) -> FoundRows | None:
        if self._file is None or stop > len(self._file[name]):
            return None
        step = self._file[name].chunks[0]
        blocks, verdicts = [], []
        for first, values, good in chunks_with_verdict(self._file, name, start // step * step):
            if first >= stop:
                break
            blocks.append(values[max(0, start - first) : stop - first])
            verdicts.append(np.full(len(blocks[-1]), good))
        return FoundRows(np.concatenate(blocks), np.concatenate(verdicts))


@contextlib.contextmanager
def open_damaged(path: Path) -> Iterator[DamagedFile]:
    """Open a file as far as it is readable; raises StoreError if it cannot be read now."""
    try:
        with contextlib.ExitStack() as stack:
            file = None
            with suppress_damage():
                file = stack.enter_context(open_metadata(path))
            raw = stack.enter_context(contextlib.closing(open_raw(path)))
            yield DamagedFile(path, raw, file)
    except FeatxError:
        raise
    except OSError as error:
        raise_unless_damage(path, error)
        raise


@dataclass(frozen=True)
class SoundRows:
    """Rows of a part in a damaged file, (n, ...) as stored.

    `good` tells which rows are sound; the features of others mean nothing. `failures` and `damaged`
    (rows of damaged images that were accepted) are among the sound rows.
    """

    part: Part
    features: dict[str, Array]
    good: npt.NDArray[np.bool_]
    images: npt.NDArray[np.uint64]
    failures: list[Failure]
    damaged: set[int]

    @classmethod
    def of_none(cls, part: Part, run: Run) -> SoundRows:
        """No row of a part is sound."""
        features = {
            spec.name: np.full((len(part), *spec.shape), NAN[spec.dtype], raw_dtype(spec.dtype))
            for spec in run.layers
        }
        images = np.full(len(part), UNKNOWN_IMAGE, np.uint64)
        return cls(part, features, np.zeros(len(part), np.bool_), images, [], set())

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Ranges of rows that are not sound: start and stop in the store."""
        edges = np.flatnonzero(np.diff(~self.good, prepend=False, append=False)) + self.part.start
        return [(first, last) for first, last in edges.reshape(-1, 2).tolist()]

    def build(self, run: Run, listing: Listing, manifest: Manifest) -> bytes:
        """Build the file of the part, all rows of which are sound."""
        builder = PartBuilder(self.part, run.layers)
        builder.add(self.part.start, self.features, self.failures, self.images, self.damaged)
        return builder.build(run, listing, manifest.to_json())


def sound_rows_of_part(
    path: Path, manifest: Manifest, part: Part, listing: Listing | None
) -> SoundRows:
    """Sound rows of a part in its own file or in features.h5; none if the file is another run's."""
    run, is_packed = manifest.run_of(part), path.name == layout.PACKED
    if listing is not None:
        with contextlib.suppress(IsADirectoryError), open_damaged(path) as file:
            if is_packed or (file.fingerprint_sha256, file.start) == (run.digest, part.start):
                return sound_rows(file, run, part, listing)
    return SoundRows.of_none(part, run)


def sound_rows(file: DamagedFile, run: Run, part: Part, listing: Listing) -> SoundRows:
    """Find the rows of a part with intact chunks in all layers; none if a layer is missing."""
    start, stop = part.start - file.start, part.stop - file.start
    features: dict[str, Array] = {}
    good = np.ones(len(part), np.bool_)
    is_nan, is_finite = np.ones(len(part), np.bool_), np.ones(len(part), np.bool_)
    for spec in run.layers:
        rows = file.rows(f"{layout.FEATURES}/{spec.name}", start, stop)
        if rows is None or rows.values.shape[1:] != tuple(spec.shape):
            return SoundRows.of_none(part, run)
        if rows.values.dtype != raw_dtype(spec.dtype):
            return SoundRows.of_none(part, run)
        features[spec.name] = rows.values
        good &= rows.good
        values = from_raw(rows.values, spec.dtype).reshape(len(part), -1)
        is_nan &= np.isnan(values).all(1)
        is_finite &= np.isfinite(values).all(1)
    good &= is_nan | is_finite
    status = np.zeros(len(part), np.uint8)
    statuses = file.rows(layout.STATUS, start, stop)
    known = np.zeros(len(part), np.bool_) if statuses is None else statuses.good
    if statuses is not None:
        status[known] = statuses.values[known]
    # Without a status, the reason of a failed row is unknown, and, where damaged images may be
    # accepted, whether the image of a row was one.
    accepts_damaged = "data.damaged" in run.header.fingerprint
    good &= known if accepts_damaged else known | is_finite
    has_features = with_features(status)
    good &= ~(is_nan & has_features)
    if file.num_runs == 1:
        # With several runs, a row may have failed in another run and have values in this one.
        good &= ~(is_finite & ~has_features)
    failures = []
    for index in np.flatnonzero(good & is_nan).tolist():
        row = part.start + index
        failed = file.reason(row, int(status[index]))
        if failed is None:
            good[index] = False
        else:
            failures.append(Failure(row, bytes(listing.keys[row]), *failed))
    images = np.full(len(part), UNKNOWN_IMAGE, np.uint64)
    checksums = file.rows(layout.IMAGE_CHECKSUM, start, stop)
    if checksums is not None:
        images[checksums.good] = checksums.values[checksums.good]
    damaged = np.flatnonzero(good & (status == Status.IMAGE_DAMAGED)) + part.start
    return SoundRows(part, features, good, images, failures, set(damaged.tolist()))
