"""Intervals of the metrics of pixels against a plain bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from featx.analysis.probe.patches import PixelCounts
from featx.analysis.probe.pixel_task import pixel_interval

pytestmark = pytest.mark.usefixtures("one_thread")

RNG = np.random.default_rng(1)
TRUE, SAID = RNG.integers(0, 5, (7, 400)), RNG.integers(0, 6, (7, 400))


def counted() -> PixelCounts:
    counts = PixelCounts.empty(7, 6)
    for row in range(7):
        counts.add(counts.pixels[row], TRUE[row], SAID[row], counts.confusion)
        counts.add(counts.patches[row], TRUE[row], SAID[row])
    return counts


@pytest.mark.parametrize("groups", [None, np.array([0, 0, 1, 1, 2, 3, 3])])
def test_the_interval_draws_images_or_groups(groups: np.ndarray | None) -> None:
    found = pixel_interval(counted().pixels, groups)
    units = np.arange(7) if groups is None else groups
    each = [
        confusion_matrix(true, said, labels=range(6)) for true, said in zip(TRUE, SAID, strict=True)
    ]
    rng, values = np.random.default_rng(7), []
    for _ in range(800):
        drawn = rng.integers(units.max() + 1, size=units.max() + 1)
        rows = np.concatenate([np.flatnonzero(units == unit) for unit in drawn])
        matrix = sum(each[row] for row in rows)
        right = np.diag(matrix)[:5]
        values.append((right / (matrix.sum(0) + matrix.sum(1) - np.diag(matrix))[:5]).mean())
    assert found["interval"] == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=0.004)
    assert found["units"] == units.max() + 1
    assert found["unit"] == ("image" if groups is None else "group")
    assert pixel_interval(counted().pixels[:1], None)["interval"] is None
