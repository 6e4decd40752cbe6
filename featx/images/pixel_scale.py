"""Preprocessing of images whose numbers keep their meaning: `model.transform.scale`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import counted
from featx.types import ImageFault, Status

DIVISORS = {"|u1": 255.0, "<u2": 65535.0}
"""dtype of pixels -> largest number, for scale=dtype. Other dtypes do not say what white is."""

NUMBER_TYPES = frozenset(["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<f2", "<f4", "<f8"])
"""Numbers that float32 holds, the larger ones rounded, in the byte order of numpy's names."""


class PixelFormatError(Exception):
    """Name of the fault of an image whose dtype or channels are not those that a run states."""


def format_fault(message: str) -> ImageFault:
    """Return the fault of an image whose dtype or channels are not those that a run states."""
    return ImageFault(Status.UNSUPPORTED, message, PixelFormatError.__name__)


def unknown_white(kind: str) -> ImageFault:
    """The fault of an image whose file does not say which number is white."""
    return format_fault(
        f"{kind}, whose white is not stated: data.white=1 (or 255, ...) says it for all images, "
        "model.transform.scale for a model that takes such numbers"
    )


def missing_codecs(what: str) -> ImageFault:
    """The fault of an image that needs the package imagecodecs, which is not installed."""
    return ImageFault(Status.UNSUPPORTED, f'{what} needs pip install "featx[channels]"')


@dataclass(frozen=True)
class PixelScale:
    """Conversion of the numbers of an image to those of a model.

    Attributes:
        divisor: number by which pixels are divided; None for the largest number of their dtype.
        channels: number of channels of the images.
        bands: channels that the model gets, in its order; None for all.
    """

    divisor: float | None
    channels: int
    bands: tuple[int, ...] | None = None

    def describe(self) -> str:
        """Part of the line that describes a transform."""
        divisor = "the largest of their dtype" if self.divisor is None else f"{self.divisor:.17g}"
        bands = "" if self.bands is None else f", bands {list(self.bands)}"
        named = counted(self.channels, "channel")
        return f"float32 pixels of {named}{bands} divided by {divisor}, "

    def apply(self, image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Take the bands of an image and divide them.

        Args:
            image: (H, W, channels) of any numbers.

        Returns:
            (H, W, C) float32, C the number of bands.

        Raises:
            ImageFault: the dtype has no largest number, or a pixel is not finite.
        """
        divisor = self.divisor
        if divisor is None:
            divisor = DIVISORS.get(image.dtype.newbyteorder("<").str)
            if divisor is None:
                raise format_fault(
                    f"{image.dtype} pixels, whose white is not known: model.transform.scale=dtype "
                    "divides uint8 and uint16 only; give the number"
                )
        if self.bands is not None:
            image = image[:, :, list(self.bands)]
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
            pixels = image.astype(np.float32)
        pixels /= np.float32(divisor)
        if not np.isfinite(pixels).all():
            raise ImageFault(Status.UNSUPPORTED, "some pixels are NaN or infinite")
        return pixels
