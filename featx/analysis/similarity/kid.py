"""Distances between the images of two stores: KID and the squared Fréchet distance of a layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from featx.analysis.layer_vectors import LayerRows, LayerVectors
from featx.analysis.statistics import MAX_SPECTRUM, Moments, gaussian_distance
from featx.analysis.value_settings import refuse_other_layer
from featx.base import choose_device, float64_device
from featx.errors import ConfigError
from featx.store import FeatureStore, open_if_path

SUBSETS = 100
"""Number of subsets of KID, as in the published code."""

SUBSET_ROWS = 1000
"""Default number of rows of a subset of each store, as in the published code."""


@dataclass(frozen=True)
class DataSetDistance:
    """Distances of two stores in a layer.

    Attributes:
        kid: mean of KID over the subsets, near 0 for images of one distribution, where it is
            negative as often as positive.
        kid_std: standard deviation over the subsets, 0 if a subset has all rows of both stores.
        subset_rows: number of rows of each store in a subset.
        frechet: squared Fréchet distance, or None if it is not computed.
        not_available: reason why it is not, or None.
    """

    layer: str
    kid: float
    kid_std: float
    subset_rows: int
    frechet: float | None
    not_available: str | None
    rows: int
    other_rows: int


def data_set_distance(
    store: FeatureStore | str | os.PathLike[str],
    other: FeatureStore | str | os.PathLike[str],
    layer: str,
    *,
    subset_rows: int = SUBSET_ROWS,
    seed: int = 0,
    device: str = "auto",
    on_progress: Callable[[int], None] | None = None,
) -> DataSetDistance:
    """Compute how far the images of two stores are apart in a layer of the same model.

    KID is the mean, over random subsets of both stores, of the unbiased estimate of the squared
    maximum mean discrepancy with the kernel k(x, y) = (x.y / D + 1)^3 of vectors of D values:

        sum_{i != j} (k(x_i, x_j) + k(y_i, y_j)) / (m (m - 1)) - 2 sum_{i, j} k(x_i, y_j) / m^2

    M. Bińkowski et al., Demystifying MMD GANs, ICLR 2018. With the pool3 of the published Inception
    model it is the KID of the literature, and the Fréchet distance the FID. The mean and the
    subsets of m = 1000 rows are those of their code; a store with fewer rows gives all.

    Args:
        store: open store or its path.
        other: another of the same model, usually of other images.
        layer: name of the layer in both; a map counts as one long vector.
        subset_rows: largest number m of rows of each store in a subset.
        on_progress: called with 1 after each of the 100 subsets.

    Raises:
        StoreMismatchError: weights, transforms or tensors of the layer differ.
        ConfigError: a store has fewer than two rows that are ok, or a subset would.
        LayerError: one of the stores has no such layer.
    """
    store, other = open_if_path(store), open_if_path(other)
    if subset_rows < 2:
        raise ConfigError(f"subset_rows={subset_rows}: expected a whole number of at least 2.")
    refuse_other_layer(store, other, layer)
    compute_device = float64_device(choose_device(device))
    one, two = (
        LayerVectors([LayerRows(each, layer, np.flatnonzero(each.ok))], compute_device)
        for each in (store, other)
    )
    m = min(subset_rows, len(one), len(two))
    if m < 2:
        raise ConfigError(
            f"{store.root} and {other.root}, {layer}: a distance needs two rows that are ok in "
            "each store."
        )
    rng = np.random.default_rng(seed)
    discrepancies = []
    for _ in range(SUBSETS):
        places = [np.sort(rng.permutation(len(each))[:m]) for each in (one, two)]
        x, y = one.take(places[0]).double(), two.take(places[1]).double()
        discrepancies.append(squared_discrepancy(x, y))
        if on_progress is not None:
            on_progress(1)
    frechet, reason = _frechet(one, two)
    spread = float(np.ptp(discrepancies))
    return DataSetDistance(
        layer,
        float(np.mean(discrepancies)),
        # np.std of equal numbers is their rounding error, and it squares large ones.
        spread * float(np.std(np.divide(discrepancies, spread))) if spread else 0.0,
        m,
        frechet,
        reason,
        len(one),
        len(two),
    )


def squared_discrepancy(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute the unbiased squared maximum mean discrepancy of (m, D) and (m, D) float64 rows."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products: torch.Tensor = (a @ b.T / x.shape[1] + 1) ** 3
        return products

    m = len(x)
    within = 0.0
    for rows in (x, y):
        products = kernel(rows, rows)
        within += float(products.sum() - products.diagonal().sum())
    return within / (m * (m - 1)) - 2 * float(kernel(x, y).mean())


def _frechet(one: LayerVectors, two: LayerVectors) -> tuple[float | None, str | None]:
    """Return the squared Fréchet distance of all rows, or None and the reason."""
    if one.width > MAX_SPECTRUM:
        return None, f"{one.width} features are more than {MAX_SPECTRUM}"
    moments_of_both = []
    for vectors in (one, two):
        moments = Moments.empty(vectors.width)
        for _, block in vectors.all_blocks(vectors.block_rows):
            moments = moments.merge(Moments.of(block.cpu()))
        moments_of_both.append(moments)
    return gaussian_distance(*moments_of_both), None
