"""Views of decoded images: boxes, turned images and random crops."""

from __future__ import annotations

import math
import random
from typing import overload

import numpy as np
from PIL import Image

from featx.images.rgb_conversion import turn_array, turn_image
from featx.images.tiff_blocks import TiffBlocks
from featx.types import Array, Box, ImageFault, RandomCrop, Status, View

_TRIES = 10
"""Number of times that RandomResizedCrop draws a rectangle before it takes the centre."""


@overload
def cut_view(decoded: Image.Image, view: View) -> Image.Image: ...


@overload
def cut_view(decoded: Image.Image | Array | TiffBlocks, view: View) -> Image.Image | Array: ...


def cut_view(decoded: Image.Image | Array | TiffBlocks, view: View) -> Image.Image | Array:
    """Cut what a row shows out of an upright image, and turn it.

    Args:
        decoded: (H, W, C), a Pillow image, or a TIFF of which boxes are decoded.

    Returns:
        A copy of the pixels, a Pillow image if `decoded` is one.

    Raises:
        ImageFault: the box reaches outside the image.
    """
    if isinstance(decoded, np.ndarray):
        height, width, _ = decoded.shape
    else:
        width, height = decoded.width, decoded.height
    box = view.box or Box(0, 0, width, height)
    if box.x + box.width > width or box.y + box.height > height:
        raise ImageFault(
            Status.TRANSFORM_ERROR, f"the box reaches outside the image of {width} x {height}"
        )
    if view.crop is not None:
        crop = random_box(view.crop, box.width, box.height)
        box = crop._replace(x=box.x + crop.x, y=box.y + crop.y)
    right, bottom = box.x + box.width, box.y + box.height
    if isinstance(decoded, Image.Image):
        return turn_image(decoded.crop((box.x, box.y, right, bottom)), view.orientation)
    if isinstance(decoded, TiffBlocks):
        pixels = decoded.cut(box)
    else:
        pixels = decoded[box.y : bottom, box.x : right]
    return turn_array(pixels, view.orientation).copy()


def random_box(crop: RandomCrop, width: int, height: int) -> Box:
    """Choose a rectangle of an image as torchvision's RandomResizedCrop does.

    Share of the area and logarithm of the quotient are drawn uniformly; if none of ten rectangles
    fits into the image, its centre is taken, with the nearest quotient. The numbers are those of
    Python's `random`, whose `random()` gives the same for a seed in every version.
    """
    rng = random.Random(crop.seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * rng.random()

    low, high = crop.ratio
    for _ in range(_TRIES):
        area = width * height * between(*crop.scale)
        quotient = math.exp(between(math.log(low), math.log(high)))
        columns, rows = round(math.sqrt(area * quotient)), round(math.sqrt(area / quotient))
        if 0 < columns <= width and 0 < rows <= height:
            y = int((height - rows + 1) * rng.random())
            x = int((width - columns + 1) * rng.random())
            return Box(x, y, columns, rows)
    columns, rows = width, height
    if width / height < low:
        rows = max(1, round(width / low))
    elif width / height > high:
        columns = max(1, round(height * high))
    return Box((width - columns) // 2, (height - rows) // 2, columns, rows)
