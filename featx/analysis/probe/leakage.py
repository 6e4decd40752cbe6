"""Test rows that a probe has seen: equal and nearly equal vectors on both sides of a split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from featx.analysis.probe.heads import fit_scaler
from featx.analysis.probe.labelled_rows import Features
from featx.analysis.probe.splits import Places, Split

NEAR_COSINE = 0.9
"""Cosine of standardised vectors from which rows count as near-duplicates. Of 287 copies of
Caltech-101 images (JPEG quality 60, 0.7 of the size, 4 pixels cut off) about 3 in 4 reach it in the
1280 features of EfficientNet-Lite0, of 400 other images of one texture none."""

MIN_FEATURES = 64
"""In fewer features, different images have such cosines by chance."""

MAX_PRODUCTS = 1 << 39
"""Multiplications for near-duplicates, at the most: some 15 s on two cores."""

_BLOCK_NUMBERS = 1 << 24


def repeated_rows(features: Features, splits: Sequence[Split]) -> int | None:
    """Test rows whose vector is, bit for bit, that of a training row; None where it is streamed."""
    if features.whole is None:
        return None
    rows = features.whole.cpu().numpy()
    digests = np.array([hashlib.blake2b(row, digest_size=16).hexdigest() for row in rows])
    return sum(int(np.isin(digests[s.test], digests[s.train]).sum()) for s in splits)


def near_duplicates(features: Features, layer: str, splits: Sequence[Split]) -> dict[str, Any]:
    """Test rows with a near-duplicate among the training rows, as far as that is cheap.

    Every pair of a test and a training row is compared, by the cosine of vectors that are
    standardised over all rows: of the features as they are, all images have cosines near 1.

    Args:
        features: of all places.
        layer: its name.
        splits: one, or one a fold.

    Returns:
        layer, cosine, rows (None where it was not checked) and not_checked (why, or None).
    """
    found: dict[str, Any] = {"layer": layer, "cosine": NEAR_COSINE, "rows": None}
    pairs = sum(len(split.test) * len(split.train) for split in splits)
    if features.width < MIN_FEATURES:
        return found | {
            "not_checked": f"no layer has {MIN_FEATURES} features or more, and with fewer "
            "different images look alike"
        }
    if features.whole is None:
        return found | {"not_checked": f"{layer} is streamed; raise probe.memory_gib"}
    if pairs * features.width > MAX_PRODUCTS:
        return found | {
            "not_checked": f"{pairs:.2g} pairs of rows with {features.width} features are more "
            f"than {MAX_PRODUCTS:.2g} multiplications"
        }
    scaler = fit_scaler(features, np.arange(len(features)))
    unit = torch.nn.functional.normalize(scaler(features.whole), dim=1)
    count = sum(_count_near(unit, split.test, split.train) for split in splits)
    return found | {"rows": count, "not_checked": None}


def _count_near(unit: torch.Tensor, test: Places, train: Places) -> int:
    bank = unit[torch.from_numpy(train).to(unit.device)]
    at_once = max(1, _BLOCK_NUMBERS // len(train))
    count = 0
    for start in range(0, len(test), at_once):
        asked = unit[torch.from_numpy(test[start : start + at_once]).to(unit.device)]
        count += int(((asked @ bank.T).amax(1) >= NEAR_COSINE).sum())
    return count
