"""data=stripes: images of stripes, which are computed."""

import io

import numpy as np
from PIL import Image

from featx.config import Count, DataConfig, options
from featx.sources import source_member
from featx.types import ImageFault, Listing, Status


@options("data")
class StripesOptions(DataConfig):
    """Options of data=stripes."""

    name: str = "stripes"
    num_images: Count = 8
    """Number of images."""


class Stripes:
    """Images of 64 x 64 pixels; the key is the width of the stripes in pixels."""

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images

    def listing(self) -> Listing:
        """List the images in bytewise order of their keys, without labels."""
        keys = np.array([b"%04d" % width for width in range(1, self._num_images + 1)])
        return Listing(keys, np.full(len(keys), -1, np.int64))

    def read(self, key: bytes) -> bytes:
        """Draw one image and return it as PNG."""
        if int(key) > 64:
            raise ImageFault(Status.MISSING, f"the image has no stripe of {int(key)} pixels")
        row = np.arange(64) // int(key) % 2 * 255
        pixels = np.broadcast_to(row[None, :, None], (64, 64, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


def open_source(config: StripesOptions) -> Stripes:
    """Open the data set that the options describe."""
    return Stripes(config.num_images)


SOURCE = source_member("stripes", "Computed images of stripes.", StripesOptions, open_source)
