"""data=stripes: images of stripes, which are computed."""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from featx.config import DataConfig
from featx.errors import ConfigError
from featx.sources import source_member
from featx.types import Listing


@dataclass
class StripesOptions(DataConfig):
    """Options of data=stripes."""

    name: str = "stripes"
    num_images: int = 8
    """Number of images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_images < 1:
            raise ConfigError(f"data.num_images={self.num_images}: expected at least 1.")


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
