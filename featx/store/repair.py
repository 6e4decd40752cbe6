"""Repair of a store: what lies twice is written again, and the rows of damaged chunks are named.

A damaged file stays in its place, and its sound rows can be read, until a file with all rows
replaces it. `damaged.json` names such files, so that the next run computes the lost rows.
"""

from __future__ import annotations

from pathlib import Path

from featx.errors import StoreError
from featx.storage import open_folder
from featx.store import layout
from featx.store.committed_parts import CommittedParts
from featx.store.file_checks import DamageReport
from featx.store.hdf5_files import check_chunks, damage_text, open_metadata
from featx.store.listing import read_listing, write_listing
from featx.store.manifest import Manifest, Run, num_runs_of, require_manifest
from featx.store.part_files import clear_leftovers, part_path
from featx.store.result_files import failures_csv
from featx.store.sound_rows import Reasons, matches_manifest, open_damaged, sound_rows
from featx.types import Listing


def runs_to_extract(report: DamageReport) -> list[Run]:
    """Runs of which rows have to be extracted to repair a store; writes nothing.

    Raises StoreError if there is no store, or a file cannot be read now.
    """
    manifest, listing = _manifest_and_listing(report.root)
    lost = _survey(CommittedParts(open_folder(report.root), True), report, manifest, listing)
    # Without a copy of the listing, the images are listed again.
    return lost or ([] if matches_manifest(listing, manifest) else [manifest.runs[-1]])


def repair_files(report: DamageReport) -> list[Run]:
    """Write again what other files of a store have, too: manifest, listing, columns of parts.

    Returns:
        runs of which rows have to be extracted.

    Raises:
        StoreError: there is no store, or a file cannot be read now.
        StoreLockedError: another process is writing to the store.
        RunError: the disk is full or fails; every sound row is still there.
    """
    root, disk = report.root, open_folder(report.root)
    with disk.lock(root / layout.LOCK):
        if disk.has_locks:
            clear_leftovers(disk)
        damaged = {damage.path for damage in report.damages}
        manifest, listing = _manifest_and_listing(root)
        if root / layout.MANIFEST in damaged:
            disk.replace(root / layout.MANIFEST, manifest.to_json())
        if root / layout.LISTING in damaged and matches_manifest(listing, manifest):
            write_listing(disk, root / layout.LISTING, listing)
        for name in layout.RESULTS:
            # The job that made it writes it again.
            if (path := root / name) in damaged and path.exists():
                disk.set_aside(path, root)
        parts, path = CommittedParts(disk), root / layout.FAILURES_CSV
        lost = _survey(parts, report, manifest, listing)
        if not lost:  # otherwise the run that extracts these rows writes it
            data = failures_csv(parts.failures)
            if not path.exists() or path.read_bytes() != data:
                disk.replace(path, data)
        return lost


def _manifest_and_listing(root: Path) -> tuple[Manifest, Listing | None]:
    manifest = require_manifest(root)
    return manifest, read_listing(root, manifest.num_rows, manifest.listing_identity)


def _survey(
    parts: CommittedParts, report: DamageReport, manifest: Manifest, listing: Listing | None
) -> list[Run]:
    """Find the sound rows of the damaged files; return the runs that lack rows."""
    known = listing if matches_manifest(listing, manifest) else None
    parts.survey(manifest, known, {damage.path.name for damage in report.damages})
    return [run for run in manifest.runs if parts.lacks_rows(run)]


def unpack_store(root: Path, manifest: Manifest, listing: Listing) -> None:
    """Write all rows of features.h5 as parts again, and delete the file."""
    disk, packed = open_folder(root), root / layout.PACKED
    try:
        with open_metadata(packed) as metadata:
            check_chunks(metadata)
            runs = manifest.runs[: num_runs_of(metadata)]
    except layout.UNREADABLE as error:
        raise StoreError(
            f"{packed}: {damage_text(packed, error)}. job=verify verify.repair=true rebuilds what "
            "is damaged."
        ) from error
    disk.make_folder(root / layout.PARTS)
    with open_damaged(packed) as file:
        reasons = Reasons(file, root)
        for run in runs:
            for part in run.parts():
                rows = sound_rows(file, run, part, listing, reasons)
                if rows is None or not rows.good.all():
                    name = layout.part_name(part.index)
                    raise StoreError(
                        f"{packed} does not say why some rows failed ({name}). "
                        "job=verify verify.repair=true extracts them again."
                    )
                disk.publish(part_path(root, part.index), rows.build(run, listing, manifest))
    disk.remove(packed)
