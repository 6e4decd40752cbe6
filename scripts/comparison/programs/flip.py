"""python -m flip FILE DATASET ROW: flips a bit of a row of a dataset, in its bytes on the disk."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py

path, name, row = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with h5py.File(path) as file:
    dataset = file[name]
    row_bytes = dataset.nbytes // len(dataset)
    if dataset.chunks is None:
        offset = dataset.id.get_offset() + row * row_bytes
    else:
        step = dataset.chunks[0]
        start = (row // step * step, *(0 for _ in dataset.shape[1:]))
        offset = dataset.id.get_chunk_info_by_coord(start).byte_offset
        if not dataset.id.get_create_plist().get_nfilters():
            offset += row % step * row_bytes
content = bytearray(path.read_bytes())
content[offset] ^= 1
path.write_bytes(content)
