"""Transforms of the weights of torchvision, as preprocessing of featx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from featx.errors import ModelError

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from featx.images import Preprocess


def crop_size(preset: Any) -> list[int] | None:
    """Return [height, width] that the transform of some weights crops, or None for another kind."""
    side = getattr(preset, "crop_size", None)
    return None if side is None else [side[0], side[0]]


def resize_preset(preset: Any, side: int) -> Any:
    """Return the transform of some weights for images of another size.

    Args:
        preset: transform from a weights enum; another one than those of classification and
            segmentation is returned as it is.
        side: height and width of the images in pixels; the share of the centre stays the same.
    """
    from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

    values: dict[str, Any] = {
        "mean": tuple(getattr(preset, "mean", ())),
        "std": tuple(getattr(preset, "std", ())),
        "interpolation": getattr(preset, "interpolation", None),
        "antialias": getattr(preset, "antialias", None),
    }
    if isinstance(preset, ImageClassification):
        resize = round(preset.resize_size[0] * side / preset.crop_size[0])
        return ImageClassification(crop_size=side, resize_size=resize, **values)
    if isinstance(preset, SemanticSegmentation):
        return SemanticSegmentation(resize_size=side, **values)
    return preset


def preprocess_of(preset: Any, name: str) -> Preprocess:
    """The Preprocess of the transform of some weights.

    Args:
        preset: transform from a weights enum.
        name: name of the model, for the message.

    Raises:
        ModelError: the model takes no batch of single images.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

    from featx.images import Preprocess

    if isinstance(preset, ImageClassification):
        crop, resize = preset.crop_size[0], preset.resize_size[0]
        reference = preset
    elif isinstance(preset, SemanticSegmentation):
        # The transform keeps the proportions of each image. A batch needs one size, so the centre
        # is cropped to a square.
        crop = resize = preset.resize_size[0]
        reference = _square(preset, crop)
    else:
        raise ModelError(
            f"{name} takes no batch of single images (its transform is "
            f"{type(preset).__name__}). Choose the classification model that it is built on, "
            "such as resnet50."
        )
    interpolation = {
        InterpolationMode.BILINEAR: "bilinear",
        InterpolationMode.BICUBIC: "bicubic",
    }.get(preset.interpolation, "other")
    return Preprocess(
        reference=reference,
        crop=(crop, crop),
        resize=resize,
        interpolation=interpolation,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )


def _square(preset: Any, side: int) -> Any:
    """A segmentation transform followed by a square centre crop."""
    from torchvision.transforms import functional as TF

    def reference(image: Image.Image) -> torch.Tensor:
        x: torch.Tensor = TF.center_crop(preset(image), [side, side])
        return x

    return reference
