"""Preprocessing: resize and crop on uint8 in the loader, normalise on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from featx.base import plain_tensors, synchronise
from featx.errors import FeatxError, ModelError, one_line
from featx.images.rgb_conversion import PixelScale
from featx.types import Array

if TYPE_CHECKING:
    import numpy.typing as npt

_RESIZES_CHANNELS_LAST = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether torch resizes uint8 images of three channels as they lie in memory. With the copy into a
batch this takes 0.7 to 0.9 of the time of separate channels, with the same result; on other CPUs it
takes longer."""


@dataclass(frozen=True)
class Preprocess:
    """The transform that belongs to one set of weights.

    Attributes:
        reference: the library's own transform: PIL RGB image -> (3, H, W) float32, normalised.
        crop: (height, width) of the centre crop in pixels, the input size of the backbone.
        resize: shorter side in pixels before the crop; or (height, width), to which an image is
            resized whatever its proportions; or None if the fast path cannot reproduce the
            library's transform, and decode=fast then uses the reference as well.
        interpolation: 'bilinear' or 'bicubic' for the fast path, with antialiasing.
        mean: mean per channel of the backbone's input, of values in [0, 1].
        std: standard deviation per channel of the backbone's input, of values in [0, 1].
        offset: how the crop's offset of half a pixel becomes a whole one: 'round' (torchvision,
            timm; half to even) or 'floor' (processors of transformers).
        channels: order of the channels of the backbone's input: 'rgb', or 'bgr' (MobileViT of
            transformers). Images of the loader in uint8 are always RGB.
        scale: how the numbers of images become those of the model; None for RGB of 8 bits. With a
            scale, `crop_array` is the whole transform, and there is no reference.
        overlap: share of a window that the next one repeats, if images go through the backbone in
            windows of the size of `crop`; None if an image is cropped. With windows neither
            `reference` nor `crop_array` crops, and `resize` may be None.
    """

    reference: Callable[[Image.Image], torch.Tensor]
    crop: tuple[int, int]
    resize: int | tuple[int, int] | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    offset: Literal["round", "floor"] = "round"
    channels: Literal["rgb", "bgr"] = "rgb"
    scale: PixelScale | None = None
    overlap: float | None = None

    @property
    def has_windows(self) -> bool:
        """Whether images go through the backbone in windows."""
        return self.overlap is not None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image of the backbone's input."""
        return len(self.mean), *self.crop

    @property
    def is_resize_and_crop(self) -> bool:
        """Whether the transform is a bilinear or bicubic resize and a centre crop of an image."""
        is_resize = self.resize is not None and self.interpolation in ("bilinear", "bicubic")
        return is_resize and not self.has_windows

    @property
    def has_fast_path(self) -> bool:
        """Whether the fast path on uint8 can reproduce the transform."""
        if self.scale is not None:
            return False
        if self.resize is None:
            return self.has_windows
        return self.interpolation in ("bilinear", "bicubic")

    @property
    def shortest_side(self) -> int | None:
        """Pixels that the shorter side of an image needs for this resize; None without a resize."""
        return max(self.resize) if isinstance(self.resize, tuple) else self.resize

    def describe(self) -> str:
        """One readable line, which is part of the fingerprint."""
        height, width = self.crop
        resize = f"resize {self.resize}" if self.resize else "resize by the library"
        if isinstance(self.resize, tuple):
            resize = f"resize to {self.resize[0]}x{self.resize[1]}"
        offset = "" if self.offset == "round" else f" {self.offset}"
        channels = "" if self.channels == "rgb" else f"{self.channels}, "
        scale = "" if self.scale is None else self.scale.describe()
        sized = f"{resize} {self.interpolation} antialias"
        cropped = f"crop {height}x{width}{offset}"
        if self.overlap is not None:
            sized = sized if self.resize else "size as it is"
            cropped = f"windows {height}x{width} overlap {self.overlap:g}"
        return f"{scale}{sized}, {cropped}, {channels}mean {list(self.mean)}, std {list(self.std)}"

    def crop_array(self, image: Array) -> torch.Tensor:
        """Resize and crop an image of the loader, on the CPU.

        Args:
            image: (H, W, 3) uint8 RGB; with a scale (H, W, channels) of any numbers.

        Returns:
            (C, *crop): uint8 as of `crop_uint8`; with a scale normalised float32. With windows
            (C, H, W) of the whole image.

        Raises:
            ImageFault: with a scale, a pixel is not finite.
        """
        if self.scale is None:
            return self.crop_uint8(image)
        # In float32, by the steps of torchvision on a tensor: bicubic values are not limited to the
        # range of the pixels.
        pixels = np.ascontiguousarray(self.scale.apply(image).transpose(2, 0, 1))
        x = torch.from_numpy(pixels)[None]
        if self.channels == "bgr":
            x = x.flip(1)
        size = self._resized_size(x)
        if tuple(x.shape[2:]) != size:
            x = self._interpolate(x, size)
        x = self._cropped(x[0])
        mean, std = (
            torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (x - mean).div_(std)

    def without_crop(self) -> Preprocess:
        """The transform that resizes a whole image to the input, whatever its proportions."""

        def reference(image: Image.Image) -> torch.Tensor:
            height, width = self.crop
            resized = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
            return self.normalise(torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None])[0]

        return replace(self, reference=reference, resize=self.crop)

    def crop_uint8(self, image: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Resize to `resize` and crop the centre, on the CPU.

        Args:
            image: (H, W, 3) uint8 RGB.

        Returns:
            (3, *crop) uint8, with windows (3, H, W). The antialiased uint8 resize of torch stays
            within 1 of Pillow's, if both resize the same axis first (`_rows_first`); otherwise
            bicubic pixels at edges differ by up to 20.
        """
        if _RESIZES_CHANNELS_LAST:
            # `permute` before [None] would give the batch dimension a stride that hides the layout.
            x = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
        else:
            x = torch.from_numpy(image).permute(2, 0, 1)[None]
        size = self._resized_size(x)
        if _rows_first(x, size):
            x = self._interpolate(x, (size[0], x.shape[3]))
        if tuple(x.shape[2:]) != size:  # torch resizes the width first, if both change
            x = self._interpolate(x, size)
        return self._cropped(x[0])

    def _resized_size(self, x: torch.Tensor) -> tuple[int, int]:
        """Height and width of (N, 3, H, W) images after resizing to `resize`."""
        if self.resize is None and not self.has_windows:
            raise FeatxError("the fast path was asked of a transform that has none.")
        height, width = x.shape[2:]
        return (height, width) if self.resize is None else resized_size(self.resize, height, width)

    def _cropped(self, x: torch.Tensor) -> torch.Tensor:
        """The centre of a (C, H, W) image; with windows the whole image."""
        return x if self.has_windows else centre_crop(x, self.crop, self.offset)

    def _interpolate(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """(N, 3, H, W) images resized to (height, width) with antialiasing."""
        return F.interpolate(
            x, size=size, mode=self.interpolation, antialias=True, align_corners=False
        )

    def normalise(
        self, x: torch.Tensor, layout: torch.memory_format = torch.preserve_format
    ) -> torch.Tensor:
        """Normalise images for the backbone, on their device.

        Args:
            x: (B, C, H, W) uint8 in [0, 255], RGB.
            layout: memory format of the result.

        Returns:
            (B, C, H, W) float32, in the order of `channels`.
        """
        if self.channels == "bgr":
            x = x.flip(1)
        scale, shift = _normalisation(self.mean, self.std, x.device)
        return x.to(torch.float32, memory_format=layout).mul_(scale).sub_(shift)

    def as_uint8(self, x: torch.Tensor) -> torch.Tensor:
        """(C, H, W) image of the loader, uint8 or normalised, as (3, H, W) uint8 RGB for display.

        Of other numbers of channels than three the first one is shown as grey.
        """
        if x.dtype == torch.uint8:
            return x
        std = torch.tensor(self.std).view(-1, 1, 1)
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        pixels = ((x * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        if len(pixels) != 3:
            return pixels[:1].expand(3, -1, -1)
        return pixels.flip(0) if self.channels == "bgr" else pixels


@functools.cache
def _normalisation(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor and subtrahend of a normalisation: x / 255 / std - mean / std.

    They stay on the device, because a copy from ordinary memory makes the device wait.

    Returns (C, 1, 1) float32 tensors.
    """
    with plain_tensors():
        stds, means = (torch.tensor(values).view(-1, 1, 1) for values in (std, mean))
        scale, shift = (1 / (255 * stds)).to(device), (means / stds).to(device)
    synchronise(device)  # other streams use them as well
    return scale, shift


def resized_size(resize: int | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width of an image after resizing."""
    if isinstance(resize, tuple):
        return resize
    short = min(height, width)
    if short == resize:
        return height, width
    return max(1, resize * height // short), max(1, resize * width // short)


def _rows_first(x: torch.Tensor, size: tuple[int, int]) -> bool:
    """Return whether Pillow resizes the height of images before their width.

    It resizes the width first if both axes are scaled alike. Pillow 13 changes the order if the
    height shrinks much more than the width, which saves work. The limit is fitted to Pillow 13.0,
    on 213 random sizes: it predicts 211 of them.
    """
    height, width = x.shape[2:]
    return size[0] < height and 1.6 * (1 - size[1] / width) < 1 - size[0] / height


def centre_crop(
    x: torch.Tensor, crop: tuple[int, int], offset: Literal["round", "floor"] = "round"
) -> torch.Tensor:
    """Crop the centre; zeros outside the image.

    Args:
        x: (..., H, W).
        crop: (height, width).
        offset: 'round' is torchvision's CenterCrop; 'floor' cuts half a pixel off.

    Returns:
        (..., *crop).
    """
    height, width = x.shape[-2:]
    pad_h, pad_w = max(0, crop[0] - height), max(0, crop[1] - width)
    if pad_h or pad_w:
        x = F.pad(x, (pad_w // 2, (pad_w + 1) // 2, pad_h // 2, (pad_h + 1) // 2))
        height, width = x.shape[-2:]
    top, left = height - crop[0], width - crop[1]
    if offset == "floor":
        top, left = top // 2, left // 2
    else:
        top, left = round(top / 2), round(left / 2)
    return x[..., top : top + crop[0], left : left + crop[1]]


def check_reference(preprocess: Preprocess) -> None:
    """Run the reference transform once on a grey image.

    A transform with a scale has none, and that of windows is not the library's.

    Raises:
        ModelError: it fails, or the result is not (3, *crop) float32.
    """
    if preprocess.scale is not None or preprocess.has_windows:
        return
    height, width = preprocess.crop
    grey = Image.new("RGB", (width + 37, height + 11), (127, 127, 127))
    try:
        x = preprocess.reference(grey)
    except Exception as error:  # of many kinds: of a library, about values that come with weights
        raise ModelError(
            f"the transform of the weights fails for an RGB image: {one_line(error)}."
        ) from error
    if x.shape != (3, height, width) or x.dtype != torch.float32:
        raise ModelError(
            f"the transform gives {tuple(x.shape)} {x.dtype}, expected (3, {height}, {width}) "
            "float32: featx needs one fixed input size."
        )
