"""Preprocessing of stated values, such as those of the options `model.transform`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from featx.config import INTERPOLATIONS, USUAL_CROP, USUAL_RESIZE, TransformConfig
from featx.errors import ConfigError, counted
from featx.images import PixelScale, Preprocess, centre_crop

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the channels of ImageNet."""


def stated_preprocess(config: TransformConfig) -> Preprocess:
    """Return the transform that options state for a model that brings none.

    Raises:
        ConfigError: the crop is larger than the resized image, or mean and standard deviation are
            not those of the channels.
    """
    config.check_sizes(USUAL_RESIZE, USUAL_CROP)
    crop = USUAL_CROP if config.crop is None else config.crop
    usual = pillow_preprocess(
        resize=USUAL_RESIZE,
        crop=(crop, crop) if isinstance(crop, int) else (crop[0], crop[1]),
        interpolation="bilinear",
        mean=_MEAN,
        std=_STD,
        offset="round",
    )
    return _apply_options(config, USUAL_RESIZE, usual)


def change_preprocess(preprocess: Preprocess, config: TransformConfig) -> Preprocess:
    """Return the transform of some weights with the values that options state instead.

    Without such options it is returned as it is.
    """
    if config == TransformConfig():
        return preprocess
    crop = config.crop
    if crop is not None and preprocess.crop != (
        (crop, crop) if isinstance(crop, int) else tuple(crop)
    ):
        height, width = preprocess.crop
        raise ConfigError(
            f"model.transform.crop={crop}: the images of this model have {height} x {width} "
            "pixels. 'model.input_size=[HEIGHT,WIDTH]' changes the model and its images together."
        )
    resize = preprocess.resize or 0
    if config.resize is None and not resize:
        raise ConfigError(
            "model.transform: these weights ask for a way of resizing that options cannot state "
            "(borders, or other proportions). Give model.transform.resize as well."
        )
    if config.interpolation is None and preprocess.interpolation not in INTERPOLATIONS:
        raise ConfigError(
            "model.transform: these weights ask for the interpolation "
            f"{preprocess.interpolation}. Give model.transform.interpolation as well."
        )
    config.check_sizes(resize, preprocess.crop)
    return _apply_options(config, resize, preprocess)


def _apply_options(
    config: TransformConfig, resize: int | tuple[int, int], preprocess: Preprocess
) -> Preprocess:
    """Return a transform with Pillow as reference; options that are given replace the values."""
    if config.resize is not None:
        option = config.resize
        resize = option if isinstance(option, int) else (option[0], option[1])
    order = slice(
        None, None, -1 if preprocess.channels == "bgr" else 1
    )  # options are in the order RGB
    offset = preprocess.offset
    if config.offset is not None:
        offset = "floor" if config.offset == "floor" else "round"
    changed = pillow_preprocess(
        resize=resize,
        crop=preprocess.crop,
        interpolation=config.interpolation or preprocess.interpolation,
        mean=config.mean[order] if config.mean else preprocess.mean,
        std=config.std[order] if config.std else preprocess.std,
        offset=offset,
        channels=preprocess.channels,
    )
    return changed if config.scale is None else _apply_scale(config, changed)


def _apply_scale(config: TransformConfig, preprocess: Preprocess) -> Preprocess:
    """Return a transform for images that keep their numbers, as `config.scale` asks."""
    num_channels = len(preprocess.mean) if config.channels is None else config.channels
    num_bands = num_channels if config.bands is None else len(config.bands)
    for key, value in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(value) != num_bands:
            numbers = ",".join(["0.5"] * num_bands)
            raise ConfigError(
                f"model.transform.{key} has {counted(len(value), 'number')} and the model gets "
                f"{counted(num_bands, 'channel')} of the images. Give one number a channel, of "
                f"values after the division, such as 'model.transform.{key}=[{numbers}]'; "
                "model.transform.channels and model.transform.bands say which channels those are."
            )
    if preprocess.interpolation not in ("bilinear", "bicubic"):
        raise ConfigError(
            f"model.transform.scale: these weights ask for the interpolation "
            f"{preprocess.interpolation}. Give model.transform.interpolation=bilinear or bicubic "
            "as well."
        )

    def reference(image: Image.Image) -> torch.Tensor:
        raise ConfigError(
            "model.transform.scale: this needs RGB images of 8 bits, and the model takes images "
            "with a stated scale."
        )

    divisor = float(config.scale) if isinstance(config.scale, int | float) else None
    bands = None if config.bands is None else tuple(config.bands)
    return replace(preprocess, reference=reference, scale=PixelScale(divisor, num_channels, bands))


def pillow_preprocess(
    *,
    resize: int | tuple[int, int],
    crop: tuple[int, int],
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
    offset: Literal["round", "floor"],
    channels: Literal["rgb", "bgr"] = "rgb",
) -> Preprocess:
    """Return the transform of these values, computed by Pillow."""

    def reference(image: Image.Image) -> torch.Tensor:
        resized = _resized(image, resize, interpolation)
        x = centre_crop(TF.pil_to_tensor(resized), crop, offset)
        return _normalised(x, mean, std, channels)

    return Preprocess(
        reference=reference,
        crop=crop,
        resize=resize,
        interpolation=interpolation,
        mean=tuple(mean),
        std=tuple(std),
        offset=offset,
        channels=channels,
    )


def windowed_preprocess(
    preprocess: Preprocess, overlap: float, resize: int | tuple[int, int] | None
) -> Preprocess:
    """Return the transform of a model that gets windows of the size of its crop.

    It neither crops nor, without `resize`, resizes an image; normalisation stays.
    `overlap` is the share of a window that the next one repeats.
    """

    def reference(image: Image.Image) -> torch.Tensor:
        if resize is not None:
            image = _resized(image, resize, preprocess.interpolation)
        x = TF.pil_to_tensor(image)
        return _normalised(x, preprocess.mean, preprocess.std, preprocess.channels)

    return replace(
        preprocess,
        reference=reference if preprocess.scale is None else preprocess.reference,
        resize=resize,
        overlap=overlap,
    )


def _resized(image: Image.Image, resize: int | tuple[int, int], interpolation: str) -> Image.Image:
    size = [resize] if isinstance(resize, int) else [*resize]
    resized: Image.Image = TF.resize(image, size, InterpolationMode(interpolation), antialias=True)
    return resized


def _normalised(
    x: torch.Tensor, mean: Sequence[float], std: Sequence[float], channels: Literal["rgb", "bgr"]
) -> torch.Tensor:
    """Normalise (3, H, W) uint8 RGB in the order of the channels of a model."""
    x = x.flip(0) if channels == "bgr" else x
    normalised: torch.Tensor = TF.normalize(x.float() / 255, [*mean], [*std])
    return normalised
