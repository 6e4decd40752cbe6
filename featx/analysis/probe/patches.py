"""Patches of a layer: tokens that have a place in the image, their linear probe, and its counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe import logistic_regression
from featx.analysis.probe.class_metrics import confusion_matrix
from featx.analysis.probe.heads import Scaler, scaler_of
from featx.analysis.probe.layer_rows import layer_tokens, require_tokens
from featx.analysis.probe.masks import Masks
from featx.analysis.probe.metrics import Ints, Matrix
from featx.analysis.probe.records import Choice
from featx.analysis.probe.splits import Split
from featx.base import rows_of_block
from featx.errors import ConfigError, LayerError
from featx.store import FeatureStore


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
        matrix = confusion_matrix(true, predicted, row.shape[1])
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


def segmentation_metrics(counts: PixelCounts) -> dict[str, object]:
    """Compute all metrics of some rows. Return miou; pixel_accuracy; mean_accuracy, the mean over
    classes of the share of their pixels that are right; patch_miou; and iou, accuracy_of_classes
    (None for a class without a pixel) and pixels_of_classes, one number for each class. A metric is
    None if there is nothing to count.
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


def require_patches(store: FeatureStore, layers: Sequence[str], crop: tuple[int, int]) -> None:
    """Check that every layer has a token for each cell of a grid over the crop."""
    require_tokens(store, layers, "probe.masks")
    for layer in layers:
        places = store[layer].tokens
        if places is None or places.input_size != crop:
            raise LayerError(
                f"probe.masks: {store.root} does not record which tokens of {layer} are patches of "
                f"the crop of {crop[0]} x {crop[1]} pixels, as stores of featx 0.1, sampled "
                "tokens, windows, and tokens in another order than that of the image. Leave the "
                "layer out with layers=, or extract it again with reduce=none and without windows."
            )


class Patches:
    """Patch tokens of the rows with a mask in a layer that `require_patches` has accepted; tokens
    are read when they are needed.

    Attributes:
        masks: classes of the pixels of the rows.
        width: D, the number of values of a token.
        grid: (rows, columns) of the patches.
        prefix: number of tokens that have no place and are left out.
        crop: (height, width) in pixels.
    """

    def __init__(self, masks: Masks, layer: str, device: torch.device) -> None:
        places = masks.labelled.store[layer].tokens
        assert places is not None, "require_patches has been called"
        self.masks = masks
        self._tokens = layer_tokens([masks.labelled], layer, device, memory_bytes=0)
        self.device = device
        self.num_classes = len(masks.labelled.classes)
        self.width = self._tokens.width
        self.grid = places.grid
        self.prefix = places.prefix_tokens
        self.crop = masks.crop
        if self._tokens.layout.count != self.prefix + self.per_row:
            raise LayerError(
                f"probe.masks: {layer} has {self._tokens.layout.count} tokens, and "
                f"{self.prefix} + {self.grid[0]} x {self.grid[1]} were expected."
            )

    @property
    def per_row(self) -> int:
        """Number of patches of a row."""
        return self.grid[0] * self.grid[1]

    def blocks(self, places: Ints) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Yield places in blocks, and their patch tokens, (n, rows * columns, D) float32."""
        for span, block in self._tokens.features.blocks(places):
            yield span, self._tokens.layout.tokens(block)[:, self.prefix :]

    def counts(self, place: int) -> npt.NDArray[np.float32]:
        """Count the pixels of each class in the cell of each patch, (rows * columns, K).

        A pixel belongs to the cell that contains its centre.
        """
        mask = self.masks.of(place)
        sides = zip(mask.shape, self.grid, strict=True)
        rows, columns = ((2 * np.arange(side) + 1) * cells // (2 * side) for side, cells in sides)
        cell = rows[:, None] * self.grid[1] + columns
        has_label = mask >= 0
        size = self.per_row * self.num_classes
        counts = np.bincount(cell[has_label] * self.num_classes + mask[has_label], minlength=size)
        return counts.reshape(self.per_row, self.num_classes).astype(np.float32)

    def read_labelled(self, places: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the patches of some rows that have a pixel with a label. Return (n, D) float32
        tokens and (n, K) float32 pixels of each class, none all 0, on the device.
        """
        counts = [self.counts(place) for place in places.tolist()]
        has_label = [each.any(1) for each in counts]
        x = torch.empty(
            (sum(int(each.sum()) for each in has_label), self.width), device=self.device
        )
        start, at = 0, 0
        for _, block in self.blocks(places):
            is_chosen = torch.from_numpy(np.concatenate(has_label[at : at + len(block)]))
            tokens = block.reshape(-1, self.width)[is_chosen.to(self.device)]
            x[start : start + len(tokens)] = tokens
            start, at = start + len(tokens), at + len(block)
        rows = [each[is_labelled] for each, is_labelled in zip(counts, has_label, strict=True)]
        return x, torch.from_numpy(np.concatenate(rows)).to(self.device)


