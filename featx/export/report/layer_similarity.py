"""Similarity of all pairs of layers, for the report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from featx.analysis.similarity import layer_similarity
from featx.errors import ConfigError
from featx.store import FeatureStore

ROWS = 1000
"""Maximum number of images; the work grows with its square."""

Table = list[list[float | None]]


@dataclass(frozen=True)
class LayerSimilaritySection:
    """Linear CKA of all pairs of layers; None if it is undefined.

    Attributes:
        layers: names of the layers.
        cka: CKA by row and column.
        debiased: debiased CKA by row and column.
        rows: number of images used.
        note: reason why there is no comparison, or ''.
    """

    layers: tuple[str, ...]
    cka: Table
    debiased: Table
    rows: int
    note: str


def similarity_of(
    store: FeatureStore, layers: tuple[str, ...], rows: int, seed: int, device: str
) -> LayerSimilaritySection:
    """Compare layers over random images."""
    if len(layers) < 2:
        return LayerSimilaritySection(
            layers, [], [], 0, "There is only one layer, so none can be compared."
        )
    try:
        similarity = layer_similarity(
            store, None, layers, num_rows=min(rows, ROWS), seed=seed, device=device
        )
    except ConfigError as error:
        return LayerSimilaritySection(layers, [], [], 0, str(error))

    def as_table(name: str) -> Table:
        values = similarity.measures[name].tolist()
        return [[None if np.isnan(v) else round(v, 4) for v in row] for row in values]

    return LayerSimilaritySection(
        similarity.layers, as_table("cka"), as_table("cka_debiased"), similarity.num_rows, ""
    )
