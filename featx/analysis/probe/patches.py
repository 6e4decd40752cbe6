"""Patches of a layer: tokens that have a place in the image, and the classes in their cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.heads import Scaler, fit_scaler
from featx.analysis.probe.masks import Masks
from featx.analysis.probe.splits import Places
from featx.analysis.probe.tokens import layer_tokens, require_tokens
from featx.errors import ConfigError, LayerError
from featx.store import FeatureStore

Ints = npt.NDArray[np.int64]


def require_patches(store: FeatureStore, layers: Sequence[str], crop: tuple[int, int]) -> None:
    """Check that every layer has a token for each cell of a grid over the crop."""
    require_tokens(store, layers, "probe.masks")
    for layer in layers:
        places = store[layer].tokens
        if places is None or places.input_size != crop:
            raise LayerError(
                f"probe.masks: {store.root} does not record which tokens of {layer} are patches of "
                f"the crop of {crop[0]} x {crop[1]} pixels, as stores of featx 0.1 and sampled "
                "tokens. Leave the layer out with layers=, or extract it again with reduce=none."
            )


class Patches:
    """Patch tokens of the rows with a mask; tokens are read when they are needed.

    Args:
        masks: rows and their masks.
        layer: a layer that `require_patches` has accepted.
        device: device that computes.

    Attributes:
        device: as given.
        num_classes: K.
        width: D, the number of values of a token.
        grid: (rows, columns) of the patches.
        prefix: number of tokens that have no place and are left out.
        crop: (height, width) in pixels.
    """

    def __init__(self, masks: Masks, layer: str, device: torch.device) -> None:
        places = masks.labelled.store[layer].tokens
        assert places is not None, "require_patches has been called"
        self._masks = masks
        self._tokens = layer_tokens([masks.labelled], layer, device, memory_bytes=0)
        self.device = device
        self.num_classes = len(masks.classes)
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

    def blocks(self, places: Places) -> Iterator[tuple[Places, torch.Tensor]]:
        """Yield places in blocks, and their patch tokens, (n, rows * columns, D) float32."""
        for span, block in self._tokens.features.blocks(places):
            yield span, self._tokens.layout.tokens(block)[:, self.prefix :]

    def mask(self, place: int) -> Ints:
        """Return the classes of the pixels of a row, (H, W), -1 without a label."""
        return self._masks.of(place)

    def counts(self, place: int) -> npt.NDArray[np.float32]:
        """Count the pixels of each class in the cell of each patch.

        A pixel belongs to the cell that contains its centre.

        Returns:
            (rows * columns, K).
        """
        mask = self.mask(place)
        sides = zip(mask.shape, self.grid, strict=True)
        rows, columns = ((2 * np.arange(side) + 1) * cells // (2 * side) for side, cells in sides)
        cell = rows[:, None] * self.grid[1] + columns
        has_label = mask >= 0
        size = self.per_row * self.num_classes
        counts = np.bincount(cell[has_label] * self.num_classes + mask[has_label], minlength=size)
        return counts.reshape(self.per_row, self.num_classes).astype(np.float32)

    def read_labelled(self, places: Places) -> LabelledPatches:
        """Read the patches of some rows that have a pixel with a label."""
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
        return LabelledPatches(x, torch.from_numpy(np.concatenate(rows)).to(self.device))


@dataclass(frozen=True)
class LabelledPatches:
    """Patches in memory.

    Attributes:
        x: (n, D) float32 tokens on the device.
        counts: (n, K) float32 pixels of each class on the device, none of all 0.
    """

    x: torch.Tensor
    counts: torch.Tensor

    def standardise(self, scaler: Scaler) -> None:
        """Standardise the tokens in place; a copy might not fit into memory."""
        self.x.sub_(scaler.mean).div_(scaler.scale)

    def scaler(self) -> Scaler:
        """Compute mean and standard deviation of each value of the tokens."""
        return fit_scaler(_Slices(self.x), np.arange(len(self.x)))


class _Slices:
    """Vectors in memory, given in blocks, so that float64 copies of them stay small."""

    _ROWS = 1 << 14

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self.width = x.shape[1]
        self.device = x.device

    def blocks(self, places: Places) -> Iterator[tuple[Places, torch.Tensor]]:
        """Yield all vectors in order; `places` are those of all of them."""
        for start in range(0, len(places), self._ROWS):
            yield places[start : start + self._ROWS], self._x[start : start + self._ROWS]


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
            "memory, train on fewer images (probe.test_share, probe.split=column), or extract "
            "fewer patches with reduce=grid."
        )
