"""Damaged files set aside, all good rows kept; what is lost is extracted anew after that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.store import layout
from featx.store.check import Damage, Report
from featx.store.commit import Disk, exclusive_lock
from featx.store.dtypes import from_raw, read_raw
from featx.store.files import open_for_a_look
from featx.store.listing import read_listing
from featx.store.manifest import Manifest, Run, load_manifest, num_runs_of
from featx.store.writer import PartBuilder, read_failures
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
        StoreLockedError: another process is writing the store.
        RunError: the disk is full or fails; nothing was set aside that is not replaced.
    """
    root, disk = report.root, Disk(report.root)
    with exclusive_lock(root / layout.LOCK):
        damaged = {damage.path for damage in report.damages}
        packed = root / layout.PACKED
        if packed in damaged and packed.exists():
            _take_apart(disk, packed, report)
        moved = []
        for path in sorted(damaged - {root / layout.DESCRIPTOR}):  # the session puts that back
            if path.exists():
                moved.append(disk.set_aside(path, root / layout.QUARANTINE))
        return moved


def _take_apart(disk: Disk, packed: Path, report: Report) -> None:
    """The good rows of features.h5 as parts."""
    manifest, _ = load_manifest(disk.root)
    bad = [damage for damage in report.damages if damage.path == packed]
    if manifest is None:
        return
    listing = read_listing(disk.root, manifest.num_rows)
    if listing is None:
        return
    disk.make_folder(disk.root / layout.PARTS)
    with contextlib.suppress(*layout.UNREADABLE), open_for_a_look(packed) as file:
        failures = read_failures(file)
        for run in manifest.runs[: num_runs_of(file)]:
            for part in run.parts():
                if not any(_touches(damage, run, part) for damage in bad):
                    _write_part(disk, file, manifest, run, part, listing, failures)


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
    failed = [
        failure
        for failure in failures
        if part.start <= failure.row < part.stop and _is_nan(run, rows, failure.row - part.start)
    ]
    builder = PartBuilder(part, run.layers)
    builder.add(part.start, rows, failed)
    data = builder.build(run, listing, manifest.to_json())
    disk.publish(disk.root / layout.PARTS / layout.part_name(part.index), data)


def _is_nan(run: Run, rows: dict[str, npt.NDArray[Any]], row: int) -> bool:
    """Whether it was in this run that a row failed: its values are NaN then."""
    spec = run.layers[0]
    return bool(np.isnan(from_raw(rows[spec.name][row : row + 1], spec.dtype)).all())
