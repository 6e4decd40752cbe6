"""The checksums of the images that the rows of a store were computed from."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import layout
from featx.store.checksums import chunks_with_verdict
from featx.store.files import damage_text, open_for_a_look
from featx.store.manifest import Manifest, num_runs_of
from featx.store.object_file import fetched_ahead
from featx.store.part_files import part_names, part_path
from featx.types import UNKNOWN_IMAGE


def image_checksums_in(
    file: h5py.File, start: int = 0, stop: int | None = None
) -> npt.NDArray[np.uint64]:
    """/image_checksum of rows [start, stop) of a file, all when not given.

    UNKNOWN_IMAGE stands for what is not known: in files of an early featx, which have no such
    dataset, and in chunks that differ from their checksum.
    """
    stop = len(file[layout.KEY]) if stop is None else stop
    found = np.full(stop - start, UNKNOWN_IMAGE, dtype=np.uint64)
    if layout.IMAGE_CHECKSUM not in file:
        return found
    if file[layout.IMAGE_CHECKSUM].shape != file[layout.KEY].shape:
        raise StoreError(f"/{layout.IMAGE_CHECKSUM} has another length than /{layout.KEY}")
    step = file[layout.IMAGE_CHECKSUM].chunks[0]
    for at, values, good in chunks_with_verdict(file, layout.IMAGE_CHECKSUM, start // step * step):
        if at >= stop:
            break
        low, high = max(at, start), min(at + len(values), stop)
        if good:
            found[low - start : high - start] = values[low - at : high - at]
    return found


def stored_image_checksums(
    root: Path, manifest: Manifest
) -> list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
    """For each run of a store, the checksums of its rows' images and whether the rows are there.

    Args:
        root: of the store, a folder.
        manifest: its runs.

    Returns:
        two arrays over the rows of the run; UNKNOWN_IMAGE where nothing is known.

    Raises:
        StoreError: the system cannot read it now.
    """
    sizes = [run.grid.num_rows for run in manifest.runs]
    found = [(np.full(n, UNKNOWN_IMAGE, np.uint64), np.zeros(n, np.bool_)) for n in sizes]
    num_packed = 0
    packed = root / layout.PACKED
    if packed.exists():
        try:
            with open_for_a_look(packed) as file:
                num_packed = min(num_runs_of(file), len(manifest.runs))
                of_all = image_checksums_in(file)
        except layout.UNREADABLE as error:
            damage_text(packed, error)
        else:
            for run, (sums, there) in zip(manifest.runs[:num_packed], found, strict=False):
                of_run = of_all[run.grid.first_row : run.grid.stop_row]
                sums[: len(of_run)], there[: len(of_run)] = of_run, True
    names = part_names(root)
    parts = [
        (number, part)
        for number, run in enumerate(manifest.runs[num_packed:], num_packed)
        for part in run.parts()
        if layout.part_name(part.index) in names
    ]
    paths = [part_path(root, part.index) for _, part in parts]
    for (number, part), path, opened in zip(parts, paths, fetched_ahead(paths), strict=True):
        first = part.start - manifest.runs[number].grid.first_row
        rows = slice(first, first + len(part))
        try:
            with open_for_a_look(path, opened) as file:
                found[number][0][rows] = image_checksums_in(file, 0, len(part))
        except layout.UNREADABLE as error:
            damage_text(path, error)
            continue
        found[number][1][rows] = True
    return found
