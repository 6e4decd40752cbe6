"""How alike the layers are, for the page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from featx.analysis.similarity.representation_similarity import layer_similarity
from featx.errors import ConfigError
from featx.store.reader import FeatureStore

ROWS = 1000
"""Pictures, at the most; the work grows with their square."""

Table = list[list[float | None]]


@dataclass(frozen=True)
class Likeness:
    """Linear CKA of each layer with each: plain and debiased; None where it is not defined.

    Attributes:
        rows: pictures it was taken over.
        note: why there is none, or nothing.
    """

    layers: tuple[str, ...]
    cka: Table
    debiased: Table
    rows: int
    note: str


def likeness_of(
    store: FeatureStore, layers: tuple[str, ...], rows: int, seed: int, device: str
) -> Likeness:
    """Compare layers over random pictures."""
    if len(layers) < 2:
        return Likeness(layers, [], [], 0, "One layer has nothing to be compared with.")
    try:
        found = layer_similarity(store, None, layers, min(rows, ROWS), seed, device)
    except ConfigError as error:
        return Likeness(layers, [], [], 0, str(error))

    def as_table(name: str) -> Table:
        values = found.measures[name].tolist()
        return [[None if np.isnan(v) else round(v, 4) for v in row] for row in values]

    return Likeness(found.layers, as_table("cka"), as_table("cka_debiased"), found.num_rows, "")
