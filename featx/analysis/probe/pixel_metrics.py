"""Metrics of predicted classes of pixels, from counts for each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float64]


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

    `counts` are those of some rows, (n, 3, K). The mean is NaN without a pixel.
    """
    return float(resampled_mious(counts.sum(0)[None].astype(np.float64))[0])


def resampled_mious(counts: Matrix) -> Matrix:
    """Compute mIoU of (b, 3, K) counts, (b,)."""
    true, predicted, right = counts.transpose(1, 0, 2)
    with np.errstate(invalid="ignore"):
        iou = right / np.maximum(true + predicted - right, 1)
        mean: Matrix = (iou * (true > 0)).sum(1) / (true > 0).sum(1)
    return mean


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
    means = {
        "miou": miou(counts.pixels),
        "pixel_accuracy": right.sum() / true.sum() if has_pixels.any() else np.nan,
        "mean_accuracy": accuracy[has_pixels].mean() if has_pixels.any() else np.nan,
        "patch_miou": miou(counts.patches),
    }
    of_classes = {"iou": iou, "accuracy_of_classes": accuracy}
    return {
        **{name: None if np.isnan(mean) else float(mean) for name, mean in means.items()},
        **{
            name: [
                float(value) if is_known else None
                for value, is_known in zip(values, has_pixels, strict=True)
            ]
            for name, values in of_classes.items()
        },
        "pixels_of_classes": true.tolist(),
    }
