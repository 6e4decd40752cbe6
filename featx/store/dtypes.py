"""Number types of a store: in HDF5, in memory, and the conversion of their bits.

bfloat16 is an HDF5 float of 16 bits (sign 1, exponent 8, mantissa 7, bias 127, little-endian).
numpy has no such type; h5py returns float32, which represents all of its values exactly.
"""

from __future__ import annotations

from typing import Final

import h5py
import numpy as np

from featx.errors import StoreError, require
from featx.types import Array

NAMES: Final = ("float16", "float32", "bfloat16")

_RAW: Final = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2"}
_MEMORY: Final = {"float16": "<f2", "float32": "<f4", "bfloat16": "<f4"}

NAN: Final[dict[str, np.generic]] = {
    "float16": np.float16(np.nan),
    "float32": np.float32(np.nan),
    "bfloat16": np.uint16(0x7FC0),
}
"""Stored bits of NaN, a value of `raw_dtype`."""


def hdf5_type(name: str) -> h5py.h5t.TypeID:
    """New HDF5 type for a number type, readable by HDF5 1.10."""
    if name == "bfloat16":
        kind = h5py.h5t.IEEE_F16LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)  # sign, exponent and its bits, mantissa and its bits
        kind.set_ebias(127)
        return kind
    return h5py.h5t.py_create(memory_dtype(name))


def memory_dtype(name: str) -> np.dtype[np.generic]:
    """numpy dtype that a reader gets; float32 for bfloat16."""
    return np.dtype(_MEMORY[name])


def raw_dtype(name: str) -> np.dtype[np.generic]:
    """numpy dtype of the stored bits; uint16 for bfloat16."""
    return np.dtype(_RAW[name])


def dtype_name(dataset: h5py.Dataset) -> str:
    """Name of the number type of a dataset.

    h5py reports bfloat16 as float32, so the HDF5 types are compared.
    """
    kind = dataset.id.get_type()
    for name in NAMES:
        if kind == hdf5_type(name):
            return name
    raise StoreError(
        f"{dataset.file.filename}: {dataset.name} holds {dataset.dtype.str} of a kind that no "
        f"store has; expected one of {', '.join(NAMES)}, little-endian."
    )


def from_raw(array: Array, name: str) -> Array:
    """Convert stored bits to the values that a reader gets; exact, NaN keeps its bits.

    An array of dtype `raw_dtype(name)` becomes one of `memory_dtype(name)`: a copy for bfloat16,
    otherwise the array itself.
    """
    require(array.dtype == raw_dtype(name), f"{array.dtype} are no raw bits of {name}")
    if name != "bfloat16":
        return array
    bits = array.astype("<u4")
    bits <<= 16
    return bits.view(memory_dtype(name))


def stored_dtype(dataset: h5py.Dataset) -> np.dtype[np.generic]:
    """numpy dtype of the stored bits of a dataset, of features or another one."""
    is_bfloat16 = dataset.dtype == memory_dtype("bfloat16") and dtype_name(dataset) == "bfloat16"
    return raw_dtype("bfloat16") if is_bfloat16 else np.dtype(dataset.dtype)


def read_raw(dataset: h5py.Dataset, start: int, stop: int) -> Array:
    """Read rows [start, stop) of a dataset as stored, bfloat16 as uint16."""
    dtype = stored_dtype(dataset)
    if dtype == dataset.dtype:
        rows: Array = dataset[start:stop]
        return rows
    bits = np.empty((stop - start, *dataset.shape[1:]), dtype)
    space = dataset.id.get_space()
    rest = (0,) * (dataset.ndim - 1)
    space.select_hyperslab((start, *rest), bits.shape)
    memory = h5py.h5s.create_simple(bits.shape)
    dataset.id.read(memory, space, bits, mtype=hdf5_type("bfloat16"))
    return bits
