"""Linear probe of patches: choose a penalty, fit, and predict the class of each pixel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from featx.analysis.probe import logistic_regression
from featx.analysis.probe.heads import Scaler
from featx.analysis.probe.patches import Ints, LabelledPatches, Patches
from featx.analysis.probe.segmentation_metrics import PixelCounts, miou
from featx.analysis.probe.splits import Places, Split

_BLOCK_NUMBERS = 1 << 24
"""Largest number of logits on the crop that are computed at a time: 64 MiB."""


@dataclass(frozen=True)
class PatchClassifier:
    """Linear classifier of patches.

    Attributes:
        scaler: standardisation of tokens.
        fit: weights and bias of the classes with a pixel in the training rows.
        classes: (C,) these classes.
    """

    scaler: Scaler
    fit: logistic_regression.Fit
    classes: torch.Tensor

    def predict(self, patches: Patches, places: Places) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield a place, the classes of its pixels (H, W), and those of its patches (T,).

        The logits of the patches are enlarged to the crop by bilinear interpolation
        (align_corners=False), and the largest one is the class of a pixel.
        """
        height, width = patches.crop
        step = max(1, _BLOCK_NUMBERS // (height * width * len(self.classes)))
        for span, block in patches.blocks(places):
            for start in range(0, len(span), step):
                x = self.scaler(block[start : start + step])
                logits = x @ self.fit.weight.T + self.fit.bias
                maps = logits.transpose(1, 2).reshape(len(x), -1, *patches.grid)
                enlarged = torch.nn.functional.interpolate(
                    maps, size=(height, width), mode="bilinear", align_corners=False
                )
                pixels = self.classes[enlarged.argmax(1)].cpu().numpy()
                cells = self.classes[logits.argmax(2)].cpu().numpy()
                places_of_step = span[start : start + step].tolist()
                yield from zip(places_of_step, pixels, cells, strict=True)


@dataclass(frozen=True)
class FittedPatches:
    """Result of one split.

    Attributes:
        tested: counts of pixels and patches of the test rows.
        l2: the chosen penalty.
        validation_loss: mean cross-entropy of the pixels of the validation rows, with one
            probability for all pixels of a patch.
        validation_miou: mIoU on the validation rows, of which the fit knows nothing.
        sweep: every penalty that was tried, as JSON types.
        num_patches: number of patches with a label in the training rows.
        notes: notes for the user.
    """

    tested: PixelCounts
    l2: float
    validation_loss: float
    validation_miou: float
    sweep: list[dict[str, Any]]
    num_patches: int
    notes: list[str]


def fit_patches(patches: Patches, split: Split, l2: float | None) -> FittedPatches:
    """Choose the penalty with the smallest loss on validation rows, fit, and count test pixels.

    The loss is the mean cross-entropy over pixels with a label. All pixels of a patch have the
    same logits, so that the counts of the classes in its cell are all that is needed, and the
    problem is the convex one of the linear probe.
    """
    strengths = logistic_regression.L2_GRID if l2 is None else (l2,)
    on_fit, trials = _sweep(patches, split, strengths)
    best = logistic_regression.best_trial(trials)
    on_validation = count_pixels(
        PatchClassifier(on_fit.scaler, best.fit, on_fit.classes), patches, split.validation
    )
    final, num_patches = _final(patches, split.train, best.l2)
    notes = logistic_regression.note_grid_end(best.l2, strengths)
    notes += final.fit.notes(best.l2)
    if len(final.classes) < patches.num_classes:
        notes.append(
            f"{patches.num_classes - len(final.classes)} classes have no pixel in the training "
            "rows and are never predicted"
        )
    return FittedPatches(
        count_pixels(final, patches, split.test),
        best.l2,
        best.loss,
        miou(on_validation.pixels.sum(0)),
        [trial.as_dict() for trial in trials],
        num_patches,
        notes,
    )


def count_pixels(classifier: PatchClassifier, patches: Patches, places: Places) -> PixelCounts:
    """Predict some rows and count their pixels and patches by class.

    The class of a patch is the one with at least half of the pixels with a label in its cell; a
    patch without such a class does not count.
    """
    counts = PixelCounts.empty(len(places), patches.num_classes)
    for row, (place, pixels, cells) in enumerate(classifier.predict(patches, places)):
        mask = patches.mask(place)
        has_label = mask >= 0
        counts.add(
            counts.pixels[row], mask[has_label], pixels[has_label], confusion=counts.confusion
        )
        cell_counts = patches.counts(place)
        is_sure = 2 * cell_counts.max(1) >= np.maximum(cell_counts.sum(1), 1)
        counts.add(counts.patches[row], cell_counts.argmax(1)[is_sure], cells[is_sure])
    return counts


def _sweep(
    patches: Patches, split: Split, strengths: tuple[float, ...]
) -> tuple[PatchClassifier, list[logistic_regression.Trial]]:
    """Fit all penalties on `split.fit`."""
    rows, held_out = patches.read_labelled(split.fit), patches.read_labelled(split.validation)
    scaler, classes = _standardise(rows)
    held_out.standardise(scaler)
    # A class without a training pixel has no finite logit. Its loss is the same for all penalties.
    counts = held_out.counts[:, classes].double()
    total = counts.sum().clamp(min=1)

    def judge(fit: logistic_regression.Fit) -> tuple[float, float]:
        logits = (held_out.x @ fit.weight.T + fit.bias).double()
        right = counts.gather(1, logits.argmax(1, keepdim=True)).sum()
        loss = -torch.dot(counts.flatten(), logits.log_softmax(1).flatten())
        return float(right / total), float(loss / total)

    trials = logistic_regression.sweep(
        rows.x, rows.counts[:, classes], len(classes), strengths, judge
    )
    return PatchClassifier(scaler, trials[-1].fit, classes), trials


def _final(patches: Patches, places: Places, l2: float) -> tuple[PatchClassifier, int]:
    """Fit a penalty on some rows; returns the classifier and the number of patches."""
    rows = patches.read_labelled(places)
    scaler, classes = _standardise(rows)
    fit = logistic_regression.fit_logistic(
        rows.x, rows.counts[:, classes], len(classes), l2, last=True
    )
    return PatchClassifier(scaler, fit, classes), len(rows.x)


def _standardise(rows: LabelledPatches) -> tuple[Scaler, torch.Tensor]:
    """Standardise patches in place; returns how, and the classes that they have."""
    scaler = rows.scaler()
    rows.standardise(scaler)
    return scaler, rows.counts.any(0).nonzero()[:, 0]
