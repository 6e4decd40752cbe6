"""Tokens of an epoch: some positions of some rows, numbered in the order of the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from featx.base import sampled_positions
from featx.store import FeatureStore
from featx.types import UNKNOWN_SIZE, Array, TokenGeometry


def check_whole_number(name: str, value: object, least: int) -> None:
    """Raise ValueError unless an argument is a whole number of at least `least`."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}.")


def check_whole_numbers(least: int, **arguments: int | None) -> None:
    """Raise ValueError unless each argument is a whole number of at least `least`, or None."""
    for name, value in arguments.items():
        if value is not None:
            check_whole_number(name, value, least)


def index_array(name: str, values: object, size: int) -> npt.NDArray[np.int64]:
    """Distinct ascending indices of an axis, from a list of integers or a boolean mask."""
    array = np.asarray(values)
    if array.dtype == np.bool_ and array.shape == (size,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: expected a list of integers or a mask of {size} truth values, and got an "
            f"array of {array.dtype} with shape {array.shape}."
        )
    if array.size and (array.min() < 0 or array.max() >= size):
        wrong = array[(array < 0) | (array >= size)][0]
        raise ValueError(f"{name}: expected numbers from 0 to {size - 1}, and got {wrong}.")
    return np.unique(array).astype(np.int64)


Ints: TypeAlias = npt.NDArray[np.int64]

_SAMPLED_KEYS = 4096
"""Images whose sample is drawn at a time: a number for each token of each of them is in memory."""


@dataclass(frozen=True)
class TokenSelection:
    """Tokens of an epoch; token i is position i % k of row i // k, k positions a row.

    `rows` are (n,) ascending; `positions` (k,) ascending for every row, or (n, k) of each row.
    """

    rows: Ints
    positions: Ints

    @property
    def per_row(self) -> int:
        return int(self.positions.shape[-1])

    def __len__(self) -> int:
        return len(self.rows) * self.per_row

    def locate(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Row of the store and position of each token, both (n,)."""
        row, index = np.divmod(tokens, self.per_row)
        is_shared = self.positions.ndim == 1
        return self.rows[row], self.positions[index] if is_shared else self.positions[row, index]


@dataclass(frozen=True)
class TokenBlocks:
    """Division of a selection into blocks of adjacent tokens, which are read together.

    `edges` are (g + 1,) first row of each group of rows, as indices into the rows of the selection;
    `pieces` the blocks of each group.
    """

    edges: Ints
    pieces: int
    per_row: int

    @classmethod
    def of(cls, selection: TokenSelection, rows: int, pieces: int) -> TokenBlocks:
        changes = np.flatnonzero(np.diff(selection.rows // rows)) + 1
        edges = np.concatenate([[0], changes, [len(selection.rows)]]).astype(np.int64)
        return cls(edges, pieces, selection.per_row)

    def __len__(self) -> int:
        return (len(self.edges) - 1) * self.pieces

    def bounds(self, blocks: Ints) -> tuple[Ints, Ints]:
        """First token of each block, and the token after its last one."""
        group, piece = np.divmod(blocks, self.pieces)
        first = self.edges[group] * self.per_row
        count = self.edges[group + 1] * self.per_row - first
        return first + piece * count // self.pieces, first + (piece + 1) * count // self.pieces

    def tokens(self, blocks: Ints) -> Ints:
        """Tokens of some blocks, one block after the other."""
        start, stop = self.bounds(blocks)
        counts = stop - start
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        found: Ints = np.arange(total) + np.repeat(start - (ends - counts), counts)
        return found


def select_positions(
    tokens: str | Sequence[int], num_tokens: int, geometry: TokenGeometry | None
) -> Ints:
    """Positions that the argument `tokens` of TokenDataset stands for."""
    if not isinstance(tokens, str):
        found = index_array("tokens", tokens, num_tokens)
        if not len(found):
            raise ValueError("tokens: expected at least one position.")
        return found
    every = np.arange(num_tokens)
    if tokens == "all":
        return every
    if tokens not in ("patches", "cls", "registers"):
        raise ValueError(
            f"tokens={tokens!r}: expected 'all', 'patches', 'cls', 'registers' or positions."
        )
    if geometry is None:
        raise ValueError(
            f"tokens={tokens!r}: the store does not record which tokens are patches. Give prefix=, "
            "the number of class and register tokens of the model, or tokens='all'."
        )
    prefix, num_class = geometry.prefix_tokens, int(geometry.has_class_token)
    found = {
        "patches": every[prefix:],
        "cls": every[:num_class],
        "registers": every[num_class:prefix],
    }[tokens]
    if not len(found):
        raise ValueError(
            f"tokens={tokens!r}: this layer has none; it has {prefix} prefix tokens of which "
            f"{num_class} is a class token, and {num_tokens - prefix} patch tokens."
        )
    return found


def token_geometry(
    store: FeatureStore,
    layer: str,
    tokens: str | Sequence[int],
    prefix: int | None,
    num_tokens: int,
) -> TokenGeometry | None:
    """Places of the tokens: those that the store records, unless `prefix` is given."""
    is_by_place = prefix is not None or (isinstance(tokens, str) and tokens != "all")
    if is_by_place and store[layer].attrs.get("reduce") == "sample":
        raise ValueError(
            f"the tokens of {layer} are a sample of those of the model (reduce=sample) and no "
            f"grid: give tokens='all' without prefix. store[{layer!r}].positions() has the place "
            "of each in the layer."
        )
    found = store[layer].tokens
    if prefix is None:
        return found
    if not 0 <= prefix < num_tokens:
        raise ValueError(f"prefix={prefix}: rows of {layer} have {num_tokens} tokens.")
    if found is not None and found.prefix_tokens == prefix:
        return found
    side = math.isqrt(num_tokens - prefix)
    if side * side != num_tokens - prefix:
        raise ValueError(
            f"prefix={prefix}: the {num_tokens - prefix} other tokens of {layer} form no square."
        )
    return TokenGeometry(prefix, prefix > 0, (side, side), UNKNOWN_SIZE)


def select_tokens(
    store: FeatureStore,
    rows: Sequence[int] | Array | None,
    positions: Ints,
    per_image: int | None,
    seed: int,
) -> TokenSelection:
    ok = np.flatnonzero(store.ok)
    if rows is not None:
        ok = np.intersect1d(ok, index_array("rows", rows, len(store)), assume_unique=True)
    if not len(ok):
        raise ValueError(f"{store.root}: none of the rows is ok, so there is no token.")
    if per_image is None:
        return TokenSelection(ok, positions)
    if not 1 <= per_image <= len(positions):
        raise ValueError(f"per_image={per_image}: expected 1 to {len(positions)} tokens.")
    keys = store.key_bytes[ok]
    sampled = [
        sampled_positions(
            keys[first : first + _SAMPLED_KEYS].tolist(), seed, len(positions), per_image
        )
        for first in range(0, len(keys), _SAMPLED_KEYS)
    ]
    return TokenSelection(ok, positions[np.concatenate(sampled)])
