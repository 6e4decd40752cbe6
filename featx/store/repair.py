"""Damaged files set aside, all good rows kept; what is lost is extracted anew after that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeGuard

import h5py
import numpy as np

from featx.errors import RunError, StoreError
from featx.store import layout
from featx.store.check import Damage, Report
from featx.store.checksums import check_chunks
from featx.store.commit import Disk
from featx.store.dtypes import from_raw, read_raw
from featx.store.failures import read_failures
from featx.store.files import damage_text, open_for_a_look
from featx.store.images import image_checksums_in
from featx.store.listing import listing_file, listing_identity, read_listing
from featx.store.manifest import Manifest, Run, load_manifest, num_runs_of
from featx.store.object_disk import disk_at
from featx.store.writer import PartBuilder
from featx.types import Failure, Listing, Part


def set_damage_aside(report: Report) -> list[Path]:
    """Move the damaged files of a store to quarantine/; the same command makes them anew.

    A packed file is taken apart first: its good rows become parts again, so that no more than the
    parts with damaged rows has to be extracted.

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
        moved = [disk.set_aside(path, root / layout.QUARANTINE) for path in aside]
        if descriptor in damaged:
            disk.publish(descriptor, manifest.to_json())
        if packed in damaged and packed.exists():
            if _is_of(listing, manifest):
                bad = [damage for damage in report.damages if damage.path == packed]
                _parts_from(disk, packed, manifest, listing, bad)
            moved.append(disk.set_aside(packed, root / layout.QUARANTINE))
        if root / layout.LISTING in damaged and _is_of(listing, manifest):
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
    _parts_from(disk, packed, manifest, listing, [])
    names = [layout.part_name(part.index) for run in runs for part in run.parts()]
    lacking = [name for name in names if not (root / layout.PARTS / name).exists()]
    if lacking:
        raise StoreError(
            f"{packed} does not say why some rows failed ({lacking[0]}). "
            "job=verify verify.repair=true extracts them again."
        )
    disk.remove(packed)


def _is_of(listing: Listing | None, manifest: Manifest) -> TypeGuard[Listing]:
    """Whether a listing is the one that the store was made with, as far as that is known."""
    return listing is not None and manifest.listing_identity in (None, listing_identity(listing))


def _parts_from(
    disk: Disk, packed: Path, manifest: Manifest, listing: Listing, bad: Sequence[Damage]
) -> None:
    """The good rows of features.h5 as parts.

    Raises:
        StoreError: the system cannot read it now.
        RunError: the parts cannot be written; features.h5 stays where it is.
    """
    disk.make_folder(disk.root / layout.PARTS)
    try:
        with open_for_a_look(packed) as file:
            failures = read_failures(file)
            for run in manifest.runs[: num_runs_of(file)]:
                for part in run.parts():
                    if not any(_touches(damage, run, part) for damage in bad):
                        _write_part(disk, file, manifest, run, part, listing, failures)
    except RunError:
        raise
    except layout.UNREADABLE as error:
        damage_text(packed, error)  # what it does not give is extracted again


def _touches(damage: Damage, run: Run, part: Part) -> bool:
    rows = damage.start < part.stop and part.start < damage.stop
    return rows and (damage.layer is None or damage.layer in run.names)


def _write_part(
    disk: Disk,
    file: h5py.File,
    manifest: Manifest,
    run: Run,
    part: Part,
    listing: Listing,
    failures: Iterable[Failure],
) -> None:
    rows = {
        spec.name: read_raw(file[f"{layout.FEATURES}/{spec.name}"], part.start, part.stop)
        for spec in run.layers
    }
    spec = run.layers[0]
    values = from_raw(rows[spec.name], spec.dtype).reshape(len(part), -1)
    # A row may have failed in another run than this one: its values are not NaN here then.
    is_nan = np.isnan(values).all(1)
    failed = [f for f in failures if part.start <= f.row < part.stop and is_nan[f.row - part.start]]
    if len(failed) < np.count_nonzero(is_nan):
        return  # why these rows failed is not known any more
    builder = PartBuilder(part, run.layers)
    builder.add(part.start, rows, failed, image_checksums_in(file, part.start, part.stop))
    data = builder.build(run, listing, manifest.to_json())
    disk.publish(disk.root / layout.PARTS / layout.part_name(part.index), data)
