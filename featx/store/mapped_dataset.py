"""Large datasets with one value per row, mapped from their file instead of read into memory."""

from __future__ import annotations

import contextlib
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.storage import RawFile

MAPPED_BYTES = 64 << 20
"""Least size of a dataset that is mapped. Smaller ones are read: a mapped file whose disk fails, or
that somebody truncates, ends the process by SIGBUS."""


def map_values(
    dataset: h5py.Dataset, descriptor: int, least_bytes: int = MAPPED_BYTES
) -> npt.NDArray[Any] | None:
    """Map the values of a dataset, so that all processes of a machine share one copy in memory.

    The mapping outlives the descriptor, and a file that takes the name of this one.

    Returns:
        (N,) read-only array, whose numbers may not be aligned. None if the dataset is smaller, does
        not lie in one piece in the file as it does in memory (chunks, filters, booleans), or is on
        a file system whose files are not mapped.
    """
    file, dtype = dataset.file, np.dtype(dataset.dtype.str)
    num_bytes = dataset.size * dtype.itemsize
    properties, address = dataset.id.get_create_plist(), dataset.id.get_offset()
    if num_bytes < least_bytes or address is None or dataset.ndim != 1 or dtype.kind not in "Siuf":
        return None
    is_plain = (
        properties.get_layout() == h5py.h5d.CONTIGUOUS
        and not properties.get_external_count()
        and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)
        and file.userblock_size == 0
        and file.mode == "r"  # otherwise HDF5 may hold values that are not in the file yet
    )
    content = None
    with contextlib.suppress(OSError):  # such as a limit of the address space
        content = RawFile(descriptor, may_map=is_plain).mapped
    if content is None or len(content) < address + num_bytes:
        return None
    values: npt.NDArray[Any] = content[address : address + num_bytes].view(dtype)
    return values
