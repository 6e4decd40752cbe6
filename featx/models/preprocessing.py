"""Preprocessing that the options of a model state."""

from __future__ import annotations

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from featx.config import TransformConfig
from featx.images import Preprocess


def stated_preprocess(config: TransformConfig) -> Preprocess:
    """Return the transform that options describe, with Pillow for the reference."""

    def reference(image: Image.Image) -> torch.Tensor:
        mode = InterpolationMode(config.interpolation)
        resized = TF.resize(image, [config.resize], mode, antialias=True)
        x = TF.pil_to_tensor(TF.center_crop(resized, [config.crop, config.crop]))
        normalised: torch.Tensor = TF.normalize(x.float() / 255, config.mean, config.std)
        return normalised

    return Preprocess(
        reference=reference,
        crop=(config.crop, config.crop),
        resize=config.resize,
        interpolation=config.interpolation,
        mean=(config.mean[0], config.mean[1], config.mean[2]),
        std=(config.std[0], config.std[1], config.std[2]),
    )
