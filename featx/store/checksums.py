"""Compares the chunks of a file with the checksums in the same file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import codecs, layout
from featx.store.dtypes import read_raw
from featx.store.hdf5_files import filter_numbers, open_plain_dataset


def row_datasets(file: h5py.File) -> list[str]:
    """Paths of all datasets with one entry per row: those of the listing, then the features."""
    features = [f"{layout.FEATURES}/{name}" for name in file[layout.FEATURES]]
    columns = [f"{layout.COLUMNS}/{name}" for name in file.get(layout.COLUMNS, ())]
    return [
        layout.KEY,
        layout.LABEL,
        layout.STATUS,
        layout.IMAGE_CHECKSUM,
        *columns,
        *features,
    ]


def chunks_with_verdict(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any], bool]]:
    """Read a dataset chunk by chunk and compare each chunk with its checksum.

    Yields:
        first row of the chunk, its rows as stored (bfloat16 as uint16), and whether they are good.
    """
    dataset = open_plain_dataset(file, path)
    codecs.check_filters(filter_numbers(dataset))
    sums = open_plain_dataset(file, f"{layout.CHECKSUMS}/{path}")[:]
    step = dataset.chunks[0]
    if len(sums) != -(-len(dataset) // step):
        raise StoreError(f"/{path} has {len(sums)} checksums for {len(dataset)} rows")
    for start in range(first_row, len(dataset), step):
        try:
            rows = read_raw(dataset, start, min(start + step, len(dataset)))
        except OSError as error:
            if not layout.is_damage(error):
                raise
            # The filter cannot decode this chunk; zeros stand for the lost rows, in the type of the
            # other chunks: bfloat16 has another one in h5py.
            shape = (min(step, len(dataset) - start), *dataset.shape[1:])
            yield start, np.zeros(shape, read_raw(dataset, 0, 0).dtype), False
            continue
        yield start, rows, bool(layout.chunk_checksums(rows, step)[0] == sums[start // step])


def good_chunks(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Read a dataset chunk by chunk.

    Yields:
        first row of the chunk, and its rows as stored.
    """
    for start, rows, good in chunks_with_verdict(file, path, first_row):
        if not good:
            raise StoreError(f"/{path} differs from its checksum at row {start}.")
        yield start, rows


def failures_agree(file: h5py.File) -> bool:
    """Return whether /failures agrees with its checksum."""
    path = f"{layout.CHECKSUMS}/{layout.FAILURES}"
    columns = [
        open_plain_dataset(file, f"{layout.FAILURES}/{name}")[:] for name in layout.FAILURE_COLUMNS
    ]
    return bool(open_plain_dataset(file, path)[0] == layout.failures_checksum(columns))


def classes_agree(file: h5py.File) -> bool:
    """Return whether /classes agrees with its checksum."""
    path = f"{layout.CHECKSUMS}/{layout.CLASSES}"
    values = open_plain_dataset(file, layout.CLASSES)[:]
    sums = layout.chunk_checksums(values, max(1, len(values)))
    return bool(np.array_equal(open_plain_dataset(file, path)[:], sums))


def check_chunks(file: h5py.File) -> None:
    """Compare all chunks with their checksums; raises StoreError at the first damaged chunk."""
    if not failures_agree(file):
        raise StoreError(f"/{layout.FAILURES} differs from its checksum.")
    for path in row_datasets(file):
        for _ in good_chunks(file, path):
            pass