def check_memory(patches: Patches, layer: str, num_rows: int, memory_gib: float) -> None:
    """Check that the patches to train on fit into memory.

    The tokens are float32. Logits, probabilities and counts take 40 bytes for each class.
    """
    count = num_rows * patches.per_row
    needed = count * (4 * patches.width + 40 * patches.num_classes) / (1 << 30)
    if needed > memory_gib:
        raise ConfigError(
            f"probe.masks: {layer} has {count} patches of {num_rows} images to train on, of "
            f"{patches.width} numbers and {patches.num_classes} classes, which need {needed:.2f} "
            f"GiB, more than probe.memory_gib={memory_gib:g}. Raise it if the machine has that "
            "memory, train on fewer images (a larger probe.test_share, or probe.split), or extract "
            "fewer patches with reduce=grid."
        )


@dataclass(frozen=True)
class PatchClassifier:
    """Linear classifier of patches, for the (C,) classes with a pixel in the training rows."""

    scaler: Scaler
    fit: logistic_regression.Fit
    classes: torch.Tensor

    def predict(self, patches: Patches, places: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield a place, the classes of its pixels (H, W), and those of its patches (T,).

        The logits of the patches are enlarged to the crop by bilinear interpolation
        (align_corners=False), and the largest one is the class of a pixel.
        """
        height, width = patches.crop
        step = rows_of_block(4 * height * width * len(self.classes))
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
    """Classifier of patches, fitted on all training rows with a chosen penalty. The loss of the
    choice is the mean cross-entropy of the pixels of the validation rows, with one probability for
    all pixels of a patch.
    """

    classifier: PatchClassifier
    choice: Choice


def fit_patches(patches: Patches, split: Split, l2: float | None) -> FittedPatches:
    """Choose the penalty with the smallest loss on validation rows, and fit on training rows.

    The loss is the mean cross-entropy over pixels with a label. All pixels of a patch have the
    same logits, so that the counts of the classes in its cell are all that is needed, and the
    problem is the convex one of the linear probe.
    """
    strengths = logistic_regression.L2_GRID if l2 is None else (l2,)
    scaler, classes, trials = _sweep(patches, split, strengths)
    best = min(trials, key=lambda trial: trial.loss)
    on_fit = PatchClassifier(scaler, best.fit, classes)
    on_validation = count_pixels(on_fit, patches, split.validation)
    x, counts = patches.read_labelled(split.train)
    scaler, classes = scaler_of([x]), counts.any(0).nonzero()[:, 0]
    scaler.standardise(x)
    fit = logistic_regression.fit_logistic(x, counts[:, classes], len(classes), best.l2, last=True)
    notes = logistic_regression.note_grid_end(best.l2, strengths) + fit.notes(best.l2)
    if len(classes) < patches.num_classes:
        notes.append(
            f"{patches.num_classes - len(classes)} classes have no pixel in the training rows and "
            "are never predicted"
        )
    choice = Choice(
        best.l2,
        {"validation_miou": miou(on_validation.pixels), "validation_loss": best.loss},
        [trial.as_dict() for trial in trials],
        notes,
        {"training_patches": len(x)},
    )
    return FittedPatches(PatchClassifier(scaler, fit, classes), choice)


def count_pixels(classifier: PatchClassifier, patches: Patches, places: Ints) -> PixelCounts:
    """Predict some rows and count their pixels and patches by class.

    The class of a patch is the one with at least half of the pixels with a label in its cell; a
    patch without such a class does not count.
    """
    counts = PixelCounts.empty(len(places), patches.num_classes)
    for row, (place, pixels, cells) in enumerate(classifier.predict(patches, places)):
        mask = patches.masks.of(place)
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
) -> tuple[Scaler, torch.Tensor, list[logistic_regression.Trial]]:
    """Return the standardisation, the classes with a pixel, and the trials on `split.fit`."""
    (x, fit_counts), (held_out, held_out_counts) = (
        patches.read_labelled(places) for places in (split.fit, split.validation)
    )
    scaler, classes = scaler_of([x]), fit_counts.any(0).nonzero()[:, 0]
    for tokens in (x, held_out):
        scaler.standardise(tokens)
    # A class without a training pixel has no finite logit. Its loss is the same for all penalties.
    counts = held_out_counts[:, classes].double()
    total = counts.sum().clamp(min=1)

    def judge(fit: logistic_regression.Fit) -> tuple[float, float]:
        logits = (held_out @ fit.weight.T + fit.bias).double()
        right = counts.gather(1, logits.argmax(1, keepdim=True)).sum()
        loss = -torch.dot(counts.flatten(), logits.log_softmax(1).flatten())
        return float(right / total), float(loss / total)

    trials = logistic_regression.sweep(x, fit_counts[:, classes], len(classes), strengths, judge)
    return scaler, classes, trials
