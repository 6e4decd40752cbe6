"""Record of the images that rows were computed from: their checksums, and images.h5.

images.h5 is a cache of states (size, modification time, ...) in which images were last known to be
those of their rows. Without it, the bytes of all images are compared. It also has the checksums of
the images of rows that were stored then, so that the file of another store hides no change.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.storage import AtomicFolder, prefetch_files
from featx.store import layout
from featx.store.hdf5_files import chunks_with_verdict, open_metadata, raise_unless_damage
from featx.store.manifest import Manifest, num_runs_of
from featx.store.part_files import part_names, part_path
from featx.types import IMAGE_STATE, UNKNOWN_IMAGE, Part

UNSETTLED = np.array((-3, -3, -3), IMAGE_STATE)
"""State in images.h5 of a row whose image must be compared; no image has it."""

_ROWS_AT_ONCE = 1 << 18
"""Rows whose states are read together."""


def write_image_states(
    disk: AtomicFolder,
    path: Path,
    states: npt.NDArray[np.void],
    checksums: npt.NDArray[np.uint64],
) -> None:
    """Write images.h5 if its content changes.

    It holds /size, /mtime_ns and /tag, (N,) int64 each, and the (N,) checksums of the images,
    UNKNOWN_IMAGE for those of rows that are not stored yet.
    """
    has_checksums = False
    with contextlib.suppress(*layout.UNREADABLE), open_metadata(path) as file:
        has_checksums = np.array_equal(file[layout.IMAGE_CHECKSUM], checksums)
    if has_checksums and not changed_states(path, states).any():
        return
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=layout.LIBVER) as file:
        file.attrs["featx_format"] = layout.FORMAT
        for name in IMAGE_STATE.names or ():
            file.create_dataset(
                name, data=states[name], compression="gzip", compression_opts=1, shuffle=True
            )
        file[layout.IMAGE_CHECKSUM] = checksums
    disk.replace(path, buffer.getvalue())


def add_image_checksums(disk: AtomicFolder, path: Path, checksums: npt.NDArray[np.uint64]) -> None:
    """Add the (N,) checksums of images whose rows were stored since images.h5 was written.

    The states stay those from before the images were read.
    """
    states = np.full(len(checksums), UNSETTLED)
    try:
        with open_metadata(path) as file:
            for name in IMAGE_STATE.names or ():
                known = file[name][: len(states)]
                states[name][: len(known)] = known
    except layout.UNREADABLE:
        return  # the data set knows no states, or the bytes are compared next time
    write_image_states(disk, path, states, checksums)


def changed_states(
    path: Path,
    states: npt.NDArray[np.void],
    checksums: npt.NDArray[np.uint64] | None = None,
) -> npt.NDArray[np.bool_]:
    """Return (N,) bool, whether the states, (N,) IMAGE_STATE, differ from those in images.h5.

    With (N,) checksums of images, a state in the file of an image with another checksum does not
    count; UNKNOWN_IMAGE there, or in the file, differs from no other.

    They are compared in pieces, so that they are in memory once. The file may be missing, and has
    fewer rows if the data set has grown; rows that it does not have count as UNSETTLED.
    """
    unsettled: npt.NDArray[np.bool_] = states == UNSETTLED
    changed = ~unsettled
    try:
        with open_metadata(path) as file:
            fields = {name: file[name] for name in IMAGE_STATE.names or ()}
            size = min(len(states), *map(len, fields.values()))
            for start in range(0, size, _ROWS_AT_ONCE):
                rows = slice(start, min(start + _ROWS_AT_ONCE, size))
                known = np.empty(rows.stop - start, IMAGE_STATE)
                for name, values in fields.items():
                    known[name] = values[rows]
                changed[rows] = states[rows] != known
                if checksums is not None and layout.IMAGE_CHECKSUM in file:
                    then, now = file[layout.IMAGE_CHECKSUM][rows], checksums[rows]
                    is_known = (then != UNKNOWN_IMAGE) & (now != UNKNOWN_IMAGE)
                    changed[rows] |= is_known & (then != now)
    except layout.UNREADABLE:
        return ~unsettled  # the file is a cache; without it the bytes are compared
    return changed


def read_image_checksums(file: h5py.File) -> npt.NDArray[np.uint64]:
    """Image checksums of all rows; UNKNOWN_IMAGE in chunks that differ from their own checksum."""
    if file[layout.IMAGE_CHECKSUM].shape != file[layout.KEY].shape:
        raise StoreError(f"/{layout.IMAGE_CHECKSUM} has another length than /{layout.KEY}")
    checksums = np.full(len(file[layout.KEY]), UNKNOWN_IMAGE, dtype=np.uint64)
    for first, values, good in chunks_with_verdict(file, layout.IMAGE_CHECKSUM):
        if good:
            checksums[first : first + len(values)] = values
    return checksums


def stored_image_checksums(
    root: Path, manifest: Manifest
) -> list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
    """Read the image checksums of each run of a store.

    Returns:
        for each run, (n,) uint64 checksums of its rows (UNKNOWN_IMAGE if unknown), and (n,) bool
        whether the rows are stored.

    Raises:
        StoreError: a file cannot be read now.
    """
    sizes = [run.grid.num_rows for run in manifest.runs]
    checksums = [(np.full(n, UNKNOWN_IMAGE, np.uint64), np.zeros(n, np.bool_)) for n in sizes]
    num_packed = 0
    packed = root / layout.PACKED
    if packed.exists():
        try:
            with open_metadata(packed) as file:
                num_packed = min(num_runs_of(file), len(manifest.runs))
                all_sums = read_image_checksums(file)
        except layout.UNREADABLE as error:
            raise_unless_damage(packed, error)
        else:
            for run, (sums, is_stored) in zip(manifest.runs[:num_packed], checksums, strict=False):
                run_sums = all_sums[run.grid.first_row : run.grid.stop_row]
                sums[: len(run_sums)], is_stored[: len(run_sums)] = run_sums, True
    names = part_names(root)
    parts: list[tuple[int, Part, Path]] = []
    for number, run in enumerate(manifest.runs[num_packed:], num_packed):
        for part in run.parts():
            if layout.part_name(part.index) in names:
                parts.append((number, part, part_path(root, part.index)))
    fetched = prefetch_files([path for _, _, path in parts])
    for (number, part, path), opened in zip(parts, fetched, strict=True):
        first = part.start - manifest.runs[number].grid.first_row
        rows = slice(first, first + len(part))
        try:
            with open_metadata(path, opened) as file:
                part_sums = read_image_checksums(file)
        except layout.UNREADABLE as error:
            raise_unless_damage(path, error)
            continue
        if len(part_sums) == len(part):  # otherwise it is damaged, too
            checksums[number][0][rows], checksums[number][1][rows] = part_sums, True
    return checksums
