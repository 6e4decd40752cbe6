"""Layer similarity: measures of two layers over the same images.

gram_measures.py and cross_measures.py define them: CKA, debiased CKA and RSA from matrices of n x n
values, one per layer, and CKA of more images, SVCCA and the Procrustes distance from one product of
features per pair of layers. If the number of features is not small compared with that of images,
CKA and SVCCA are near 1 for any two layers; debiased CKA is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.layer_vectors import LayerRows, LayerVectors
from featx.analysis.similarity.cross_measures import (
    MAX_WIDTH,
    CentredRows,
    LayerProducts,
    centred_rows,
    compare_products,
    cross_product,
    layer_products,
)
from featx.analysis.similarity.gram_measures import RSA_DISTANCES, Matrix, Rows, signatures
from featx.base import check_memory, choose_device, float64_device, free_memory, return_freed_memory
from featx.config import USUAL_MEASURES, CkaConfig, check_choice, names_tuple
from featx.errors import ConfigError, counted
from featx.store import FeatureStore, matching_layers, open_if_path
from featx.types import count_different_images

ROWS = 2000
"""Default number of images."""

GRAM_ROWS = 4096
"""Largest number of images for which CKA is computed from matrices of n x n values, which is faster
for many layers; they take 134 MB a layer."""

RSA_ROWS = 10_000
"""Largest number of images for RSA, which needs such a matrix: 800 MB, and 200 MB kept a layer."""

_FEWEST_ROWS = 4
"""Least number of images: debiased CKA is not defined for three."""

_VALUES = 1 << 16
"""Values of unit vectors that are multiplied at a time."""

_GRAM_MEASURES = ("cka", "cka_debiased", *RSA_DISTANCES)
"""Measures that a matrix of n x n values gives."""


@dataclass(frozen=True, eq=False)
class LayerSimilarity:
    """Similarity of every layer of one list to every layer of another.

    Attributes:
        measures: name of a measure -> (layers, others) float64; NaN if a layer is the same for all
            images. 'procrustes' is a distance, 0 for layers that differ by a rotation and a factor.
        num_rows: number of images that were used.
        num_common: number of images that were available.
        num_different: number of used images that have other bytes in the second store.
    """

    layers: tuple[str, ...]
    others: tuple[str, ...]
    measures: dict[str, Matrix]
    num_rows: int
    num_common: int
    num_different: int = 0


def layer_similarity(
    store: FeatureStore | str | os.PathLike[str],
    other: FeatureStore | str | os.PathLike[str] | None = None,
    layers: Sequence[str] | str | None = None,
    *,
    num_rows: int = ROWS,
    seed: int = 0,
    device: str = "auto",
    measures: Sequence[str] = USUAL_MEASURES,
    on_progress: Callable[[int], None] | None = None,
) -> LayerSimilarity:
    """Compare the layers of a store with each other, or with those of another store.

    Args:
        store: open store or its path.
        other: second store, whose rows are matched by key; only rows that failed in neither are
            used.
        layers: names or globs, applied to both stores; None for all layers.
        num_rows: number of random images, or all if there are fewer.
        measures: some of 'cka', 'cka_debiased', 'rsa', 'rsa_cosine', 'svcca' and 'procrustes'.
        on_progress: called with 1 after each layer of the first store.

    Raises:
        ConfigError: a measure is unknown, there are fewer than four common images,
            only one layer, too many images for RSA, or a layer is too wide for so many images.
        LayerError: one of the stores has no such layer.
    """
    store, other = open_if_path(store), None if other is None else open_if_path(other)
    names: list[Any] = list(names_tuple(measures))
    options = CkaConfig(measures=names, rows=num_rows)
    measures = options.chosen_measures
    rows, other_rows, num_common = _chosen_rows(store, other, options.rows, seed)
    count = len(rows)
    compute_device = float64_device(choose_device(device))
    left = _Layers(store, rows, matching_layers(store, layers), compute_device)
    right, num_different = left, 0
    if other is not None:
        num_different = count_different_images(
            store.image_checksums[rows], other.image_checksums[other_rows]
        )
        right = _Layers(other, other_rows, matching_layers(other, layers), compute_device)
    elif len(left.names) < 2:
        listed = ", ".join(store.layers)
        more = f"more of {listed} with layers=, or " if len(store.layers) > 1 else ""
        raise ConfigError(
            f"{store.root} has one layer to compare, {left.names[0]}; name {more}another store as "
            "'store=[A,B]'."
        )
    gram_measures = [name for name in measures if _needs_gram(name, count)]
    cross_measures = [name for name in measures if name not in gram_measures]
    matrices: dict[str, Matrix] = {}
    if gram_measures:
        matrices |= _compare_by_grams(
            left,
            right,
            gram_measures,
            None if cross_measures else on_progress,
        )
    if cross_measures:
        matrices |= _compare_by_products(left, right, cross_measures, on_progress)
    sorted_matrices = {name: matrices[name] for name in measures}
    return LayerSimilarity(
        left.names, right.names, sorted_matrices, count, num_common, num_different
    )


def linear_cka(x: npt.ArrayLike, y: npt.ArrayLike, debiased: bool = False) -> float:
    """Compute the linear CKA of two matrices (n, D) and (n, E), or of any shape with n rows, that
    belong together; with `debiased`, of the U-centred matrices. Raises ConfigError if the numbers
    of rows differ or are below four, or a number is not finite.
    """
    x, y = _checked_matrices(x, y)
    return _compare_signatures(x, y, "cka_debiased" if debiased else "cka")


def rsa(x: npt.ArrayLike, y: npt.ArrayLike, distance: str = "correlation") -> float:
    """Compute Spearman's correlation of the distances of rows within two matrices of n rows and any
    shape. The distance is 'correlation', 1 minus Pearson's correlation of two rows, or 'cosine'.
    Raises ConfigError if the distance is unknown, the numbers of rows differ, or a number is not
    finite.
    """
    measure_of = {each: name for name, each in RSA_DISTANCES.items()}
    check_choice("distance", distance, list(measure_of))
    x, y = _checked_matrices(x, y)
    return _compare_signatures(x, y, measure_of[distance])


def _compare_signatures(x: Matrix, y: Matrix, measure: str) -> float:
    """Compute a measure of gram_measures.py for two checked matrices."""
    a, b = (signatures(Rows.of_matrix(z), [measure])[measure] for z in (x, y))
    return float(_dot_products(a[None], b[None])[0, 0])


def svcca(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Compute the mean canonical correlation of the principal directions of two matrices of n rows
    and any shape. Raises ConfigError if the numbers of rows differ, or a number is not finite.
    """
    return _compare_matrices(x, y, "svcca")


