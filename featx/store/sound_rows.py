"""Sound rows of a damaged file: those with intact chunks in all layers of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from featx.errors import FeatxError
from featx.store import layout
from featx.store.chunk_table import LOST_TEXT, DamagedFile
from featx.store.dtypes import from_raw, nan, raw_dtype
from featx.store.hdf5_files import raise_unless_damage
from featx.store.listing import listing_identity
from featx.store.manifest import Manifest, Run
from featx.store.part_builder import PartBuilder
from featx.store.result_files import read_failures_csv
from featx.types import UNKNOWN_IMAGE, Array, Failure, Listing, Part, Status, with_features


def matches_manifest(listing: Listing | None, manifest: Manifest) -> TypeGuard[Listing]:
    """Return whether the manifest allows that a listing is the one that the store was made with."""
    return listing is not None and manifest.listing_identity in (None, listing_identity(listing))


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
        features = {
            spec.name: np.full((len(part), *spec.shape), nan(spec.dtype), raw_dtype(spec.dtype))
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
) -> SoundRows | None:
    """Rows of a part in its own file; None if the file or the listing is another run's."""
    if listing is None:
        return None
    run = manifest.run_of(part)
    with contextlib.suppress(IsADirectoryError), open_damaged(path) as file:
        if file.fingerprint_sha256 == run.digest and file.start == part.start:
            reasons = Reasons(file, path.parent.parent)
            return sound_rows(file, run, part, listing, reasons)
    return None


@contextlib.contextmanager
def open_damaged(path: Path) -> Iterator[DamagedFile]:
    """Open a damaged file; raises StoreError if it cannot be read now."""
    try:
        with DamagedFile.open(path) as file:
            yield file
    except FeatxError:
        raise
    except OSError as error:
        raise_unless_damage(path, error)
        raise


class Reasons:
    """Why rows of a damaged file failed: as the file says, or else failures.csv of its store."""

    def __init__(self, file: DamagedFile, root: Path) -> None:
        self._found = file.failures()
        is_lost = self._found is None or any(LOST_TEXT in texts for texts in self._found.values())
        self._recorded = read_failures_csv(root / layout.FAILURES_CSV) if is_lost else {}

    def of(self, row: int, status: int) -> tuple[Status, str, str] | None:
        """Status, exception and message of a row; None if the file does not say that it failed."""
        try:
            reason = Status(status)
        except ValueError:
            return None
        if self._found is not None and row not in self._found:
            return None
        texts = (LOST_TEXT, LOST_TEXT) if self._found is None else self._found[row]
        _, label, *recorded = self._recorded.get(row, ("", "", "", ""))
        if LOST_TEXT in texts and label == reason.label:
            return reason, recorded[0], recorded[1]
        error, message = (text.decode("utf-8", "surrogateescape") for text in texts)
        return reason, error, message


def sound_rows(
    file: DamagedFile, run: Run, part: Part, listing: Listing, reasons: Reasons
) -> SoundRows | None:
    """Find the rows of a part with intact chunks in all layers; None if a layer is missing."""
    start, stop = part.start - file.start, part.stop - file.start
    features: dict[str, Array] = {}
    good = np.ones(len(part), np.bool_)
    is_nan, is_finite = np.ones(len(part), np.bool_), np.ones(len(part), np.bool_)
    for spec in run.layers:
        rows = file.rows(f"{layout.FEATURES}/{spec.name}", start, stop)
        if rows is None or rows.values.shape[1:] != tuple(spec.shape):
            return None
        if rows.values.dtype != raw_dtype(spec.dtype):
            return None
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
        failed = reasons.of(row, int(status[index]))
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
