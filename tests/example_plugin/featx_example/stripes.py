"""data=stripes: images of stripes, which are computed."""

import io

import numpy as np
from PIL import Image

from featx.config import Count, DataConfig, options
from featx.sources import source_member
from featx.types import Listing


@options("data")
class StripesOptions(DataConfig):
    """Options of data=stripes."""

    name: str = "stripes"
    num_images: Count = 8
    """Number of images."""


class Stripes:
    """Images of 64 x 64 pixels; the key is the width of the stripes in pixels."""

    def __init__(self, options: StripesOptions) -> None:
        self._widths = range(1, options.num_images + 1)

    def listing(self) -> Listing:
        keys = np.array([b"%04d" % width for width in self._widths])
        return Listing(keys, labels=np.full(len(keys), -1))

    def read(self, key: bytes) -> bytes:
        row = np.arange(64, dtype=np.uint8) // int(key) % 2 * 255
        file = io.BytesIO()
        Image.fromarray(np.tile(row, (64, 1))).save(file, "PNG")
        return file.getvalue()


SOURCE = source_member("stripes", "Computed images of stripes.", StripesOptions, Stripes)