def procrustes_distance(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Compute the squared distance, from 0 to 2, of two centred matrices of Frobenius norm 1 after
    the best rotation of one of them. Both have n rows and any shape. Raises ConfigError if the
    numbers of rows differ, or a number is not finite.
    """
    return _compare_matrices(x, y, "procrustes")


def _compare_matrices(x: npt.ArrayLike, y: npt.ArrayLike, measure: str) -> float:
    """Compute a measure of cross_measures.py for two matrices in memory."""
    x, y = _checked_matrices(x, y)
    one, other = (centred_rows(Rows.of_matrix(z)) for z in (x, y))
    first, second = (layer_products(rows, [measure]) for rows in (one, other))
    return compare_products(first, second, cross_product(one, other), [measure])[measure]


def _checked_matrices(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[Matrix, Matrix]:
    """Return two matrices (n, D) and (n, E) in float64. Raise ConfigError unless they have the same
    number of rows, four or more, all of finite real numbers.
    """
    matrices = []
    for name, values in (("first", x), ("second", y)):
        if isinstance(values, torch.Tensor) and values.is_floating_point():
            values = values.detach().cpu().double()  # numpy has no bfloat16
        given = np.asarray(values)
        if given.dtype.kind not in "biuf" or not given.ndim or 0 in given.shape[1:]:
            raise ConfigError(
                f"the {name} matrix has the shape {given.shape} and the type {given.dtype}; "
                "expected rows of real numbers."
            )
        matrix = given.reshape(len(given), math.prod(given.shape[1:])).astype(np.float64)
        if num_bad := int((~np.isfinite(matrix)).any(1).sum()):
            raise ConfigError(
                f"{num_bad} of {len(matrix)} rows of the {name} matrix have numbers that are not "
                "finite, such as those of failed images; leave them out: store[layer][store.ok]."
            )
        matrices.append(matrix)
    first, second = matrices
    if len(first) != len(second):
        raise ConfigError(
            f"the matrices have {len(first)} and {len(second)} rows; expected the same images in "
            "both."
        )
    if len(first) < _FEWEST_ROWS:
        raise ConfigError(f"the matrices have {counted(len(first), 'row')}; expected at least 4.")
    return first, second


class _Layers:
    """Layers of a store over some rows."""

    def __init__(
        self,
        store: FeatureStore,
        rows: npt.NDArray[np.int64],
        names: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self.names = names
        self._store, self.rows, self._device = store, rows, device
        self._coordinates: dict[str, CentredRows] = {}

    def vectors(self, name: str) -> LayerVectors:
        """Open a layer; a small one is read into memory."""
        return LayerVectors([LayerRows(self._store, name, self.rows)], self._device)

    def centred(self, name: str) -> CentredRows:
        """Open a layer as centred rows; coordinates, which take time, are computed once."""
        if name in self._coordinates:
            return self._coordinates[name]
        vectors = self.vectors(name)
        if MAX_WIDTH < vectors.width <= len(vectors):
            raise ConfigError(
                f"{name} has {vectors.width} values a row; over {len(vectors)} rows, layers of at "
                f"most {MAX_WIDTH} are compared. Take fewer rows (cka.rows), or extract it with "
                "reduce=avg."
            )
        rows = centred_rows(Rows.of_layer(vectors))
        if vectors.width > len(vectors):
            self._coordinates[name] = rows
        return rows


def _needs_gram(measure: str, num_rows: int) -> bool:
    """Return whether a measure is computed from matrices of n x n values."""
    if measure in RSA_DISTANCES and num_rows > RSA_ROWS:
        raise ConfigError(
            f"RSA of {num_rows} images compares {num_rows * (num_rows - 1) // 2} distances; at "
            f"most {RSA_ROWS} images are taken. Give a smaller cka.rows, or leave {measure} out: "
            "'cka.measures=[cka,cka_debiased]'."
        )
    return measure in RSA_DISTANCES or (measure in _GRAM_MEASURES and num_rows <= GRAM_ROWS)


def _compare_by_grams(
    left: _Layers,
    right: _Layers,
    measures: Sequence[str],
    on_progress: Callable[[int], None] | None,
) -> dict[str, Matrix]:
    """Compute measures of gram_measures.py for all pairs of layers.

    Raises ConfigError if the unit vectors of all layers do not fit into memory.
    """
    n = len(left.rows)
    lengths = {name: n * n if name == "cka" else n * (n - 1) // 2 for name in measures}
    num_layers = len(left.names) + (0 if right is left else len(right.names))
    needed, free = 4 * num_layers * sum(lengths.values()), free_memory()
    check_memory(
        needed,
        f"{' and '.join(measures)} of {n} rows of {num_layers} layers",
        "Give a smaller cka.rows, or name fewer layers with 'layers=[...]'.",
    )

    def unit_vectors(
        layers: _Layers, on_progress: Callable[[int], None] | None
    ) -> dict[str, torch.Tensor]:
        """Compute the unit vectors of every layer, one Gram matrix at a time."""
        found = {
            name: torch.empty((len(layers.names), lengths[name]), dtype=torch.float32)
            for name in measures
        }
        for i, layer in enumerate(layers.names):
            rows = Rows.of_layer(layers.vectors(layer))
            for name, vector in signatures(rows, measures).items():
                found[name][i] = vector
            # The memory of freed Gram matrices, which malloc keeps, is up to three times as much.
            if free is not None and 4 * needed > free:
                return_freed_memory()
            if on_progress is not None:
                on_progress(1)
        return found

    others = None if right is left else unit_vectors(right, None)
    vectors = unit_vectors(left, on_progress)
    return {name: _dot_products(vectors[name], (others or vectors)[name]) for name in measures}


def _dot_products(x: torch.Tensor, y: torch.Tensor) -> Matrix:
    """Compute the (n, m) products of (n, D) and (m, D) float32 vectors in float64, some values at a
    time.
    """
    total = torch.zeros((len(x), len(y)), dtype=torch.float64)
    for some, others in zip(torch.split(x, _VALUES, 1), torch.split(y, _VALUES, 1), strict=True):
        total += some.double() @ others.double().T
    return total.numpy()


def _compare_by_products(
    left: _Layers,
    right: _Layers,
    measures: Sequence[str],
    on_progress: Callable[[int], None] | None,
) -> dict[str, Matrix]:
    """Compute measures of cross_measures.py for all pairs of layers.

    The rows of two layers are in memory at a time, and coordinates of layers with more values than
    rows.
    """

    def self_products(layers: _Layers) -> list[LayerProducts]:
        return [layer_products(layers.centred(name), measures) for name in layers.names]

    is_same = right is left
    left_products = self_products(left)
    right_products = left_products if is_same else self_products(right)
    matrices = {
        name: np.full((len(left_products), len(right_products)), np.nan) for name in measures
    }
    for i, name in enumerate(left.names):
        rows = left.centred(name)
        for j in range(i if is_same else 0, len(right_products)):
            product = cross_product(rows, right.centred(right.names[j]))
            values = compare_products(left_products[i], right_products[j], product, measures)
            for measure, value in values.items():
                matrices[measure][i, j] = value
                if is_same:
                    matrices[measure][j, i] = value
        if on_progress is not None:
            on_progress(1)
    return matrices


def _chosen_rows(
    store: FeatureStore, other: FeatureStore | None, num_rows: int, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Choose rows at random among those that both stores have and that did not fail."""
    rows = other_rows = np.flatnonzero(store.ok)
    if other is not None:
        other_rows = np.flatnonzero(other.ok)
        keys = store.key_bytes[rows], other.key_bytes[other_rows]
        _, a, b = np.intersect1d(*keys, assume_unique=True, return_indices=True)
        order = np.argsort(a)
        rows, other_rows = rows[a[order]], other_rows[b[order]]
    if len(rows) < _FEWEST_ROWS:
        where = f"{store.root}" if other is None else f"both {store.root} and {other.root}"
        raise ConfigError(
            f"{counted(len(rows), 'image is', 'images are')} ok in {where}"
            f"{'' if other is None else ', matched by key'}; expected at least 4."
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:num_rows])
    return rows[chosen], other_rows[chosen], len(rows)
