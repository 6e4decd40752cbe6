"""Label maps: images of class numbers, on the resize and crop of the image that they belong to."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import PngImagePlugin

from featx.images.decode import check_png, check_png_rows
from featx.images.preprocess import centre_crop, resized_size
from featx.types import ImageFault, Status

_TRANSFORM = re.compile(
    r"resize (?:to (\d+)x(\d+)|(\d+)) (?:bilinear|bicubic) antialias, crop (\d+)x(\d+)( floor)?,"
)
"""Start of the text of `Preprocess.describe` for a transform with a fast path."""

_SCALED = ("L;2", "L;4")
"""Raw modes of PNG whose numbers Pillow stretches to 0..255, which changes class numbers."""


def read_label_map(data: bytes, max_pixels: int) -> npt.NDArray[np.integer]:
    """Decode a PNG of class numbers.

    Args:
        max_pixels: number of pixels above which it is refused.

    Returns:
        (H, W) uint8 or uint16: palette indices (mode P) or grey values of 8 or 16 bits.

    Raises:
        ImageFault: it is damaged, or no such PNG.
    """
    try:
        # Image.open has a limit of pixels of its own, for the whole process.
        image = PngImagePlugin.PngImageFile(io.BytesIO(data))
        width, height = image.size
        if width * height > max_pixels:
            raise ImageFault(Status.TOO_LARGE, f"{width} x {height} pixels, over {max_pixels}")
        check_png(data)
        scaled = image.mode == "L" and image.tile and image.tile[0].args in _SCALED
        if image.mode not in ("P", "L", "I;16") or scaled:
            bits = " of less than 8 bits" if scaled else ""
            raise ImageFault(
                Status.UNSUPPORTED,
                f"mode {image.mode}{bits}; expected a palette (P), or grey of 8 (L) or 16 (I;16) "
                "bits",
            )
        image.load()
        check_png_rows(image, data)
        if image.getexif().get(0x0112, 1) != 1:
            raise ImageFault(
                Status.UNSUPPORTED, "it has an EXIF orientation; save it upright, without one"
            )
        return np.array(image)
    except (ImageFault, MemoryError):
        raise
    except Exception as error:  # damaged files raise many types, as in featx.images.decode
        raise ImageFault.of(error) from error


@dataclass(frozen=True)
class LabelTransform:
    """Resize and crop of a transform, for label maps.

    Attributes:
        resize: shorter side, or (height, width), in pixels.
        crop: (height, width) of the centre crop in pixels.
        offset: as of `Preprocess`.
    """

    resize: int | tuple[int, int]
    crop: tuple[int, int]
    offset: Literal["round", "floor"]

    @classmethod
    def of_description(cls, text: str) -> LabelTransform | None:
        """Return the resize and crop that `Preprocess.describe` names; None without a fast path."""
        match = _TRANSFORM.match(text)
        if match is None:
            return None
        height, width, short, rows, columns = (int(group or 0) for group in match.groups()[:5])
        resize = short if match[3] else (height, width)
        return cls(resize, (rows, columns), "floor" if match[6] else "round")

    def on_crop(
        self, labels: npt.NDArray[np.integer], size: tuple[int, int]
    ) -> npt.NDArray[np.int32]:
        """Resize a label map by nearest neighbour and crop it as its image.

        Pixel i of n takes the one of N whose interval contains the centre of its own, number
        floor((i + 1/2) N / n), which integers compute exactly. Pillow's NEAREST does the same.

        Args:
            labels: (H, W) numbers of an image at full size, or of a box of it.
            size: (height, width) of the decoded image or box that was resized, which are smaller
                than H and W for a JPEG that was decoded at a fraction of its size.

        Returns:
            (*crop) numbers, -1 outside the image.
        """
        sides = zip(labels.shape, resized_size(self.resize, *size), strict=True)
        rows, columns = (((2 * np.arange(new) + 1) * old) // (2 * new) for old, new in sides)
        resized = labels[rows[:, None], columns].astype(np.int32)
        # The crop pads with 0.
        cropped = centre_crop(torch.from_numpy(resized + 1), self.crop, self.offset)
        numbers: npt.NDArray[np.int32] = cropped.numpy() - 1
        return numbers
