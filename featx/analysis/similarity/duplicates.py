"""Groups of rows that are nearly the same: every pair is looked at, and pairs are joined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.similarity import row_vectors as sizes
from featx.analysis.similarity.row_vectors import Vectors
from featx.base.devices import choose_device, float64_home
from featx.errors import ConfigError
from featx.store.reader import FeatureStore

SLACK = 1e-6
"""A cosine this much below the threshold reaches it: two equal float32 vectors have about 1."""

_FLOAT32_WIDTH = 20_000
"""A product of float32 vectors that are so long errs by less than SLACK, of longer ones by more."""

_EXACT_BYTES = 1 << 26
"""Of vectors that are compared in float64 at a time."""

AT_ONCE = 2048
"""Rows of a block, at the most; a block of pairs has its square."""


def duplicate_groups(
    store: FeatureStore,
    layer: str,
    threshold: float,
    device: str = "auto",
    tell: Callable[[int], None] = lambda rows: None,
) -> list[npt.NDArray[np.int64]]:
    """Rows joined by pairs whose cosine reaches a threshold, directly or through others.

    Args:
        store: open for reading; rows that failed are left out.
        layer: its name; a map counts as one long vector.
        threshold: above 0, up to 1. A vector of zeros has no cosine, and is like no other.
        device: auto, cpu, cuda, ...
        tell: is told of every block how many rows are done.

    Returns:
        groups of at least two rows of the store, each increasing, in the order of their first row.

    Raises:
        ConfigError: the threshold is out of range, or no row is ok.
        LayerError: no such layer.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"duplicates={threshold}: expected a cosine above 0, up to 1.")
    vectors = Vectors(store, layer, choose_device(device), unit=True)
    parents = np.arange(len(vectors))
    step = min(AT_ONCE, vectors.rows_of(sizes.BLOCK_BYTES))
    for start, block in vectors.blocks(step):
        for other in range(start, len(vectors), step):
            against = vectors.block(other, min(len(vectors), other + step))
            places = np.array([start, other])
            sure, near = _reached(block @ against.T, threshold, vectors.width, other == start)
            _join(parents, *(sure + places).T)
            at_once = _exact_at_once(vectors.width)
            for first in range(0, len(near), at_once):
                some = near[first : first + at_once]
                apart = np.not_equal(*_roots(parents, (some + places).T))
                some = some[apart]  # of many equal pictures few pairs are left
                some = some[exact_cosines(block, against, some) >= threshold - SLACK]
                _join(parents, *(some + places).T)
        tell(len(block))
    roots = _roots(parents, np.arange(len(parents)))
    order = np.argsort(roots, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)
    return [vectors.rows[group] for group in groups if len(group) > 1]


def cosines_to_first(
    store: FeatureStore, layer: str, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """(n,) cosines of some ok rows to the first of them."""
    vectors = Vectors(store, layer, torch.device("cpu"), rows=rows, unit=True)
    first = vectors.block(0, 1)
    found = []
    for _, block in vectors.blocks(vectors.rows_of(sizes.BLOCK_BYTES)):
        pairs = np.stack([np.arange(len(block)), np.zeros(len(block), dtype=np.int64)], axis=1)
        found.append(exact_cosines(block, first, pairs))
    return np.concatenate(found).clip(-1, 1).astype(np.float32)


def exact_cosines(
    a: torch.Tensor, b: torch.Tensor, pairs: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(p,) cosines of pairs of rows, computed in float64; 0 with a vector of zeros.

    Args:
        a, b: (n, width) and (m, width).
        pairs: (p, 2) a row of each.
    """
    home, at_once = float64_home(a.device), _exact_at_once(a.shape[1])
    cosines = np.empty(len(pairs))
    for first in range(0, len(pairs), at_once):
        some = torch.from_numpy(pairs[first : first + at_once]).to(a.device)
        x, y = a[some[:, 0]].to(home).double(), b[some[:, 1]].to(home).double()
        lengths = (x.norm(dim=1) * y.norm(dim=1)).clamp_min(1e-30)
        cosines[first : first + at_once] = ((x * y).sum(1) / lengths).cpu().numpy()
    return cosines


def _exact_at_once(width: int) -> int:
    return max(1, _EXACT_BYTES // (16 * width))


def _reached(
    cosines: torch.Tensor, threshold: float, width: int, above_diagonal: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(p, 2) pairs that reach a threshold for sure, and those too near to it to say in float32.

    Args:
        cosines: (n, m) of float32 vectors.
        threshold: as it was asked for.
        width: of the vectors.
        above_diagonal: the rows are the columns, and each pair counts once.
    """
    error = SLACK * max(1.0, width / _FLOAT32_WIDTH)
    sure = cosines >= threshold - SLACK + error
    near = (cosines >= threshold - SLACK - error) & ~sure
    if above_diagonal:
        sure, near = sure.triu(1), near.triu(1)
    return sure.nonzero().cpu().numpy(), near.nonzero().cpu().numpy()


def _roots(parents: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The root of each of some places; a root is its own parent."""
    roots = parents[places]
    while not np.array_equal(above := parents[roots], roots):
        roots = above
    return roots


def _join(
    parents: npt.NDArray[np.int64], a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]
) -> None:
    """Give the places of each pair (a[i], b[i]) the same root, the smallest one of all.

    Many pairs at once: the larger root is hung below the smaller one, until none are left apart.
    """
    while True:
        root_a, root_b = _roots(parents, a), _roots(parents, b)
        apart = root_a != root_b
        if not apart.any():
            parents[a] = root_a  # shorter ways for those that come later
            parents[b] = root_b
            return
        a, b, root_a, root_b = a[apart], b[apart], root_a[apart], root_b[apart]
        np.minimum.at(parents, np.maximum(root_a, root_b), np.minimum(root_a, root_b))
