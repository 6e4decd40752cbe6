"""The parts of a finished run -> one plain features.h5, copied chunk by chunk.

It runs in a process of its own (`python -m featx.store.pack FOLDER`): HDF5 can take a process down
with it when a disk fails, and the run must survive that. The parts are read only; they go when the
packed file is whole, checked and durable.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

from featx.errors import FeatxError, RunError, StoreError
from featx.store import codecs, layout
from featx.store.commit import Disk
from featx.store.session import read_descriptor
from featx.store.writer import read_failures, write_classes, write_failures

HEADROOM_BYTES = 16 << 20
"""Beyond the parts' own size: HDF5's metadata, and room for others."""


def packed_size_bound(part_bytes: int) -> int:
    """Bytes to reserve for the packed file; it is never larger than its parts together."""
    return part_bytes + part_bytes // 50 + HEADROOM_BYTES


def pack_in_child(root: Path) -> None:
    """Pack the store in a child process.

    Raises:
        RunError: packing failed; the parts are all there and hold every row.
    """
    command = [sys.executable, "-m", "featx.store.pack", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(
            f"packing {root / layout.PACKED} failed: {reason[0]} The parts hold every row and "
            "featx.open reads them; the same command tries again, pack=false keeps the parts."
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
    size = packed_size_bound(sum(path.stat().st_size for path in paths))
    with Disk(root).reserved(root / layout.PACKED, size) as file:
        with h5py.File(file, "w", libver=layout.LIBVER) as packed:
            _copy(paths, packed, grid)
        with h5py.File(file, "r") as packed:
            check_chunks(packed)


def _copy(paths: list[Path], packed: h5py.File, grid: layout.Grid) -> None:
    failures = []
    for index, path in enumerate(paths):
        part = grid.part(index)
        with h5py.File(path, "r", locking=False) as source:
            if index == 0:
                _create_like(source, packed, grid)
            elif source.attrs["fingerprint"] != packed.attrs["fingerprint"]:
                raise StoreError(f"{path} is of another run than part 0.")
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
    for name in _row_datasets(source):
        template = source[name]
        properties = template.id.get_create_plist().copy()
        shape = (grid.num_rows, *template.shape[1:])
        limit = (len(grid) * grid.slots, *template.shape[1:])
        path = name.encode()
        links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        space = h5py.h5s.create_simple(shape, limit)
        made = h5py.h5d.create(
            packed.id, path, template.id.get_type(), space, dcpl=properties, lcpl=links
        )
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
