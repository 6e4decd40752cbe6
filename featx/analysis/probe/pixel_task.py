"""Probe of the class of each pixel, from the patch tokens of a layer (probe.masks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from featx.analysis.probe.labelled_rows import TaskKind
from featx.analysis.probe.masks import read_masks
from featx.analysis.probe.metrics import (
    INTERVAL_RESAMPLES,
    Ints,
    drawn_counts,
    interval_entry,
    units_of_rows,
)
from featx.analysis.probe.patches import (
    FittedPatches,
    Patches,
    PixelCounts,
    check_memory,
    count_pixels,
    fit_patches,
    miou,
    require_patches,
    resampled_mious,
    segmentation_metrics,
)
from featx.analysis.probe.records import Choice, Record
from featx.analysis.probe.splits import RowSplits, Split, check_sizes
from featx.analysis.probe.task import Entry, Task, one_or_all
from featx.config import Config
from featx.errors import counted
from featx.store import FeatureStore
from featx.types import Json

REFUSED_LISTED = 1000
"""Maximum number of rows without a usable mask that probe.json lists."""


class PixelTask(Task[Patches, FittedPatches, PixelCounts]):
    """Task of predicting the class of each pixel on the crop that the network saw."""

    chosen_by = "validation_miou"
    memory_remedy = "Use device=cpu, or extract fewer patches with reduce=grid."

    def __init__(
        self,
        config: Config,
        store: FeatureStore,
        kind: TaskKind,
        layers: Sequence[str],
        log: Callable[[str], None],
    ) -> None:
        self._masks = read_masks(config, store)
        require_patches(store, layers, self._masks.crop)
        super().__init__(config, kind, self._masks.labelled)
        self.columns = ["class", "true", "predicted", "right"]
        self.columns += [f"patches_{name}" for name in self.columns[1:]]
        log(
            f"{counted(len(self._masks.packed), 'mask')}, {len(self.training.classes)} classes, "
            f"{counted(len(self._masks.refused), 'row')} without a usable mask"
        )

    def check_splits(self, rows: RowSplits) -> None:
        check_sizes(rows, f"{len(self._masks.packed)} rows with a usable mask")

    def open_layer(self, layer: str, device: torch.device) -> Patches:
        patches = Patches(self._masks, layer, device)
        check_memory(patches, layer, self._num_rows, self.config.probe.memory_gib)
        return patches

    @property
    def _num_rows(self) -> int:
        """Largest number of rows that are trained on."""
        return max(len(split.train) for split in self.first_splits.splits)

    def num_values(self, opened: Patches) -> int:
        return self._num_rows * opened.per_row * opened.width

    def describe_layer(self, layer: str, opened: Patches) -> dict[str, object]:
        return {
            "features": opened.width,
            "grid": list(opened.grid),
            "prefix_tokens": opened.prefix,
        }

    def fit(self, opened: Patches, seed: int, method: str, split: Split) -> FittedPatches:
        return fit_patches(opened, split, self.config.probe.l2)

    def test(
        self, opened: Patches, seed: int, split: Split, method: str, fitted: FittedPatches
    ) -> PixelCounts:
        return count_pixels(fitted.classifier, opened, split.test)

    def judge(self, folds: Sequence[PixelCounts]) -> dict[str, object]:
        joined = PixelCounts.join(folds)
        return {"rows": len(joined.pixels), **segmentation_metrics(joined)}

    @staticmethod
    def merit(validation: Mapping[str, float]) -> tuple[float, ...]:
        return (validation["validation_miou"],)

    def first_metric(self, tested: PixelCounts) -> float | None:
        return miou(tested.pixels)

    def choice_entries(self, name: str, choices: Sequence[Choice]) -> Entry:
        num_patches = [choice.details["training_patches"] for choice in choices]
        about = super().choice_entries(name, choices)
        return {**about, "training_patches": one_or_all(num_patches)}

    def result_entries(self, layer: str, tested: Sequence[PixelCounts]) -> Json:
        masks, rows = self._masks, self.first_splits
        counts = PixelCounts.join(tested)
        groups = None if rows.groups is None else rows.groups[rows.test_places]
        return {
            **pixel_interval(counts.pixels, groups),
            "classes": list(self.training.classes),
            "class_numbers": masks.numbers.tolist(),
            "confusion": counts.confusion.tolist(),
            "masks": {
                "folder": str(self.config.probe.masks),
                "ignore": self.config.probe.ignore,
                "crop": list(masks.crop),
                "rows": len(masks.packed),
                "num_refused": len(masks.refused),
                "refused": [
                    {"key": key, "reason": reason} for key, reason in masks.refused[:REFUSED_LISTED]
                ],
            },
            "notes_on_rows": self.notes_on_rows(),
        }

    def test_columns(self, record: Record[PixelCounts], row: int) -> Iterator[list[object]]:
        """Yield a line for each class in the row, or predicted for it."""
        pixels, patches = record.tested.pixels[row], record.tested.patches[row]
        for number in np.flatnonzero(pixels.any(0) | patches.any(0)).tolist():
            counts = [*pixels[:, number].tolist(), *patches[:, number].tolist()]
            yield [self.training.classes[number], *counts]


def pixel_interval(pixels: Ints, groups: Ints | None) -> dict[str, object]:
    """Return the 95 % percentile interval of mIoU by the bootstrap of images or groups.

    Pixels of one image depend on each other, so that they are never drawn one by one. mIoU of a
    resample is over the classes that it has.
    """
    unit_of_row = units_of_rows(groups, len(pixels))
    num_units = int(unit_of_row.max()) + 1
    unit_counts = np.zeros((num_units, pixels[0].size))
    np.add.at(unit_counts, unit_of_row, pixels.reshape(len(pixels), -1))
    mious = list[float]()
    for times in drawn_counts(unit_of_row, INTERVAL_RESAMPLES, num_units):
        counts = (times.astype(np.float64) @ unit_counts).reshape(len(times), *pixels.shape[1:])
        mious += resampled_mious(counts).tolist()
    return interval_entry(mious, "image" if groups is None else "group", num_units)
