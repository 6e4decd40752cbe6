"""Boxes that are cut out of decoded images."""

from __future__ import annotations

from typing import Any, overload

import numpy.typing as npt
from PIL import Image

from featx.types import Box, ImageFault, Status

DecodedImage = Image.Image | npt.NDArray[Any]
"""Upright image: a Pillow image, (H, W, 3) uint8 RGB, or (H, W, channels) of any numbers for a
transform with a scale. The fast path takes arrays, the reference Pillow images."""


@overload
def cut_out(decoded: Image.Image, box: Box) -> Image.Image: ...


@overload
def cut_out(decoded: npt.NDArray[Any], box: Box) -> npt.NDArray[Any]: ...


def cut_out(decoded: Image.Image | npt.NDArray[Any], box: Box) -> Image.Image | npt.NDArray[Any]:
    """Cut a box out of an upright image.

    Args:
        decoded: (H, W, C), or a Pillow image.
        box: pixels to cut out.

    Returns:
        A copy of the box, of the type of `decoded`.

    Raises:
        ImageFault: the box reaches outside the image.
    """
    if isinstance(decoded, Image.Image):
        width, height = decoded.size
    else:
        height, width, _ = decoded.shape
    right, bottom = box.x + box.width, box.y + box.height
    if right > width or bottom > height:
        raise ImageFault(
            Status.TRANSFORM_ERROR, f"the box reaches outside the image of {width} x {height}"
        )
    if isinstance(decoded, Image.Image):
        return decoded.crop((box.x, box.y, right, bottom))
    return decoded[box.y : bottom, box.x : right].copy()
