"""Photographs for measurements: 500 x 375 JPEGs cut from the two photographs of scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from featx.errors import ConfigError

WIDTH, HEIGHT, QUALITY = 500, 375, 90


def make_photos(folder: Path, count: int) -> None:
    """Write different JPEGs of about 55 kB each, the same ones every time.

    Each is a crop of china.jpg or flower.jpg with its own position and brightness.

    Args:
        folder: folder to create.
        count: number of JPEGs.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ConfigError(
            "the images are cut from two photographs of scikit-learn, which is not installed: "
            'pip install "featx[demo]".'
        ) from error
    photographs = load_sample_images().images
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        top = int(generator.integers(0, photograph.shape[0] - HEIGHT + 1))
        left = int(generator.integers(0, photograph.shape[1] - WIDTH + 1))
        crop = photograph[top : top + HEIGHT, left : left + WIDTH]
        brightness = generator.uniform(0.8, 1.2)
        pixels = np.clip(crop * brightness, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"photo-{i:05d}.jpg", quality=QUALITY)
