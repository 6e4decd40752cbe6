"""Photographs for measurements: 500 x 375 JPEGs cut from the two photographs of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

WIDTH, HEIGHT, QUALITY = 500, 375, 90


def make_photos(
    folder: Path, count: int, seed: int = 0, sizes: Sequence[tuple[int, int]] = ()
) -> None:
    """Write different JPEGs of about 55 kB each into a new folder, the same ones every time.

    Each is a crop of china.jpg or flower.jpg with its own position and brightness, resized to one
    of the sizes if there are any.
    """
    photographs = load_sample_images().images
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        top = int(generator.integers(0, photograph.shape[0] - HEIGHT + 1))
        left = int(generator.integers(0, photograph.shape[1] - WIDTH + 1))
        crop = photograph[top : top + HEIGHT, left : left + WIDTH]
        brightness = generator.uniform(0.8, 1.2)
        image = Image.fromarray(np.clip(crop * brightness, 0, 255).astype(np.uint8))
        if sizes:
            image = image.resize(sizes[int(generator.integers(len(sizes)))])
        image.save(folder / f"photo-{i:05d}.jpg", quality=QUALITY)
