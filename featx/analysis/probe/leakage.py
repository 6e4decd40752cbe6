"""Leakage: test rows whose vectors are equal or nearly equal to those of training rows."""

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
"""Cosine of standardised vectors from which rows count as near-duplicates. Among 287 copies of
Caltech-101 images (JPEG quality 60, 0.7 of the size, 4 pixels cropped), about 3 of 4 reach it in
the 1280 features of EfficientNet-Lite0; among 400 different images of one texture, none."""

MIN_FEATURES = 64
"""Minimum number of features. With fewer, different images reach such cosines by chance."""

MAX_PRODUCTS = 1 << 39
"""Maximum number of multiplications for the search, about 15 s on two cores."""

_BLOCK_NUMBERS = 1 << 24
"""Number of cosines in memory at a time."""


def repeated_rows(features: Features, splits: Sequence[Split]) -> int | None:
    """Count the test rows whose vector equals that of a training row bit for bit.

    Args:
        features: vectors of all places.
        splits: one split, or one per fold.

    Returns:
        the number over all splits, or None if the features are streamed.
    """
    if features.whole is None:
        return None
    rows = features.whole.cpu().numpy()
    digests = np.array([hashlib.blake2b(row, digest_size=16).hexdigest() for row in rows])
    return sum(int(np.isin(digests[s.test], digests[s.train]).sum()) for s in splits)


def near_duplicates(features: Features, layer: str, splits: Sequence[Split]) -> dict[str, Any]:
    """Count the test rows with a near-duplicate among the training rows, if that is affordable.

    All pairs of a test and a training row are compared by the cosine of vectors that are
    standardised over all rows; cosines of the raw features are near 1 for all images.

    Args:
        features: vectors of all places.
        layer: name of the layer.
        splits: one split, or one per fold.

    Returns:
        the layer, the cosine, `rows` (the number, or None if not checked) and `not_checked` (the
        reason, or None).
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
    """Count the test places with a training place at a cosine of NEAR_COSINE or more.

    Args:
        unit: (N, D) standardised vectors of length 1.
        test: test places.
        train: training places.
    """
    bank = unit[torch.from_numpy(train).to(unit.device)]
    at_once = max(1, _BLOCK_NUMBERS // len(train))
    count = 0
    for start in range(0, len(test), at_once):
        asked = unit[torch.from_numpy(test[start : start + at_once]).to(unit.device)]
        count += int(((asked @ bank.T).amax(1) >= NEAR_COSINE).sum())
    return count
