"""Leakage: test rows whose vectors are equal or nearly equal to those of training rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from featx.analysis.layer_vectors import LayerVectors
from featx.analysis.probe.heads import fit_scaler
from featx.analysis.probe.metrics import Ints, Matrix
from featx.analysis.probe.splits import Split
from featx.base import rows_of_block

NEAR_COSINE = 0.9
"""Cosine of standardised vectors from which rows count as near-duplicates. Among 287 copies of
Caltech-101 images (JPEG quality 60, 0.7 of the size, 4 pixels cropped), about 3 of 4 reach it in
the 1280 features of EfficientNet-Lite0; among 400 different images of one texture, none."""

MIN_FEATURES = 64
"""Minimum number of features. With fewer, different images reach such cosines by chance."""

MAX_PRODUCTS = 1 << 39
"""Maximum number of multiplications for the search, about 15 s on two cores."""


def repeated_rows(features: LayerVectors, splits: Sequence[Split]) -> int | None:
    """Count the test rows of all splits whose vector equals that of a training row bit for bit.

    It is unknown, None, if the features are streamed.
    """
    if features.whole is None:
        return None
    rows = features.whole.cpu().numpy()
    digests = np.array([hashlib.blake2b(row, digest_size=16).hexdigest() for row in rows])
    return sum(int(np.isin(digests[s.test], digests[s.train]).sum()) for s in splits)


@dataclass(frozen=True)
class NearDuplicates:
    """Test rows that are almost equal to a training row.

    Attributes:
        layer: layer whose vectors were compared.
        not_checked: reason why they were not compared, or None.
        test: (m,) int64 test places with a near-duplicate, the largest cosine first.
        training: (m,) int64 training place that is most similar to each of them.
        cosines: (m,) float64 cosine of each pair, NEAR_COSINE or more.
    """

    layer: str
    not_checked: str | None
    test: Ints
    training: Ints
    cosines: Matrix

    @cached_property
    def training_of(self) -> dict[int, int]:
        """Test place -> training place."""
        return dict(zip(self.test.tolist(), self.training.tolist(), strict=True))


def near_duplicates(features: LayerVectors, layer: str, splits: Sequence[Split]) -> NearDuplicates:
    """Find the test rows with a near-duplicate among the training rows, if that is affordable.

    All pairs of a test and a training row are compared by the cosine of vectors that are
    standardised over all rows; cosines of the raw features are near 1 for all images.
    """
    whole, reason = features.whole, _why_not_checked(features, layer, splits)
    if whole is None or reason is not None:
        none = np.empty(0, np.int64)
        return NearDuplicates(layer, reason, none, none, np.empty(0))
    scaler = fit_scaler(features, np.arange(len(features)))
    unit = scaler(whole)
    unit.div_(unit.norm(dim=1, keepdim=True).clamp_min_(1e-12))  # as F.normalize, in place
    # All features of a row that equals the mean of all rows are 0. Such rows are equal: with a
    # number of their own, their cosine is 1, and 0 with all others.
    is_zero = (unit == 0).all(1, keepdim=True)
    if bool(is_zero.any()):
        unit = torch.cat([unit, is_zero.to(unit.dtype)], 1)
    pairs = [_most_similar(unit, split.test, split.train) for split in splits]
    training, cosines = (np.concatenate(each) for each in zip(*pairs, strict=True))
    test = np.concatenate([split.test for split in splits])
    order = np.argsort(-cosines, kind="stable")
    order = order[cosines[order] >= NEAR_COSINE]
    return NearDuplicates(layer, None, test[order], training[order], cosines[order])


def _why_not_checked(features: LayerVectors, layer: str, splits: Sequence[Split]) -> str | None:
    """Return the reason why pairs of rows are not compared, or None."""
    pairs = sum(len(split.test) * len(split.train) for split in splits)
    if features.width < MIN_FEATURES:
        return (
            f"no layer has {MIN_FEATURES} features or more, and with fewer different images look "
            "alike"
        )
    if features.whole is None:
        return f"{layer} is streamed; raise probe.memory_gib"
    if pairs * features.width > MAX_PRODUCTS:
        return (
            f"{pairs:.2g} pairs of rows with {features.width} features are more than "
            f"{MAX_PRODUCTS:.2g} multiplications"
        )
    return None


def _most_similar(unit: torch.Tensor, test: Ints, train: Ints) -> tuple[Ints, Matrix]:
    """Find the training place with the largest cosine to each test place."""
    # A copy of the training rows would be another matrix in memory.
    is_other = torch.ones(len(unit), dtype=torch.bool)
    is_other[torch.from_numpy(train)] = False
    is_other = is_other.to(unit.device)
    block_rows = min(len(test), rows_of_block(4 * len(unit)))
    # One matrix for all blocks. malloc keeps what is freed (`keep_freed_memory`), and places the
    # results there, so that no further matrix would fit into the memory of an earlier one.
    products = unit.new_empty((block_rows, len(unit)))
    places, cosines = [], []
    for start in range(0, len(test), block_rows):
        queries = unit[torch.from_numpy(test[start : start + block_rows]).to(unit.device)]
        block = torch.mm(queries, unit.T, out=products[: len(queries)])
        best = block.masked_fill_(is_other, -math.inf).max(1)
        places.append(best.indices.cpu().numpy())
        cosines.append(best.values.cpu().double().numpy())
    return np.concatenate(places), np.concatenate(cosines)
