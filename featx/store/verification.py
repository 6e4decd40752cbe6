"""Verification of a store: every chunk against its checksum, every row against its status."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from featx.base import printable
from featx.errors import StoreError
from featx.store import layout
from featx.store.contents import NUM_ATTEMPTS, file_state
from featx.store.file_checks import Damage, DamageReport, check_file
from featx.store.hdf5_files import damage_text, open_hdf5
from featx.store.listing import (
    compare_listing,
    is_ascending,
    matches_manifest,
    read_listing,
    read_listing_file,
)
from featx.store.manifest import DamagedManifestError, Manifest, load_manifest, num_runs_of
from featx.store.part_files import part_names
from featx.store.result_files import (
    failures_csv,
    parse_failures_csv,
    read_failures_csv,
    result_problems,
)
from featx.store.row_file import RowFile
from featx.types import Listing


def check_store(root: Path) -> DamageReport:
    """Check everything in a store, or in a features.h5 alone.

    Raises StoreError if there is no store, it has a newer format, or cannot be read now; or if a
    single file is no features.h5.
    """
    layout.running_checksum()  # without xxhash nothing would be compared
    for left in reversed(range(NUM_ATTEMPTS)):
        before = _state(root)
        try:
            report = _check(root)
        except StoreError:  # a file that cannot be read, or has vanished
            if not left or _state(root) == before:
                raise
            continue
        if report.complete or _state(root) == before:
            break
        # Another process has packed the store meanwhile, or added to it.
    return report


def _state(root: Path) -> list[tuple[int, int] | None]:
    """State of the files that say which others belong to a store."""
    names = (layout.MANIFEST, layout.LISTING, layout.PACKED)
    return [file_state(root / name) for name in names if not root.is_file()]


def _check(root: Path) -> DamageReport:
    """Check everything once, as `check_store`."""
    report = DamageReport(root)
    manifest, listing = (_read_file if root.is_file() else _read_folder)(root, report)
    if manifest is None:
        return report
    report.num_rows = manifest.num_rows
    for path, expected in list(_files(root, manifest, report)):
        check_file(path, expected, listing, report)
    if not root.is_file():
        report.damages += [Damage(path, what) for path, what in result_problems(root)]
        _check_failures_csv(root, report)
    return report


def _check_failures_csv(root: Path, report: DamageReport) -> None:
    """Compare failures.csv with /failures of a packed store whose files are all sound.

    While there are parts, a killed run may have left it behind them; the next run writes it again.
    """
    path = root / layout.FAILURES_CSV
    if not report.complete or part_names(root) or not path.exists():
        return
    data = failures_csv([report.failures[row] for row in sorted(report.failures)])
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:  # as nearly all are; a million lines take a minute below
            return
    written = [read_failures_csv(path), parse_failures_csv(data.decode())]

    def unescaped(text: str) -> str:
        """Return a cell without what older files may lack: escapes, and doubled backslashes."""
        return re.sub(r"\\+", r"\\", printable(text)).lstrip("'")

    found, expected = (
        {row: [*map(unescaped, texts)] for row, texts in rows.items()} for rows in written
    )
    if found != expected:
        report.add(path, "it does not list the failed rows as the files do")


def _read_file(path: Path, report: DamageReport) -> tuple[Manifest | None, Listing | None]:
    """Manifest and listing in a single features.h5; None and a damage for one that is not valid."""
    try:
        with open_hdf5(path) as file:
            if "featx_format" not in file.attrs:
                raise StoreError(f"{path} is an HDF5 file, but not a featx store.")
            if "part" in file.attrs:
                raise StoreError(f"{path} is one part of a store; verify the store's folder.")
            if layout.MANIFEST_COPY not in file.attrs:
                raise DamagedManifestError(
                    f"{path} has no attribute {layout.MANIFEST_COPY}, which records how its rows "
                    "were made."
                )
            text = bytes(file.attrs[layout.MANIFEST_COPY])
        manifest = Manifest.from_json(text, path)
    except DamagedManifestError as error:
        report.add(path, str(error))
        return None, None
    except StoreError:
        raise
    except layout.UNREADABLE as error:
        report.add(path, damage_text(path, error))
        return None, None
    listing = read_listing_file(path, manifest.num_rows)
    if listing is None or matches_manifest(listing, manifest):
        return manifest, listing
    report.add(path, "its keys, labels, classes or columns are not those of the extracted rows")
    return manifest, None


def _read_folder(root: Path, report: DamageReport) -> tuple[Manifest | None, Listing | None]:
    """Manifest of a store, and the listing that its rows were made from; None for a lost one."""
    path = root / layout.MANIFEST
    try:
        manifest, intact = load_manifest(root)
    except DamagedManifestError as error:
        report.add(path, str(error))
        return None, None
    if manifest is None:
        raise StoreError(f"{root} holds no store: there is no {layout.MANIFEST} in it.")
    if not intact:
        what = "it is damaged" if path.exists() else "it is missing"
        report.add(path, f"{what}; the files of the store hold copies of it")
    path = root / layout.LISTING
    listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
    is_known = matches_manifest(listing, manifest)
    if not path.exists():
        report.add(path, "it is missing")
    elif listing is None:
        report.add(path, f"it does not hold {manifest.num_rows} rows")
    elif not is_known:
        report.add(path, "it is not the listing that the rows were made from")
    else:
        num_rows, problem = compare_listing(path, listing)
        if problem is None and num_rows < len(listing):
            problem = f"it has {num_rows} rows, the store {len(listing)}"
        if problem is not None:
            report.add(path, problem)
    if listing is None or not is_known:
        return manifest, None  # the files cannot be compared with it
    keys = listing.keys
    if not is_ascending(keys) and len(np.unique(keys)) != len(keys):
        report.add(path, "it holds a key twice")
    return manifest, listing


def _files(root: Path, manifest: Manifest, report: DamageReport) -> Iterator[tuple[Path, RowFile]]:
    """Files of a store with rows, and their expected content; missing ones are recorded."""
    packed = root if root.is_file() else root / layout.PACKED
    num_packed = 0
    if packed.is_file():
        try:
            with open_hdf5(packed) as file:
                num_packed = num_runs_of(file)
            if num_packed > len(manifest.runs):
                raise StoreError(f"it holds {num_packed} runs, the store {len(manifest.runs)}")
        except (StoreError, *layout.UNREADABLE) as error:
            what = damage_text(packed, error)
            report.add(packed, what, 0, manifest.num_rows)
            num_packed = 0  # parts that still exist may hold its rows
        else:
            yield packed, RowFile.packed(manifest, num_packed)
    if root.is_file():
        return
    names = part_names(root)
    for number, run in enumerate(manifest.runs):
        for part in run.parts():
            name = layout.part_name(part.index)
            if name in names:
                names.remove(name)
                yield root / layout.PARTS / name, RowFile.of_part(run, part)
            elif number >= num_packed:
                report.missing.append(name)
    for name in sorted(names):
        report.add(root / layout.PARTS / name, "the store has no such part")
