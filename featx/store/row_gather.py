"""Gathering of rows from a mapped file, and runs of rows that are read as one range."""

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


def gather(file: RawFile, at: Rows, width: int) -> npt.NDArray[np.void]:
    """Gather items of `width` bytes of a mapped file.

    Args:
        file: mapped file.
        at: (n,) address of each item.
        width: bytes per item.

    Raises:
        ValueError: the file is not mapped.
    """
    mapped = file.mapped
    if mapped is None:
        raise ValueError("rows are gathered from mapped files only")
    rest = int(at[0]) % width
    if width % _PAGE or bool((at % width != rest).any()):
        return file.items(width)[at]
    # Items at the same offset of their pages, such as rows of 2048 float16 numbers, are slow to
    # copy to some targets; see `_empty_near`.
    items = mapped[rest : rest + (file.size - rest) // width * width].view(f"V{width}")
    taken = _empty_near(file.address + rest, len(at) * width).view(f"V{width}")
    # mode="clip" writes into `taken` without a buffer; all indices were checked before.
    np.take(items, at // width, out=taken, mode="clip")
    return taken


def _empty_near(source: int, size: int) -> Bytes:
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


def runs(joined: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of items; joined[i] says that item i + 1 continues item i."""
    edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(joined) + 1]
    return itertools.pairwise(edges)


def gather_into(
    items: npt.NDArray[np.void], at: Rows, out: npt.NDArray[np.void], places: Rows
) -> None:
    """Set out[places] = items[at], through a temporary array that stays in the CPU cache."""
    first = int(places.min())
    if int(places.max()) - first + 1 == len(places):
        # The places are a permutation: reading in their order makes the writing sequential.
        by_place = np.full(len(at), -1, np.int64)
        by_place[places - first] = at
        if (by_place < 0).any():
            raise IndexError("two rows have the same index in `out`")
        at, out = by_place, out[first : first + len(at)]
        places = np.arange(0)
    step = max(1, _PIECE_BYTES // items.itemsize)
    for i in range(0, len(at), step):
        destination = places[i : i + step] if len(places) else slice(i, i + step)
        out[destination] = items[at[i : i + step]]
