"""Treatment of unusual images, and the decoders that a store requires."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import version as version_of

import numpy as np
import numpy.typing as npt
from PIL import ImageColor

from featx.config import DataConfig
from featx.errors import ConfigError

_HEIF_NAME = re.compile(rb"\.(heic|heif|hif)", re.IGNORECASE)
"""File extensions of HEIC in keys."""

PILLOW, SIMPLEJPEG = "pillow", "simplejpeg"
"""Decoders of JPEGs, the values of `ImagePolicy.jpeg`."""


@dataclass(frozen=True)
class ImagePolicy:
    """Treatment of unusual images; part of the fingerprint.

    Attributes:
        exif: 'apply' or 'ignore' the EXIF orientation.
        background: (R, G, B) in [0, 255] under transparent pixels.
        max_pixels: number of pixels above which an image is refused before it is decoded.
        jpeg: decoder of JPEGs for `decode_array`, PILLOW or SIMPLEJPEG; both give equal pixels.
        heif: version of pillow-heif that the store requires, or None.
        channels: number of channels of images that keep their numbers, for model.transform.scale;
            None for RGB of 8 bits.
    """

    exif: str
    background: tuple[int, int, int]
    max_pixels: int
    jpeg: str = PILLOW
    heif: str | None = None
    channels: int | None = None

    @classmethod
    def from_config(cls, config: DataConfig) -> ImagePolicy:
        """The policy that the `data` options describe, with Pillow for JPEGs.

        Raises:
            ConfigError: `data.background` is no colour.
        """
        try:
            colour = ImageColor.getrgb(config.background)
        except ValueError as error:
            raise ConfigError(
                f"data.background={config.background}: expected a colour name such as white, "
                "or '#rrggbb'."
            ) from error
        return cls(config.exif, (colour[0], colour[1], colour[2]), config.max_pixels)


def jpeg_decoder(recorded: str | None = None) -> str:
    """Decoder of JPEGs for decode=fast: SIMPLEJPEG if it is installed, otherwise PILLOW.

    Args:
        recorded: decoder recorded in the resume state, or None for a new store.

    Raises:
        ConfigError: simplejpeg is recorded and not installed.
    """
    installed = importlib.util.find_spec("simplejpeg") is not None
    if recorded is None:
        return SIMPLEJPEG if installed else PILLOW
    if recorded == SIMPLEJPEG and not installed:
        raise ConfigError(
            "this store was started with simplejpeg, which is not installed: "
            'pip install "featx[jpeg]", or choose another out=DIR.'
        )
    return recorded


def heif_version(keys: npt.NDArray[np.bytes_], recorded: str | None, new: bool) -> str | None:
    """Version of pillow-heif that a store requires, or None.

    A new store requires the installed version if a key contains a file extension of HEIC. Stores
    without a requirement decode HEIC with whatever version is installed.

    Args:
        keys: (N,) fixed-length bytes, the keys of the listing.
        recorded: version recorded in the resume state, or None.
        new: whether the store is new.

    Raises:
        ConfigError: a version is recorded and pillow-heif is not installed.
    """
    installed = importlib.util.find_spec("pillow_heif") is not None
    if recorded is not None and not installed:
        raise ConfigError(
            "this store was started with pillow-heif, which is not installed: "
            'pip install "featx[heif]", or choose another out=DIR.'
        )
    named = new and installed and _HEIF_NAME.search(np.ascontiguousarray(keys).data)
    return version_of("pillow_heif") if recorded is not None or named else None
