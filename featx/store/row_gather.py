"""Gathering of rows from a mapped file, and consecutive rows that are read as one range."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from featx.storage import RawFile

Rows: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_PIECE_BYTES = 128 << 10
"""Size of the temporary array of a gather into given places; it stays in the CPU cache."""

_PAGE = 4096


def gather(file: RawFile, addresses: Rows, width: int) -> npt.NDArray[np.void]:
    """Gather items of `width` bytes of a mapped file.

    Args:
        file: mapped file.
        addresses: (n,) address of each item.
        width: bytes per item.

    Raises:
        ValueError: the file is not mapped.
    """
    mapped = file.mapped
    if mapped is None:
        raise ValueError("rows are gathered from mapped files only")
    rest = int(addresses[0]) % width
    if width % _PAGE or bool((addresses % width != rest).any()):
        return file.items(width)[addresses]
    # Items at the same offset of their pages, such as rows of 2048 float16 numbers, are slow to
    # copy to some targets; see `_empty_unaliased`.
    items = mapped[rest : rest + (file.size - rest) // width * width].view(f"V{width}")
    taken = _empty_unaliased(file.address + rest, len(addresses) * width).view(f"V{width}")
    # mode="clip" writes into `taken` without a buffer; all indices were checked before.
    np.take(items, addresses // width, out=taken, mode="clip")
    return taken


def _empty_unaliased(source: int, size: int) -> Bytes:
    """Uninitialised array at an address that is good for copies from address `source`.

    If a target lies just behind its source modulo 4096, the CPU mistakes each load for a dependency
    on the store before it (4K aliasing): gathering rows of 4096 bytes then takes ten times as long.
    Large numpy arrays start 16 bytes behind a page boundary, and rows in a file often on one.

    Args:
        source: address of the data to copy.
        size: bytes to allocate.
    """
    raw = np.empty(size + _PAGE, np.uint8)
    start = (source + _PAGE // 8 - raw.ctypes.data) % _PAGE
    return raw[start : start + size]


def consecutive_ranges(is_joined: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Start and stop of each range of items; is_joined[i]: whether item i + 1 continues item i."""
    edges = [0, *(np.flatnonzero(~is_joined) + 1).tolist(), len(is_joined) + 1]
    return itertools.pairwise(edges)


def gather_into(
    items: npt.NDArray[np.void], addresses: Rows, out: npt.NDArray[np.void], out_indices: Rows
) -> None:
    """Set out[out_indices] = items[addresses].

    The copy goes through a temporary array that stays in the CPU cache.
    """
    first = int(out_indices.min())
    if int(out_indices.max()) - first + 1 == len(out_indices):
        # The indices are a permutation: reading in their order makes the writing sequential.
        ordered = np.full(len(addresses), -1, np.int64)
        ordered[out_indices - first] = addresses
        if (ordered < 0).any():
            raise IndexError("two rows have the same index in `out`")
        addresses, out = ordered, out[first : first + len(addresses)]
        out_indices = np.arange(0)
    step = max(1, _PIECE_BYTES // items.itemsize)
    for i in range(0, len(addresses), step):
        target = out_indices[i : i + step] if len(out_indices) else slice(i, i + step)
        out[target] = items[addresses[i : i + step]]
