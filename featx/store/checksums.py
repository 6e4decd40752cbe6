"""Compares the chunks of a file with the checksums in the same file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import layout
from featx.store.dtypes import read_raw, stored_dtype
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import open_plain_dataset


def row_datasets(file: h5py.File) -> list[str]:
    """Paths of all datasets with one entry per row: those of the listing, then the features."""
    features = [f"{layout.FEATURES}/{name}" for name in file[layout.FEATURES]]
    columns = [f"{layout.COLUMNS}/{name}" for name in file.get(layout.COLUMNS, ())]
    fixed = (layout.KEY, layout.LABEL, layout.STATUS, layout.IMAGE_CHECKSUM)
    return [*fixed, *columns, *features]


def chunks_with_verdict(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any], bool]]:
    """Yield of each chunk its first row, its rows as stored, and whether they have their checksum.

    bfloat16 rows are uint16; lost ones are zeros.
    """
    sums = open_plain_dataset(file, f"{layout.CHECKSUMS}/{path}")[:]
    yield from compared_chunks(open_plain_dataset(file, path), sums, first_row)


def compared_chunks(
    dataset: h5py.Dataset, sums: npt.NDArray[Any], first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any], bool]]:
    """Yield the chunks of a dataset as `chunks_with_verdict` does."""
    step, rest = dataset.chunks[0], (0,) * (dataset.ndim - 1)
    if len(sums) != -(-len(dataset) // step):
        raise StoreError(f"{dataset.name} has {len(sums)} checksums for {len(dataset)} rows")
    pipeline, dtype = Pipeline.of(dataset), stored_dtype(dataset)
    for start in range(first_row, len(dataset), step):
        shape = (min(step, len(dataset) - start), *dataset.shape[1:])
        try:
            mask, stored = dataset.id.read_direct_chunk((start, *rest))
        except (OSError, RuntimeError, ValueError) as error:  # its address is lost
            if not layout.is_damage(error):
                raise
            yield start, np.zeros(shape, dtype), False
            continue
        if not layout.agrees(sums[start // step], stored):
            yield start, np.zeros(shape, dtype), False
            continue
        if pipeline.is_supported:
            rows = np.frombuffer(pipeline.decode(stored, mask), dtype).reshape(-1, *shape[1:])
        else:
            rows = read_raw(dataset, start, start + shape[0])
        yield start, rows[: shape[0]], True


def good_chunks(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the first row and the rows as stored of each chunk."""
    for start, rows, good in chunks_with_verdict(file, path, first_row):
        if not good:
            raise StoreError(f"/{path} differs from its checksum at row {start}.")
        yield start, rows


def failures_agree(file: h5py.File) -> bool:
    path = f"{layout.CHECKSUMS}/{layout.FAILURES}"
    columns = [
        open_plain_dataset(file, f"{layout.FAILURES}/{name}")[:] for name in layout.FAILURE_COLUMNS
    ]
    return layout.agrees(open_plain_dataset(file, path)[:], *columns)


def classes_agree(file: h5py.File) -> bool:
    path = f"{layout.CHECKSUMS}/{layout.CLASSES}"
    values = open_plain_dataset(file, layout.CLASSES)[:]
    return layout.agrees(open_plain_dataset(file, path)[:], values)


def check_chunks(file: h5py.File) -> None:
    """Compare all chunks with their checksums; raises StoreError at the first damaged chunk."""
    if not failures_agree(file):
        raise StoreError(f"/{layout.FAILURES} differs from its checksum.")
    for path in row_datasets(file):
        for _ in good_chunks(file, path):
            pass
