"""Damaged files set aside, all good rows kept; what is lost is extracted anew after that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from featx.errors import FeatxError, StoreError
from featx.store import layout
from featx.store.check import Report
from featx.store.checksums import check_chunks
from featx.store.commit import Disk
from featx.store.dtypes import from_raw, raw_dtype
from featx.store.files import damage_text, open_for_a_look
from featx.store.listing import listing_file, listing_identity, read_listing
from featx.store.manifest import Manifest, Run, load_manifest, num_runs_of
from featx.store.object_disk import disk_at
from featx.store.part_files import part_path
from featx.store.recovery import LOST_TEXT, DamagedFile
from featx.store.writer import PartBuilder
from featx.types import UNKNOWN_IMAGE, Failure, Listing, Part, Status


def set_damage_aside(report: Report) -> list[Path]:
    """Move the damaged files of a store to quarantine/; the same command makes them anew.

    A packed file is taken apart first: its good rows become parts again, so that no more than the
    parts with damaged chunks has to be extracted. A damaged part all of whose chunks are right is
    made anew from them.

    Args:
        report: of a store's folder.

    Returns:
        where the files went.

    Raises:
        StoreError: there is no store, or the system cannot read it now.
        StoreLockedError: another process is writing the store.
        RunError: the disk is full or fails; nothing was set aside that is not replaced.
    """
    root, disk = report.root, disk_at(report.root)
    with disk.locked(root / layout.LOCK):
        damaged = {damage.path for damage in report.damages}
        manifest, _ = load_manifest(root)
        if manifest is None:
            raise StoreError(f"{root} holds no store: there is no {layout.DESCRIPTOR} in it.")
        listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
        packed = root / layout.PACKED
        descriptor = root / layout.DESCRIPTOR
        # A damaged part must not stand in the way of the one that takes its place.
        aside = [path for path in sorted(damaged - {packed}) if path.exists()]
        moved = []
        parts = {part_path(root, part.index): part for run in manifest.runs for part in run.parts()}
        for path in aside:
            data = None
            if path in parts and is_of(listing, manifest):
                data = saved_part(path, manifest, parts[path], listing)
            moved.append(disk.set_aside(path, root / layout.QUARANTINE))
            if data is not None:
                disk.publish(path, data)
        if descriptor in damaged:
            disk.publish(descriptor, manifest.to_json())
        if packed in damaged and packed.exists():
            if is_of(listing, manifest):
                parts_from(disk, packed, manifest, listing)
            moved.append(disk.set_aside(packed, root / layout.QUARANTINE))
        if root / layout.LISTING in damaged and is_of(listing, manifest):
            disk.publish(root / layout.LISTING, listing_file(listing))
        return moved


def take_apart(root: Path, manifest: Manifest, listing: Listing) -> None:
    """All rows of a store's features.h5 as parts again; then it goes.

    Args:
        root: of the store, whose lock is held.
        manifest: its runs.
        listing: all its rows.

    Raises:
        StoreError: features.h5 is damaged; nothing has changed then.
        RunError: the disk is full or fails; features.h5 stays.
    """
    disk, packed = disk_at(root), root / layout.PACKED
    try:
        with open_for_a_look(packed) as file:
            check_chunks(file)
            runs = manifest.runs[: num_runs_of(file)]
    except layout.UNREADABLE as error:
        raise StoreError(
            f"{packed}: {damage_text(packed, error)}. job=verify verify.repair=true makes what is "
            "damaged anew."
        ) from error
    parts_from(disk, packed, manifest, listing)
    names = [layout.part_name(part.index) for run in runs for part in run.parts()]
    lacking = [name for name in names if not (root / layout.PARTS / name).exists()]
    if lacking:
        raise StoreError(
            f"{packed} does not say why some rows failed ({lacking[0]}). "
            "job=verify verify.repair=true extracts them again."
        )
    disk.remove(packed)


def is_of(listing: Listing | None, manifest: Manifest) -> TypeGuard[Listing]:
    """Whether a listing is the one that the store was made with, as far as that is known."""
    return listing is not None and manifest.listing_identity in (None, listing_identity(listing))


def parts_from(disk: Disk, packed: Path, manifest: Manifest, listing: Listing) -> None:
    """The good rows of features.h5 as parts, of every part all of whose chunks are right.

    Args:
        disk: of the store.
        packed: its features.h5.
        manifest: its runs.
        listing: all its rows.

    Raises:
        StoreError: the system cannot read it now.
        RunError: the parts cannot be written; features.h5 stays where it is.
    """
    disk.make_folder(disk.root / layout.PARTS)
    with contextlib.suppress(IsADirectoryError), _damaged_file(packed) as file:
        runs = manifest.runs[: file.num_runs]
        if len(runs) < file.num_runs or file.identity != manifest.digest_of(file.num_runs):
            return
        failures = file.failures()
        for run in runs:
            for part in run.parts():
                data = _part_of(file, manifest, run, part, listing, failures)
                if data is not None:
                    disk.publish(part_path(disk.root, part.index), data)


def saved_part(path: Path, manifest: Manifest, part: Part, listing: Listing) -> memoryview | None:
    """A damaged part made anew from its chunks, None where one of them is not right.

    Raises:
        StoreError: the system cannot read it now.
    """
    run = manifest.run_of(part)
    with contextlib.suppress(IsADirectoryError), _damaged_file(path) as file:
        if file.identity == run.digest and file.start == part.start:
            return _part_of(file, manifest, run, part, listing, file.failures())
    return None


@contextlib.contextmanager
def _damaged_file(path: Path) -> Iterator[DamagedFile]:
    try:
        with DamagedFile.opened(path) as file:
            yield file
    except FeatxError:
        raise
    except OSError as error:
        damage_text(path, error)  # raises where the system could not read it
        raise


def _part_of(
    file: DamagedFile,
    manifest: Manifest,
    run: Run,
    part: Part,
    listing: Listing,
    failures: Mapping[int, tuple[bytes, bytes]] | None,
) -> memoryview | None:
    """One part from the chunks of a file, or None where they do not say all of its rows."""
    start, stop = part.start - file.start, part.stop - file.start
    rows: dict[str, npt.NDArray[Any]] = {}
    is_nan, is_finite = np.ones(len(part), np.bool_), np.ones(len(part), np.bool_)
    for spec in run.layers:
        found = file.rows(f"{layout.FEATURES}/{spec.name}", start, stop)
        if found is None or found.shape[1:] != tuple(spec.shape):
            return None
        if found.dtype != raw_dtype(spec.dtype):
            return None
        rows[spec.name] = found
        values = from_raw(found, spec.dtype).reshape(len(part), -1)
        is_nan &= np.isnan(values).all(1)
        is_finite &= np.isfinite(values).all(1)
    if not (is_nan | is_finite).all():
        return None
    status = file.rows(layout.STATUS, start, stop)
    if status is None:
        if is_nan.any():
            return None  # why these rows failed is not known any more
        status = np.zeros(len(part), np.uint8)
    # A row may have failed in another run than this one: its values are not NaN here then.
    if (status[is_nan] == Status.OK).any() or (file.num_runs == 1 and status[is_finite].any()):
        return None
    failed = []
    for row in (np.flatnonzero(is_nan) + part.start).tolist():
        try:
            reason = Status(int(status[row - part.start]))
        except ValueError:
            return None
        if failures is not None and row not in failures:
            return None
        error, message = (LOST_TEXT, LOST_TEXT) if failures is None else failures[row]
        failed.append(
            Failure(
                row,
                bytes(listing.keys[row]),
                reason,
                error.decode("utf-8", "surrogateescape"),
                message.decode("utf-8", "surrogateescape"),
            )
        )
    images = file.rows(layout.IMAGE_CHECKSUM, start, stop)
    if images is None:
        images = np.full(len(part), UNKNOWN_IMAGE, np.uint64)
    builder = PartBuilder(part, run.layers)
    builder.add(part.start, rows, failed, images)
    return builder.build(run, listing, manifest.to_json())
