"""Masks of the images of a store: classes of pixels on the crop that the network saw."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.mask_files import (
    MaskSettings,
    PackedMask,
    mask_settings,
    masked_images,
    masks_of_image,
)
from featx.base import num_cpus
from featx.config import Config
from featx.errors import DataError, StoreError, counted
from featx.store import FeatureStore

_NAMED = 5
"""Number of rows without a usable mask that a note names."""


@dataclass(frozen=True)
class Masks:
    """Rows with a mask, and the class of each pixel of their crops.

    Attributes:
        labelled: the rows, all of class 0.
        crop: (height, width) in pixels.
        numbers: (K,) numbers of the classes in the masks, increasing.
        classes: K names.
        refused: (key, reason) of rows without a usable mask.
        packed: the crop of each row, compressed (H, W) int32 numbers, -1 for pixels without a
            label.
    """

    labelled: LabelledRows
    crop: tuple[int, int]
    numbers: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    packed: Sequence[bytes]

    def of(self, place: int) -> npt.NDArray[np.int64]:
        """Return the classes of the pixels of a row, (H, W) in [0, K), -1 without a label."""
        numbers = np.frombuffer(zlib.decompress(self.packed[place]), np.int32).reshape(self.crop)
        classes = np.searchsorted(self.numbers, numbers)
        return np.where(numbers < 0, -1, classes)


def read_masks(config: Config, store: FeatureStore) -> Masks:
    """Read the masks of all rows of a store that did not fail."""
    if not store.complete:
        raise StoreError(
            f"{store.root} is not complete: {store.num_rows_present} of {len(store)} rows are "
            "there. Complete it with the command that started it, then give this one again."
        )
    settings = mask_settings(config, store)
    with ThreadPoolExecutor(num_cpus(), "featx-masks") as pool:
        masks_of_rows = [
            (row, mask)
            for masks in pool.map(partial(masks_of_image, settings), list(masked_images(store)))
            for row, mask in masks
        ]
    masks_of_rows.sort(key=lambda pair: pair[0])
    usable = [(row, mask) for row, mask in masks_of_rows if isinstance(mask, PackedMask)]
    refused = [(str(store.keys[row]), mask) for row, mask in masks_of_rows if isinstance(mask, str)]
    if not usable:
        raise DataError(
            f"none of the {counted(len(masks_of_rows), 'row')} of {store.root} has a usable mask "
            f"in {settings.folder}: {_problem_text(refused)}."
        )
    numbers = sorted({number for _, mask in usable for number in mask.numbers})
    names = tuple(settings.names[i] if settings.names else str(i) for i in numbers)
    if len(names) < 2:
        raise DataError(
            f"the masks in {settings.folder} have the class {names[0]} only, besides pixels that "
            f"are ignored (probe.ignore={settings.ignore}); a probe needs two classes or more."
        )
    rows, notes = np.array([row for row, _ in usable], np.int64), _notes(settings, refused, numbers)
    return Masks(
        LabelledRows(store, rows, np.zeros(len(rows), np.int64), ("",), notes),
        settings.transform.crop,
        np.array(numbers, np.int64),
        names,
        tuple(refused),
        [mask.data for _, mask in usable],
    )


def _notes(
    settings: MaskSettings, refused: Sequence[tuple[str, str]], numbers: Sequence[int]
) -> tuple[str, ...]:
    """Return sentences about the rows and classes that are left out."""
    notes = []
    if failed := int((~settings.store.ok).sum()):
        notes.append(f"{counted(failed, 'failed row is', 'failed rows are')} left out")
    if refused:
        left_out = counted(
            len(refused), "row without a usable mask is", "rows without a usable mask are"
        )
        notes.append(f"{left_out} left out: {_problem_text(refused)}")
    absent = [name for i, name in enumerate(settings.names) if i not in set(numbers)]
    if absent:
        notes.append(
            f"classes of probe.mask_classes without a pixel, left out: {', '.join(absent[:_NAMED])}"
            + (f" and {len(absent) - _NAMED} more" if absent[_NAMED:] else "")
        )
    return tuple(notes)


def _problem_text(refused: Sequence[tuple[str, str]]) -> str:
    """Name some rows without a usable mask, with the reasons."""
    named = "; ".join(f"{key}: {reason}" for key, reason in refused[:_NAMED])
    more = f"; and {len(refused) - _NAMED} more" if refused[_NAMED:] else ""
    return named + more
