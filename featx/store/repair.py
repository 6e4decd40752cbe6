"""Repair of a store: damaged files go to quarantine, and rows with intact chunks are kept.

A row is kept if its chunks are intact in all layers of its run. A part with a damaged chunk becomes
pieces (`featx.store.part_files`), files with its good rows. Only the others are extracted again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from featx.errors import FeatxError, StoreError
from featx.storage import AtomicFolder, open_folder
from featx.store import layout
from featx.store.checksums import check_chunks
from featx.store.chunk_table import LOST_TEXT, DamagedFile
from featx.store.dtypes import from_raw, raw_dtype
from featx.store.file_checks import DamageReport
from featx.store.hdf5_files import damage_text, open_metadata, raise_unless_damage
from featx.store.listing import listing_identity, read_listing
from featx.store.listing_writer import write_listing
from featx.store.manifest import Manifest, Run, load_manifest, num_runs_of
from featx.store.part_builder import PartBuilder
from featx.store.part_files import clear_leftovers, part_names, part_path, piece_path
from featx.store.result_files import failures_csv, read_failures_csv
from featx.types import UNKNOWN_IMAGE, Failure, Listing, Part, Status, with_features


def quarantine_damage(report: DamageReport) -> list[Path]:
    """Move the damaged files of a store to quarantine; the command of the run recreates them.

    Good rows are kept: features.h5 becomes parts, and a part with a damaged chunk becomes pieces,
    so that only rows of damaged chunks have to be extracted. A damaged part whose chunks are all
    intact is rebuilt from them.

    Args:
        report: result of `check_store` for a folder.

    Returns:
        new paths of the damaged files.

    Raises:
        StoreError: there is no store, or a file cannot be read now.
        StoreLockedError: another process is writing to the store.
        RunError: the disk is full or fails; nothing was moved without a replacement.
    """
    root, disk = report.root, open_folder(report.root)
    with disk.lock(root / layout.LOCK):
        if disk.has_locks:
            clear_leftovers(disk)
        damaged = {damage.path for damage in report.damages}
        manifest, _ = load_manifest(root)
        if manifest is None:
            raise StoreError(f"{root} holds no store: there is no {layout.MANIFEST} in it.")
        listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
        packed = root / layout.PACKED
        manifest_path = root / layout.MANIFEST
        # Damaged parts go first, since parts made from features.h5 may need their names.
        others = [path for path in sorted(damaged - {packed}) if path.exists()]
        moved = []
        for path in others:
            rows = _rows_by_name(path, manifest)
            if rows is not None and matches_manifest(listing, manifest):
                moved.append(repair_part(disk, path, manifest, rows, listing).quarantine_path)
            else:
                moved.append(disk.quarantine(path, root / layout.QUARANTINE))
        if manifest_path in damaged:
            disk.publish(manifest_path, manifest.to_json())
        if packed in damaged and packed.exists():
            if matches_manifest(listing, manifest):
                unpack_good_rows(disk, packed, manifest, listing)
            moved.append(disk.quarantine(packed, root / layout.QUARANTINE))
        if root / layout.LISTING in damaged and matches_manifest(listing, manifest):
            write_listing(disk, root / layout.LISTING, listing, replace=False)
        if root / layout.FAILURES_CSV in damaged:  # all other files are sound then
            failures = sorted(report.failures.values(), key=lambda failure: failure.row)
            disk.publish(root / layout.FAILURES_CSV, failures_csv(failures))
        return moved


def runs_to_extract(report: DamageReport) -> list[Run]:
    """Runs of which rows have to be extracted again after `quarantine_damage`; moves nothing.

    Args:
        report: result of `check_store` for a folder.

    Raises:
        StoreError: there is no store, or a file cannot be read now.
    """
    root = report.root
    manifest, _ = load_manifest(root)
    if manifest is None:
        raise StoreError(f"{root} holds no store: there is no {layout.MANIFEST} in it.")
    listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
    can_rebuild = matches_manifest(listing, manifest)
    damaged = {damage.path for damage in report.damages}
    packed, names = root / layout.PACKED, part_names(root)
    with contextlib.ExitStack() as stack:
        file, num_packed = None, 0
        if packed.exists():
            with contextlib.suppress(IsADirectoryError):
                file = stack.enter_context(_open_damaged(packed))
        if file is not None and file.holds_runs_of(manifest):
            num_packed, reasons = file.num_runs, _Reasons(file, root)

        def is_kept(number: int, run: Run, part: Part) -> bool:
            if file is not None and number < num_packed:
                is_whole = packed not in damaged
                if is_whole or (can_rebuild and _holds_all(file, run, part, reasons)):
                    return True
            path = part_path(root, part.index)
            if path.name not in names:
                return False
            return path not in damaged or (can_rebuild and _is_whole(path, run, part))

        lost = [
            run
            for number, run in enumerate(manifest.runs)
            if not all(is_kept(number, run, part) for part in run.parts())
        ]
    # Without a copy of the listing, the images are listed again.
    return lost or ([] if can_rebuild else [manifest.runs[-1]])


def unpack_store(root: Path, manifest: Manifest, listing: Listing) -> None:
    """Write all rows of features.h5 as parts again, and delete the file."""
    disk, packed = open_folder(root), root / layout.PACKED
    try:
        with open_metadata(packed) as file:
            check_chunks(file)
            runs = manifest.runs[: num_runs_of(file)]
    except layout.UNREADABLE as error:
        raise StoreError(
            f"{packed}: {damage_text(packed, error)}. job=verify verify.repair=true rebuilds what "
            "is damaged."
        ) from error
    unpack_good_rows(disk, packed, manifest, listing)
    names = [layout.part_name(part.index) for run in runs for part in run.parts()]
    missing = [name for name in names if not (root / layout.PARTS / name).exists()]
    if missing:
        raise StoreError(
            f"{packed} does not say why some rows failed ({missing[0]}). "
            "job=verify verify.repair=true extracts them again."
        )
    disk.remove(packed)


def matches_manifest(listing: Listing | None, manifest: Manifest) -> TypeGuard[Listing]:
    """Return whether the manifest allows that a listing is the one that the store was made with."""
    return listing is not None and manifest.listing_identity in (None, listing_identity(listing))


def unpack_good_rows(
    disk: AtomicFolder, packed: Path, manifest: Manifest, listing: Listing
) -> None:
    """Write the good rows of features.h5 as parts, or as pieces of parts with damaged chunks."""
    disk.make_folder(disk.root / layout.PARTS)
    with contextlib.suppress(IsADirectoryError), _open_damaged(packed) as file:
        runs = manifest.runs[: file.num_runs]
        if not file.holds_runs_of(manifest):
            return
        reasons = _Reasons(file, disk.root)
        for run in runs:
            for part in run.parts():
                for rows, data in _good_files(file, manifest, run, part, listing, reasons):
                    disk.publish(_file_path(disk.root, manifest, rows), data)


@dataclass(frozen=True)
class RepairResult:
    """Result of moving a damaged part or piece to quarantine.

    Attributes:
        quarantine_path: new path of the damaged file.
        num_rows: number of rows that it should hold.
        num_kept: number of these rows that are good.
    """

    quarantine_path: Path
    num_rows: int
    num_kept: int

    @property
    def is_complete(self) -> bool:
        """Whether all rows are good."""
        return self.num_kept == self.num_rows

    def __str__(self) -> str:
        return (
            f"moved to {self.quarantine_path}; {self.num_kept} of its {self.num_rows} rows are kept"
        )


def repair_part(
    disk: AtomicFolder, path: Path, manifest: Manifest, part: Part, listing: Listing | None
) -> RepairResult:
    """Move a damaged part or piece to quarantine; files with its good rows take its place."""
    rebuilt = [] if listing is None else list(_rebuilt_files(path, manifest, part, listing))
    files = [(_file_path(disk.root, manifest, rows), data) for rows, data in rebuilt]
    # At every moment each good row is in a file of the store, so that a kill loses none: files with
    # other names are published before the damaged file is moved, and one with its name replaces it.
    for name, data in files:
        if name != path:
            disk.publish(name, data)
    replacement = next((data for name, data in files if name == path), None)
    quarantine_path = disk.quarantine(path, disk.root / layout.QUARANTINE, replacement)
    return RepairResult(quarantine_path, len(part), sum(len(rows) for rows, _ in rebuilt))


def _rebuilt_files(
    path: Path, manifest: Manifest, part: Part, listing: Listing
) -> Iterator[tuple[Part, memoryview]]:
    """Build the files with the good rows of a damaged part or piece; yields rows and content."""
    run = manifest.run_of(part)
    with contextlib.suppress(IsADirectoryError), _open_damaged(path) as file:
        if file.fingerprint_sha256 == run.digest and file.start == part.start:
            reasons = _Reasons(file, path.parent.parent)
            yield from _good_files(file, manifest, run, part, listing, reasons)


def _is_whole(path: Path, run: Run, part: Part) -> bool:
    """Return whether all rows of a damaged part can be read."""
    with contextlib.suppress(IsADirectoryError), _open_damaged(path) as file:
        is_same = file.fingerprint_sha256 == run.digest and file.start == part.start
        return is_same and _holds_all(file, run, part, _Reasons(file, path.parent.parent))
    return False


def _holds_all(file: DamagedFile, run: Run, part: Part, reasons: _Reasons) -> bool:
    """Return whether a damaged file holds all rows of a part."""
    rows = _good_rows(file, run, part, reasons)
    return rows is not None and bool(rows.good.all())


def _file_path(root: Path, manifest: Manifest, rows: Part) -> Path:
    """Path for rows of a part: that of the part if they are all of it, else of a piece."""
    is_complete = manifest.part_of(rows) == rows
    return part_path(root, rows.index) if is_complete else piece_path(root, rows)


def _rows_by_name(path: Path, manifest: Manifest) -> Part | None:
    """Rows that a part or piece holds by its name; None for other files."""
    if (piece := layout.parse_piece_name(path.name)) is not None:
        return None if manifest.part_of(piece) is None else piece
    parts = (part for run in manifest.runs for part in run.parts())
    return next((part for part in parts if layout.part_name(part.index) == path.name), None)


@contextlib.contextmanager
def _open_damaged(path: Path) -> Iterator[DamagedFile]:
    """Open a damaged file; raises StoreError if it cannot be read now."""
    try:
        with DamagedFile.open(path) as file:
            yield file
    except FeatxError:
        raise
    except OSError as error:
        raise_unless_damage(path, error)
        raise


def _good_files(
    file: DamagedFile,
    manifest: Manifest,
    run: Run,
    part: Part,
    listing: Listing,
    reasons: _Reasons,
) -> Iterator[tuple[Part, memoryview]]:
    """Files with the good rows of a part: the part itself, or pieces of it."""
    if (good_rows := _good_rows(file, run, part, reasons)) is None:
        return
    # Pairs of start and stop of the runs of good rows.
    edges = np.flatnonzero(np.diff(good_rows.good, prepend=False, append=False))
    for first, last in edges.reshape(-1, 2).tolist():
        rows = Part(part.index, part.start + first, part.start + last)
        builder = PartBuilder(rows, run.layers)
        features = {name: values[first:last] for name, values in good_rows.features.items()}
        failed = [
            Failure(row, bytes(listing.keys[row]), *good_rows.failures[row])
            for row in range(rows.start, rows.stop)
            if row in good_rows.failures
        ]
        damaged = good_rows.damaged.intersection(range(rows.start, rows.stop))
        builder.add(rows.start, features, failed, good_rows.images[first:last], damaged)
        yield rows, builder.build(run, listing, manifest.to_json())


class _Reasons:
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


@dataclass(frozen=True)
class _GoodRows:
    """Rows of a part in a damaged file."""

    good: npt.NDArray[np.bool_]
    features: dict[str, npt.NDArray[Any]]
    images: npt.NDArray[np.uint64]
    failures: dict[int, tuple[Status, str, str]]
    damaged: set[int]


def _good_rows(file: DamagedFile, run: Run, part: Part, reasons: _Reasons) -> _GoodRows | None:
    """Find the rows of a part with intact chunks in all layers; None if a layer is missing."""
    start, stop = part.start - file.start, part.stop - file.start
    features: dict[str, npt.NDArray[Any]] = {}
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
    good &= known | is_finite  # without a status, the reason of a failed row is unknown
    has_features = with_features(status)
    good &= ~(is_nan & has_features)
    if file.num_runs == 1:
        # With several runs, a row may have failed in another run and have values in this one.
        good &= ~(is_finite & ~has_features)
    failures: dict[int, tuple[Status, str, str]] = {}
    for index in np.flatnonzero(good & is_nan).tolist():
        row = part.start + index
        failed = reasons.of(row, int(status[index]))
        if failed is None:
            good[index] = False
        else:
            failures[row] = failed
    images = np.full(len(part), UNKNOWN_IMAGE, np.uint64)
    checksums = file.rows(layout.IMAGE_CHECKSUM, start, stop)
    if checksums is not None:
        images[checksums.good] = checksums.values[checksums.good]
    damaged = np.flatnonzero(good & (status == Status.IMAGE_DAMAGED)) + part.start
    return _GoodRows(good, features, images, failures, set(damaged.tolist()))
