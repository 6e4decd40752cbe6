"""Smallest run, which the contracts share: a convolutional network and six images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import featx

NUM_IMAGES = 6
BROKEN = "dog/3.png"
"""Image that cannot be decoded."""


class SmallConvNet(nn.Module):
    """Two convolutions and a linear layer for images of 32 by 32 pixels, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, stride=8)
        self.block = nn.Conv2d(8, 6, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, 32, 32) float32 -> (B, 4) float32."""
        logits: torch.Tensor = self.head(self.pool(self.block(self.stem(x))).flatten(1))
        return logits


FACTORY = f"{SmallConvNet.__module__}:{SmallConvNet.__name__}"

MODEL_ARGUMENTS = (
    "model=custom",
    f"model.factory={FACTORY}",
    "model.weights=null",
    "model.transform.resize=32",
    "model.transform.crop=32",
    "precision=fp32",
    "compile=false",
    "device=cpu",
    "batch_size=2",
)
"""Arguments of the command for this model; as `options`, nothing is left to be measured."""


def options(images: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Keywords of `featx.extract` for a run in which nothing is left to be measured.

    Args:
        images: folder of images, from `write_images`.
        out: folder of the store.
        more: further options, which replace those given here.
    """
    return {
        "model": {
            "name": "small_conv_net",
            "library": "custom",
            "factory": FACTORY,
            "weights": None,
            "transform": {"resize": 32, "crop": 32},
        },
        "data": str(images),
        "layers": ["stem", "head"],
        "precision": "fp32",
        "compile": False,
        "device": "cpu",
        "batch_size": 2,
        "part_rows": 2,
        "max_failures": 1,
        "pack": False,
        "out": str(out),
        **more,
    }


def extract(images: Path, out: Path, **more: Any) -> featx.FeatureStore:
    """Store of the features of a folder of images; arguments as for `options`."""
    return featx.extract(**options(images, out, **more))


def write_images(folder: Path) -> Path:
    """Write NUM_IMAGES images of 48 by 48 pixels in two class folders; BROKEN is no image."""
    for number in range(NUM_IMAGES):
        path = folder / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        squares = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(squares.repeat(12, 0).repeat(12, 1)).save(path)
    (folder / BROKEN).write_bytes(b"no image")
    return folder
