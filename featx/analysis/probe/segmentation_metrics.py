"""Metrics of predicted classes of pixels, from counts for each image, and their interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metric_intervals import INTERVAL_RESAMPLES

Ints = npt.NDArray[np.int64]

_RESAMPLES_PER_BLOCK = 50
"""Number of resamples that are computed together."""


@dataclass(frozen=True)
class PixelCounts:
    """Counts of the pixels and patches of some rows by class.

    Attributes:
        pixels: (n, 3, K) int64 for each row: pixels of a class, pixels predicted as it, and pixels
            of the class that are predicted as it.
        patches: (n, 3, K) the same for patches.
        confusion: (K, K) pixels of all rows; row i, column j: of class i, predicted as j.
    """

    pixels: Ints
    patches: Ints
    confusion: Ints

    @classmethod
    def empty(cls, num_rows: int, num_classes: int) -> PixelCounts:
        """Return counts of 0."""
        each = (num_rows, 3, num_classes)
        return cls(
            np.zeros(each, np.int64),
            np.zeros(each, np.int64),
            np.zeros((num_classes, num_classes), np.int64),
        )

    @classmethod
    def join(cls, parts: Sequence[PixelCounts]) -> PixelCounts:
        """Return the counts of the rows of several parts, one after the other."""
        return cls(
            np.concatenate([part.pixels for part in parts]),
            np.concatenate([part.patches for part in parts]),
            np.sum([part.confusion for part in parts], axis=0),
        )

    @staticmethod
    def add(row: Ints, true: Ints, predicted: Ints, confusion: Ints | None = None) -> None:
        """Add pixels or patches to the counts of a row."""
        size = row.shape[1]
        matrix = np.bincount(true * size + predicted, minlength=size * size).reshape(size, size)
        row += np.stack([matrix.sum(1), matrix.sum(0), np.diag(matrix)])
        if confusion is not None:
            confusion += matrix


def miou(counts: Ints) -> float:
    """Compute the mean of TP / (TP + FP + FN) over the classes with a true pixel.

    Returns:
        the mean, NaN without a pixel.
    """
    return float(_mious(counts[None].astype(np.float64))[0])


def segmentation_metrics(counts: PixelCounts) -> dict[str, Any]:
    """Compute all metrics of some rows.

    Returns:
        miou; pixel_accuracy; mean_accuracy, the mean over classes of the share of their pixels that
        are right; patch_miou; and iou, accuracy_of_classes (None for a class without a pixel) and
        pixels_of_classes, one number for each class. A metric is None if there is nothing to count.
    """
    true, predicted, right = counts.pixels.sum(0)
    has_pixels = true > 0
    iou = right / np.maximum(true + predicted - right, 1)
    accuracy = right / np.maximum(true, 1)
    return {
        "miou": _or_none(miou(counts.pixels.sum(0))),
        "pixel_accuracy": _or_none(float(right.sum() / true.sum()) if has_pixels.any() else np.nan),
        "mean_accuracy": _or_none(
            float(accuracy[has_pixels].mean()) if has_pixels.any() else np.nan
        ),
        "patch_miou": _or_none(miou(counts.patches.sum(0))),
        "iou": [
            float(value) if is_known else None
            for value, is_known in zip(iou, has_pixels, strict=True)
        ],
        "accuracy_of_classes": [
            float(value) if is_known else None
            for value, is_known in zip(accuracy, has_pixels, strict=True)
        ],
        "pixels_of_classes": true.tolist(),
    }


def interval_entry(pixels: Ints, groups: Ints | None) -> dict[str, Any]:
    """Return the 95 % percentile interval of mIoU by the bootstrap of images or groups.

    Pixels of one image depend on each other, so that they are never drawn one by one. mIoU of a
    resample is over the classes that it has.

    Returns:
        `interval`, None if it is equal in all resamples; `resamples`, `unit` and `units`.
    """
    unit_of_row = np.arange(len(pixels))
    if groups is not None:
        unit_of_row = np.unique(groups, return_inverse=True)[1]
    units = int(unit_of_row.max()) + 1
    unit_counts = np.zeros((units, pixels[0].size))
    np.add.at(unit_counts, unit_of_row, pixels.reshape(len(pixels), -1))
    rng, mious = np.random.default_rng(0), list[float]()  # the same numbers for the same counts
    for start in range(0, INTERVAL_RESAMPLES, _RESAMPLES_PER_BLOCK):
        drawn = rng.integers(
            units, size=(min(_RESAMPLES_PER_BLOCK, INTERVAL_RESAMPLES - start), units)
        )
        times = np.stack([np.bincount(each, minlength=units) for each in drawn]).astype(np.float64)
        mious += _mious((times @ unit_counts).reshape(len(drawn), *pixels.shape[1:])).tolist()
    return {
        "interval": np.quantile(mious, [0.025, 0.975]).tolist() if len(set(mious)) > 1 else None,
        "resamples": INTERVAL_RESAMPLES,
        "unit": "image" if groups is None else "group",
        "units": units,
    }


def _mious(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Compute mIoU of (b, 3, K) counts, (b,)."""
    true, predicted, right = counts.transpose(1, 0, 2)
    has_pixels = true > 0
    iou = right / np.maximum(true + predicted - right, 1)
    with np.errstate(invalid="ignore"):
        mious: npt.NDArray[np.float64] = (iou * has_pixels).sum(1) / has_pixels.sum(1)
    return mious


def _or_none(value: float) -> float | None:
    """Return a number, or None for NaN."""
    return None if np.isnan(value) else value
