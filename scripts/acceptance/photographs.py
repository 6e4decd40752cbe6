"""Images of the acceptance: many JPEGs as of ImageNet, and odd files."""

from __future__ import annotations

import io
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.photos import make_photos
from PIL import Image

from acceptance.steps import DRY_IMAGES, Settings

_SIZES = [(500, 375)] * 33 + [(375, 500)] * 10 + [(500, 333)] * 10 + [(333, 500)] * 5
_SIZES += [(400 + 13 * i % 220, 300 + 29 * i % 260) for i in range(42)]
"""Sizes of a hundred images, as often as ImageNet has them."""

LINKS = 5
"""Names of each file in the large folder."""


def large_folder(settings: Settings, count: int) -> Path:
    """Folder with `count` names of JPEG files, made once; each file has several names.

    Args:
        settings: where and how the step runs.
        count: number of names; a dry run has few.
    """
    count = DRY_IMAGES if settings.dry_run else count
    folder = settings.work / f"photos-{count}"
    if folder.exists():
        return folder
    files = settings.work / f"files-{count}"
    num_files = max(1, count // LINKS)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        starts = range(0, num_files, 500)
        list(pool.map(partial(_write_some, files, num_files), starts))
    half = folder.with_name(f"{folder.name}.part")
    for number in range(count):
        source = files / f"{number % num_files:06d}.jpg"
        target = half / f"class-{number % 10}" / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
    half.rename(folder)
    return folder


def _write_some(files: Path, num_files: int, start: int) -> None:
    """Write up to 500 JPEGs: photographs, resized to the sizes of ImageNet."""
    sources = files.with_name(f"{files.name}-sources-{start}")
    count = min(500, num_files - start)
    make_photos(sources, count)
    files.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(start)
    for number, path in enumerate(sorted(sources.glob("*.jpg"))):
        size = _SIZES[int(rng.integers(len(_SIZES)))]
        with Image.open(path) as image:
            image.resize(size).save(files / f"{start + number:06d}.jpg", quality=90)
        path.unlink()
    sources.rmdir()


def odd_folder(settings: Settings) -> Path:
    """Folder of files that decoders treat differently, good and broken ones, made once."""
    folder = settings.work / "odd"
    if folder.exists():
        return folder
    half = folder.with_name("odd.part")
    half.mkdir()
    rng = np.random.default_rng(0)

    def photo(width: int = 320, height: int = 240) -> Image.Image:
        small = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)

    for number in range(4):
        photo().save(half / f"baseline-{number}.jpg", quality=90)
        photo().save(half / f"progressive-{number}.jpg", progressive=True)
        photo().convert("L").save(half / f"grey-{number}.jpg")
        photo().convert("CMYK").save(half / f"cmyk-{number}.jpg")
        photo().save(half / f"444-{number}.jpg", subsampling=0)
        photo().save(half / f"png-{number}.png")
        photo(1 + number, 1).save(half / f"tiny-{number}.jpg")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        photo(300, 200).save(half / f"exif-{orientation}.jpg", exif=exif)
    photo(6000, 4000).save(half / "large.jpg")
    whole = io.BytesIO()
    photo().save(whole, "JPEG")
    for share in (10, 50, 95):
        (half / f"truncated-{share}.jpg").write_bytes(
            whole.getvalue()[: len(whole.getvalue()) * share // 100]
        )
    (half / "empty.jpg").write_bytes(b"")
    (half / "text.jpg").write_text("no image")
    half.rename(folder)
    return folder
