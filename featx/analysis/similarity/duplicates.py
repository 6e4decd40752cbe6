"""Groups of near-duplicates: rows that are linked by pairs with a cosine above a threshold."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import LayerRows, LayerVectors
from featx.base import choose_device, float64_device
from featx.config import DuplicatesConfig
from featx.store import FeatureStore, open_if_path

SLACK = 1e-6
"""Amount by which a cosine may miss the threshold, since two equal float32 vectors have a cosine of
about 1."""

_FLOAT32_WIDTH = 20_000
"""Length of vectors up to which a float32 dot product has an error below SLACK."""

_EXACT_BYTES = 1 << 26
"""Bytes of vectors that are compared in float64 at a time."""

MAX_BLOCK_ROWS = 2048
"""Maximum number of rows per block. A pair of blocks takes the square of it in products."""


def duplicate_groups(
    store: FeatureStore | str | os.PathLike[str],
    layer: str,
    threshold: float | None = None,
    device: str = "auto",
    *,
    standardise: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> list[npt.NDArray[np.int64]]:
    """Find groups of rows that are linked, directly or indirectly, by a cosine above a threshold.

    Args:
        store: open store or its path; rows that failed are left out.
        layer: name of the layer; a map counts as one long vector.
        threshold: cosine, above 0 and at most 1; None for 0.9, or 0.98 without `standardise`. A
            vector of zeros has no cosine and is in no group.
        standardise: whether each value has its mean over the rows subtracted and is divided by its
            standard deviation first, as by job=duplicates. Cosines of most layers are near 1 for
            all images otherwise.
        on_progress: called with the number of rows that are done.

    Returns:
        one (m,) int64 array per group of at least two rows, increasing rows of the store; groups
        are in the order of their first row.

    Raises:
        ConfigError: the threshold is out of range, or all rows failed.
        LayerError: the store has no such layer.
    """
    store = open_if_path(store)
    threshold = DuplicatesConfig(threshold=threshold).least_cosine(standardise)
    rows = LayerRows(store, layer, np.flatnonzero(store.ok))
    vectors = LayerVectors([rows], choose_device(device), unit=True, standardise=standardise)
    return linked_groups(vectors, threshold, on_progress)


def linked_groups(
    vectors: LayerVectors, threshold: float, on_progress: Callable[[int], None] | None = None
) -> list[npt.NDArray[np.int64]]:
    """Find the groups of vectors of length 1; see `duplicate_groups`."""
    parents = np.arange(len(vectors))
    step = min(MAX_BLOCK_ROWS, vectors.block_rows)
    for start, block in vectors.all_blocks(step):
        for other_start in range(start, len(vectors), step):
            other_block = vectors.block(other_start, min(len(vectors), other_start + step))
            places = np.array([start, other_start])
            # Only pairs whose float32 cosine is too close to the threshold are computed again in
            # float64.
            sure, near = _decide(
                block @ other_block.T, threshold, vectors.width, other_start == start
            )
            _join(parents, *(sure + places).T)
            block_rows = _exact_block_rows(vectors.width)
            for first in range(0, len(near), block_rows):
                pairs = near[first : first + block_rows]
                is_apart = np.not_equal(*_roots(parents, (pairs + places).T))
                pairs = pairs[is_apart]  # large groups of equal rows leave few pairs
                pairs = pairs[exact_cosines(block, other_block, pairs) >= threshold - SLACK]
                _join(parents, *(pairs + places).T)
        if on_progress is not None:
            on_progress(len(block))
    roots = _roots(parents, np.arange(len(parents)))
    order = np.argsort(roots, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)
    return [vectors.rows[group] for group in groups if len(group) > 1]


def cosines_to_first(vectors: LayerVectors, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Compute the (n,) float32 cosines of some rows of the store, which increase, to the first of
    them; `vectors` contains these rows with length 1.
    """
    group = vectors.subset(np.searchsorted(vectors.rows, rows))
    first = group.block(0, 1)
    cosines = []
    for _, block in group.all_blocks(_exact_block_rows(group.width)):
        pairs = np.stack([np.arange(len(block)), np.zeros(len(block), dtype=np.int64)], axis=1)
        cosines.append(exact_cosines(block, first, pairs))
    return np.concatenate(cosines).clip(-1, 1).astype(np.float32)


def exact_cosines(
    a: torch.Tensor, b: torch.Tensor, pairs: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Compute the (p,) float64 cosines of pairs of rows; a cosine with a vector of zeros is 0."""
    home = float64_device(a.device)
    first, second = torch.from_numpy(pairs.T).to(a.device)
    x, y = a[first].to(home).double(), b[second].to(home).double()
    lengths = (x.norm(dim=1) * y.norm(dim=1)).clamp_min(1e-30)
    cosines: npt.NDArray[np.float64] = ((x * y).sum(1) / lengths).cpu().numpy()
    return cosines


def _exact_block_rows(width: int) -> int:
    """Return the number of pairs whose float64 vectors take `_EXACT_BYTES`, at least one."""
    return max(1, _EXACT_BYTES // (16 * width))


def _decide(
    cosines: torch.Tensor, threshold: float, width: int, above_diagonal: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the pairs that reach a threshold, and those that float32 cannot decide."""
    error = SLACK * max(1.0, width / _FLOAT32_WIDTH)
    sure = cosines >= threshold - SLACK + error
    near = (cosines >= threshold - SLACK - error) & ~sure
    if above_diagonal:
        sure, near = sure.triu(1), near.triu(1)
    return sure.nonzero().cpu().numpy(), near.nonzero().cpu().numpy()


def _roots(parents: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Find the root of each place in the union-find forest; a root is its own parent."""
    roots = parents[places]
    while not np.array_equal(above := parents[roots], roots):
        roots = above
    return roots


def _join(
    parents: npt.NDArray[np.int64], a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]
) -> None:
    """Link pairs of places in the union-find forest; the root of a group is its smallest place.

    All pairs are linked together: the larger root becomes a child of the smaller one, repeatedly,
    until both places of every pair have the same root.
    """
    while True:
        root_a, root_b = _roots(parents, a), _roots(parents, b)
        is_apart = root_a != root_b
        if not is_apart.any():
            parents[a] = root_a  # path compression
            parents[b] = root_b
            return
        a, b, root_a, root_b = a[is_apart], b[is_apart], root_a[is_apart], root_b[is_apart]
        np.minimum.at(parents, np.maximum(root_a, root_b), np.minimum(root_a, root_b))
