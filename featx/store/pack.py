"""The parts of a finished run -> one plain features.h5, copied chunk by chunk.

It runs in a process of its own (`python -m featx.store.pack FOLDER`): HDF5 can take a process down
with it when a disk fails, and the run must survive that. The parts are read only; they go when the
packed file is whole, checked and durable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

from featx.errors import FeatxError, RunError, StoreError
from featx.store import codecs, layout
from featx.store.commit import Disk
from featx.store.files import open_hdf5
from featx.store.session import read_descriptor
from featx.store.writer import make_groups, read_failures, write_classes, write_failures

HEADROOM_BYTES = 16 << 20
"""Beyond the parts' own size: HDF5's metadata, and room for others."""


def packed_size_bound(part_bytes: int) -> int:
    """Bytes to reserve for the packed file; it is never larger than its parts together."""
    return part_bytes + part_bytes // 50 + HEADROOM_BYTES


def pack_in_child(root: Path) -> None:
    """Pack the store in a child process.

    Raises:
        RunError: packing failed; the parts are kept, those found damaged in quarantine/.
    """
    # -P keeps the user's folder off the child's path: a types.py there would be imported.
    command = [sys.executable, "-P", "-m", "featx.store.pack", str(root)]
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(
            f"packing {root / layout.PACKED} failed: {reason[0]} The parts are kept and "
            "featx.open reads them; the same command goes on, pack=false leaves the parts as "
            "they are."
        )


def pack(root: Path) -> None:
    """Make features.h5 from the parts below `root` and check every chunk of it.

    Raises:
        StoreError: a part is missing or does not fit the others.
        RunError: the disk is full or fails; nothing is left behind.
    """
    descriptor = read_descriptor(root)
    if descriptor is None:
        raise StoreError(f"{root} holds no store: there is no {layout.DESCRIPTOR}.")
    if descriptor["codec"] in ("zstd", "blosc2"):
        codecs.load_plugin()
    grid = layout.Grid(descriptor["num_rows"], descriptor["part_rows"])
    paths = [root / layout.PARTS / layout.part_name(i) for i in range(len(grid))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise StoreError(
            f"{root} cannot be packed yet: {len(missing)} parts are missing, {missing[0]} first."
        )
    size = packed_size_bound(sum(path.stat().st_size for path in paths))
    disk = Disk(root)
    with disk.reserved(root / layout.PACKED, size) as file:
        try:
            with h5py.File(file, "w", libver=layout.LIBVER) as packed:
                _copy(paths, packed, grid, descriptor["fingerprint_sha256"])
            with h5py.File(file, "r") as packed:
                check_chunks(packed)
        except layout.UNREADABLE as error:
            damaged = _set_damaged_aside(disk, paths)
            if isinstance(error, OSError) and not isinstance(error, StoreError) and not damaged:
                raise  # the disk's failure, not a part's
            raise StoreError(f"{error}{damaged}") from error


def _set_damaged_aside(disk: Disk, paths: list[Path]) -> str:
    """Move the parts that differ from their checksums to quarantine/, and say so."""
    text = ""
    for path in paths:
        try:
            with open_hdf5(path) as source:
                check_chunks(source)
        except layout.UNREADABLE as error:
            if not layout.is_damage(error):
                continue
            target = disk.set_aside(path, disk.root / layout.QUARANTINE)
            text += f" {path.name} is damaged ({error}), moved to {target}."
    return text


def _copy(paths: list[Path], packed: h5py.File, grid: layout.Grid, fingerprint: str) -> None:
    failures = []
    for index, path in enumerate(paths):
        part = grid.part(index)
        with open_hdf5(path) as source:
            if source.attrs["fingerprint"] != fingerprint:
                raise StoreError(f"{path} is of another run.")
            if source.attrs["start"] != part.start or len(source[layout.KEY]) != len(part):
                raise StoreError(f"{path} holds the rows of another part.")
            if index == 0:
                _create_like(source, packed, grid)
            for name in _row_datasets(source):
                copy_chunks(source[name], packed[name], part.start)
                sums = source[f"{layout.CHECKSUMS}/{name}"][:]
                first = part.start // packed[name].chunks[0]
                packed[f"{layout.CHECKSUMS}/{name}"][first : first + len(sums)] = sums
            failures += read_failures(source)
    write_failures(packed, failures)
    packed.attrs["complete"] = True


def _create_like(source: h5py.File, packed: h5py.File, grid: layout.Grid) -> None:
    for name, value in source.attrs.items():
        if name not in ("part", "start"):
            packed.attrs[name] = value
    make_groups(packed)
    for name in _row_datasets(source):
        template = source[name]
        properties = template.id.get_create_plist().copy()
        shape = (grid.num_rows, *template.shape[1:])
        limit = (len(grid) * grid.slots, *template.shape[1:])
        path = name.encode()
        space = h5py.h5s.create_simple(shape, limit)
        made = h5py.h5d.create(packed.id, path, template.id.get_type(), space, dcpl=properties)
        dataset = h5py.Dataset(made)
        for key, value in template.attrs.items():
            dataset.attrs[key] = value
        num_chunks = -(-grid.num_rows // template.chunks[0])
        packed[f"{layout.CHECKSUMS}/{name}"] = np.zeros(num_chunks, dtype=np.uint32)
    write_classes(packed, [c.decode("utf-8", "surrogateescape") for c in source[layout.CLASSES][:]])


def _row_datasets(file: h5py.File) -> list[str]:
    """Every dataset with one entry per row: the columns, then the features."""
    features = [f"{layout.FEATURES}/{name}" for name in file[layout.FEATURES]]
    return [layout.KEY, layout.LABEL, layout.STATUS, *features]


def copy_chunks(source: h5py.Dataset, target: h5py.Dataset, first_row: int) -> None:
    """Copy the stored bytes of every chunk to the rows from first_row on, filters untouched."""
    for i in range(source.id.get_num_chunks()):
        offset = source.id.get_chunk_info(i).chunk_offset
        mask, data = source.id.read_direct_chunk(offset)
        target.id.write_direct_chunk((first_row + offset[0], *offset[1:]), data, mask)


def check_chunks(file: h5py.File) -> None:
    """Compare every chunk with its checksum.

    Raises:
        StoreError: the first dataset and row where they differ.
    """
    for name in _row_datasets(file):
        dataset, sums = file[name], file[f"{layout.CHECKSUMS}/{name}"][:]
        step = dataset.chunks[0]
        for chunk, expected in enumerate(sums):
            rows = dataset[chunk * step : (chunk + 1) * step]
            if layout.chunk_checksums(rows, step)[0] != expected:
                raise StoreError(f"/{name} differs from its checksum at row {chunk * step}.")


if __name__ == "__main__":
    try:
        pack(Path(sys.argv[1]))
    except FeatxError as error:
        sys.exit(str(error))
