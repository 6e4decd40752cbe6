"""Resize, crop and normalise as the weights ask: uint8 in the loader, floats on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch
import torch.nn.functional as F
from PIL import Image

from featx.errors import ModelError
from featx.types import Box, ImageFault, Status

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Preprocess:
    """The transform of one set of weights.

    Attributes:
        reference: the library's own transform: PIL RGB -> (3, H, W) float32, normalised.
        crop: (height, width) of the centre crop in pixels, what the backbone sees.
        resize: shorter side in pixels before the crop, or None where the fast path cannot follow
            the library's transform and decode=fast uses the reference as well.
        interpolation: 'bilinear' or 'bicubic', with antialiasing.
        mean, std: per channel, of values in [0, 1].
    """

    reference: Callable[[Image.Image], torch.Tensor]
    crop: tuple[int, int]
    resize: int | None
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def has_fast_path(self) -> bool:
        """Whether resize, crop and normalise are known well enough to be done on uint8."""
        return self.resize is not None and self.interpolation in ("bilinear", "bicubic")

    def describe(self) -> str:
        """One line for people and for the fingerprint."""
        height, width = self.crop
        resize = f"resize {self.resize}" if self.resize else "resize by the library"
        return (
            f"{resize} {self.interpolation} antialias, crop {height}x{width}, "
            f"mean {list(self.mean)}, std {list(self.std)}"
        )

    def crop_uint8(self, image: npt.NDArray[np.uint8]) -> torch.Tensor:
        """The fast path: shorter side to `resize`, centre crop.

        Args:
            image: (H, W, 3) RGB.

        Returns:
            (3, H, W) uint8. torch's antialiased uint8 resize stays within 1 of Pillow's.
        """
        x = torch.from_numpy(image).permute(2, 0, 1)[None]
        return centre_crop(self._resized(x)[0], self.crop)

    def crops_on_device(self, images: torch.Tensor) -> torch.Tensor:
        """The same where only floats can be resized, as on CUDA; rounded at the end.

        Args:
            images: (N, 3, H, W) uint8.

        Returns:
            (N, 3, *crop) uint8, within 2 of what `crop_uint8` gives.
        """
        return centre_crop(self._resized(images.float()), self.crop).round_().clamp_(0, 255).byte()

    def _resized(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) with its shorter side brought to `resize`."""
        assert self.resize is not None
        height, width = x.shape[2:]
        short = min(height, width)
        if short == self.resize:
            return x
        size = [max(1, self.resize * side // short) for side in (height, width)]
        return F.interpolate(
            x, size=size, mode=self.interpolation, antialias=True, align_corners=False
        )

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) uint8 in [0, 255] -> float32 as the backbone wants it, on x's device."""
        std = torch.tensor(self.std, device=x.device).view(3, 1, 1)
        mean = torch.tensor(self.mean, device=x.device).view(3, 1, 1)
        return x.float().mul_(1 / (255 * std)).sub_(mean / std)

    def as_uint8(self, x: torch.Tensor) -> torch.Tensor:
        """(3, H, W) as a loader gives it, uint8 or normalised -> uint8 for people to look at."""
        if x.dtype == torch.uint8:
            return x
        std = torch.tensor(self.std).view(3, 1, 1)
        mean = torch.tensor(self.mean).view(3, 1, 1)
        return ((x * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


@overload
def cut_out(picture: Image.Image, box: Box) -> Image.Image: ...


@overload
def cut_out(picture: npt.NDArray[np.uint8], box: Box) -> npt.NDArray[np.uint8]: ...


def cut_out(
    picture: Image.Image | npt.NDArray[np.uint8], box: Box
) -> Image.Image | npt.NDArray[np.uint8]:
    """A region of an upright picture, (H, W, 3) or Pillow's, in its own kind.

    Raises:
        ImageFault: the region reaches outside.
    """
    if isinstance(picture, Image.Image):
        width, height = picture.size
    else:
        height, width, _ = picture.shape
    right, bottom = box.x + box.width, box.y + box.height
    if right > width or bottom > height:
        raise ImageFault(
            Status.TRANSFORM_ERROR, f"the box reaches outside the picture of {width} x {height}"
        )
    if isinstance(picture, Image.Image):
        return picture.crop((box.x, box.y, right, bottom))
    return picture[box.y : bottom, box.x : right].copy()


def centre_crop(x: torch.Tensor, crop: tuple[int, int]) -> torch.Tensor:
    """(..., H, W) -> (..., *crop), as torchvision's CenterCrop: rounded offsets, zeros outside."""
    height, width = x.shape[-2:]
    pad_h, pad_w = max(0, crop[0] - height), max(0, crop[1] - width)
    if pad_h or pad_w:
        x = F.pad(x, (pad_w // 2, (pad_w + 1) // 2, pad_h // 2, (pad_h + 1) // 2))
        height, width = x.shape[-2:]
    top, left = round((height - crop[0]) / 2), round((width - crop[1]) / 2)
    return x[..., top : top + crop[0], left : left + crop[1]]


def check_reference(preprocess: Preprocess) -> None:
    """Run the reference once on a grey picture.

    Raises:
        ModelError: it does not give (3, *crop) float32.
    """
    height, width = preprocess.crop
    x = preprocess.reference(Image.new("RGB", (width + 37, height + 11), (127, 127, 127)))
    if x.shape != (3, height, width) or x.dtype != torch.float32:
        raise ModelError(
            f"the transform gives {tuple(x.shape)} {x.dtype}, expected (3, {height}, {width}) "
            "float32: featx needs one fixed input size."
        )
