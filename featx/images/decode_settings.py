"""Settings by which a run decodes: the transform, treatment of unusual images, and decoders.

A resumed run keeps the decoders of its resume state.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import ImageColor

from featx.config import Config, DataConfig
from featx.errors import ConfigError, require
from featx.types import ImageFault, Listing, ResumeState, Status

if TYPE_CHECKING:
    from featx.images.preprocess import Preprocess

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


@dataclass(frozen=True)
class DecodeSettings:
    """Settings by which encoded bytes become the images of a run.

    Attributes:
        preprocess: transform of the backbone.
        policy: treatment of orientation, transparency and size.
        reference: whether the library's own transform is used instead of the fast path on uint8;
            always true for a transform that the fast path cannot follow. With a scale both paths
            are the same, in float32.
        timeout_s: seconds after which the decoder of an image is ended. The image is decoded again,
            and fails after the same time; None for no limit.
        workers: number of decoders, or None for one per CPU.
    """

    preprocess: Preprocess
    policy: ImagePolicy
    reference: bool = False
    timeout_s: float | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        require(self.reference or self.preprocess.has_fast_path, "the pixels would differ")

    @classmethod
    def of_run(
        cls,
        config: Config,
        preprocess: Preprocess,
        listing: Listing,
        resume_state: ResumeState | None = None,
    ) -> DecodeSettings:
        """The settings that a config asks for, with the decoders of the resume state.

        Args:
            listing: listing, whose keys show whether there may be HEIC images.

        Raises:
            ConfigError: data.white and a scale are given, the background is no colour, a recorded
                decoder is not installed, or the transform has no place for random crops.
        """
        reference = config.decode == "reference" or not preprocess.has_fast_path
        scale = preprocess.scale
        resolved = resume_state.resolved if resume_state else {"jpeg": None}
        if scale is not None and config.data.white is not None:
            raise ConfigError(
                f"data.white={config.data.white:g} has no effect with model.transform.scale, which "
                "says what pixels are divided by. Leave one of them out."
            )
        if config.data.crops is not None and not preprocess.is_resize_and_crop:
            raise ConfigError(
                f"data.crops={config.data.crops}: a random crop takes the place of the resize and "
                "the crop of a transform, and that of this model is no bilinear or bicubic resize "
                "with a centre crop. Leave data.crops out; 'data.views=[original,hflip]' works."
            )
        policy = replace(
            ImagePolicy.from_config(config.data),
            jpeg=PILLOW if reference else resolved.get("jpeg", PILLOW) or SIMPLEJPEG,
            heif=heif_version(listing.keys, resolved.get("heif"), new=resume_state is None),
            channels=None if scale is None else scale.channels,
        )
        data = config.data
        return cls(preprocess, policy, reference, data.timeout_s, data.workers)
