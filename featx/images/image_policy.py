"""Treatment of unusual images, and the decoders that a store requires."""

from __future__ import annotations

import importlib.util
import re
import warnings
from dataclasses import dataclass
from importlib.metadata import version as version_of

import numpy as np
import numpy.typing as npt
from PIL import ImageColor

from featx.config import DataConfig
from featx.errors import ConfigError
from featx.types import ImageFault, Status

_HEIF_NAME = re.compile(rb"\.(heic|heif|hif)", re.IGNORECASE)
"""File extensions of HEIC in keys."""

REFUSE, ACCEPT = "refuse", "accept"
"""Values of `data.damaged`."""

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
        damaged: 'refuse' or 'accept' JPEGs whose data are damaged.
        white: number that is white in images whose file does not say it, or None to refuse them.
    """

    exif: str
    background: tuple[int, int, int]
    max_pixels: int
    jpeg: str = PILLOW
    heif: str | None = None
    channels: int | None = None
    damaged: str = REFUSE
    white: float | None = None

    @classmethod
    def from_config(cls, config: DataConfig) -> ImagePolicy:
        """The policy that the `data` options describe, with Pillow for JPEGs.

        Raises ConfigError if `data.background` is no colour.
        """
        try:
            colour = ImageColor.getrgb(config.background)
        except ValueError as error:
            raise ConfigError(
                f"data.background={config.background}: expected a colour name such as white, "
                "or '#rrggbb'."
            ) from error
        return cls(
            config.exif,
            (colour[0], colour[1], colour[2]),
            config.max_pixels,
            damaged=config.damaged,
            white=config.white,
        )

    def check_pixels(self, width: int, height: int) -> None:
        """Raise ImageFault if an image has more pixels than the limit."""
        if width * height > self.max_pixels:
            raise ImageFault(Status.TOO_LARGE, f"{width} x {height} pixels, over {self.max_pixels}")

    def of_unusual_images(self) -> dict[str, str | float]:
        """Entries of the fingerprint for the treatment of damaged JPEGs and unstated whites.

        They are empty by default, so that stores of before still fit.
        """
        entries: dict[str, str | float] = {}
        if self.damaged != REFUSE:
            entries["data.damaged"] = self.damaged
        if self.white is not None:
            entries["data.white"] = self.white
        return entries


ACCEPTED_DAMAGE = "damaged JPEG: "
"""Beginning of the warning about an image that is damaged and accepted."""


def warn(message: str) -> None:
    """Warn of the image that is decoded; `decoder_warnings` collects it as one of Pillow's."""
    # With a new registry each time, as Python would show one text only once.
    warnings.warn_explicit(message, UserWarning, __file__, 1, "PIL.featx", {})


def heif_version(keys: npt.NDArray[np.bytes_], recorded: str | None, new: bool) -> str | None:
    """Version of pillow-heif that a store requires, or None.

    A new store requires the installed version if a key contains a file extension of HEIC. Stores
    without a requirement decode HEIC with whatever version is installed.
    """
    installed = importlib.util.find_spec("pillow_heif") is not None
    if recorded is not None and not installed:
        raise ConfigError(
            "this store was started with pillow-heif, which is not installed: "
            'pip install "featx[heif]", or choose another out=DIR.'
        )
    named = new and installed and _HEIF_NAME.search(np.ascontiguousarray(keys).data)
    return version_of("pillow_heif") if recorded is not None or named else None


def num_heic_without_decoder(keys: npt.NDArray[np.bytes_]) -> int:
    """Number of images that are HEIC by their names, if nothing here decodes HEIC."""
    if importlib.util.find_spec("pillow_heif") is not None:
        return 0
    return sum(key.lower().endswith((b".heic", b".heif", b".hif")) for key in keys.tolist())
