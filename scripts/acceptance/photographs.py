"""Images of the acceptance: many JPEGs as of ImageNet, and odd files."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.photos import make_photos
from comparison.inputs import make_image, make_odd_images

from acceptance.steps import DRY_IMAGES, Settings

SIZES = [(500, 375)] * 33 + [(375, 500)] * 10 + [(500, 333)] * 10 + [(333, 500)] * 5
SIZES += [(400 + 13 * i % 220, 300 + 29 * i % 260) for i in range(42)]
"""Sizes of a hundred images, as often as ImageNet has them."""

LINKS = 5
"""Names of each file in the large folder."""


def large_folder(settings: Settings, count: int) -> Path:
    """Folder with `count` names of JPEG files, made once; a dry run has few.

    Each file has several names.
    """
    count = DRY_IMAGES if settings.dry_run else count
    folder = settings.work / f"photos-{count}"
    if folder.exists():
        return folder
    files = settings.work / f"files-{count}"
    num_files = max(1, count // LINKS)
    starts = range(0, num_files, 500)
    folders = [files / f"{start:06d}" for start in starts]
    counts = [min(500, num_files - start) for start in starts]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make_photos, folders, counts, starts, [SIZES] * len(starts)))
    made = sorted(files.rglob("*.jpg"))
    half = folder.with_name(f"{folder.name}.part")
    for number in range(count):
        target = half / f"class-{number % 10}" / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(made[number % num_files], target)
    half.rename(folder)
    return folder


def odd_folder(settings: Settings) -> Path:
    """Folder of files that decoders treat differently, good and broken ones, made once."""
    folder = settings.work / "odd"
    if not folder.exists():
        half = folder.with_name("odd.part")
        make_odd_images(half)
        make_image(51, 6000, 4000).save(half / "large.jpg")
        half.rename(folder)
    return folder
