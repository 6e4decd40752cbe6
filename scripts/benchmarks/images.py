"""Images before they reach a model: the loader, and decoding on one core."""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.measuring import Add, Case, compare, print_medians, timed
from benchmarks.photos import make_photos
from featx.base import keep_freed_memory
from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess
from featx.images.decode import decode_array
from featx.images.decode_settings import SIMPLEJPEG
from featx.sources import FolderSource
from featx.types import Listing, Part, Source

PIXELS = np.zeros((256, 256, 3), np.uint8)
"""Array that replaces a decoded image."""

CROP = torch.zeros((3, 224, 224), dtype=torch.uint8)
"""Tensor that replaces a resized and cropped image."""


class NoFiles:
    """Source of images that need no reading; their keys are their numbers."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def listing(self) -> Listing:
        """Keys of all images, without labels."""
        keys = np.array([b"%08d" % row for row in range(self._num_rows)], dtype=np.bytes_)
        return Listing(keys, np.full(len(keys), -1, dtype=np.int64))

    def read(self, key: bytes) -> bytes:
        """A few bytes that are never decoded."""
        return key


class NoResize(Preprocess):
    """Preprocessing that returns the same crop for every image."""

    def crop_uint8(self, image: object) -> torch.Tensor:
        """(3, 224, 224) uint8 of zeros."""
        return CROP


def _no_pixels(*arguments: object) -> np.ndarray:
    """Replaces `decode_array`; a Mock would take longer than the loader."""
    return PIXELS


def measure_loader(
    source: Source,
    num_images: int,
    batch_size: int,
    is_empty: bool,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Load `num_images` from the first on, with repeats; if empty, none is decoded or resized.

    Returns images/s by all decoders, and microseconds of processor time per image of this process.
    """
    listing = source.listing()
    kind = NoResize if is_empty else Preprocess
    preprocess = kind(
        lambda image: CROP.float(), (224, 224), 256, "bilinear", (0.5,) * 3, (0.5,) * 3
    )
    policy = ImagePolicy("apply", (255, 255, 255), 1 << 28, jpeg=SIMPLEJPEG)
    settings = DecodeSettings(preprocess, policy, timeout_s=60.0)  # as in a run
    num_rows = len(listing.keys)
    # A part has 4,096 rows, as parts of a run have many batches.
    step = min(4096, num_rows)
    parts = [
        Part(number, start % num_rows, min(start % num_rows + step, num_rows))
        for number, start in enumerate(range(0, num_images, step))
    ]
    target = "featx.images.row_loader.decode_array"
    replaced = mock.patch(target, _no_pixels) if is_empty else contextlib.nullcontext()
    with replaced, Loader(source, listing, settings, device) as loader:
        started_at, processor = time.perf_counter(), time.process_time()
        num_loaded = sum(batch.count for _, batch in loader.batches(parts, batch_size))
        seconds, own_s = time.perf_counter() - started_at, time.process_time() - processor
    return {"images_per_second": num_loaded / seconds, "microseconds": 1e6 * own_s / num_loaded}


def loader_overhead(arguments: argparse.Namespace) -> None:
    """Images/s of the loader, and processor time per image in the process that has the model.

    That time is the one that counts on a machine with many cores and a GPU: decoders have cores of
    their own.
    """
    keep_freed_memory()  # as the command does, before any thread has memory of its own
    size, num_photos = arguments.batch_size, arguments.photos
    no_files = NoFiles(arguments.images)
    with tempfile.TemporaryDirectory(prefix="featx-loader-") as name:
        folder = Path(name, "photos")
        make_photos(folder, num_photos)
        photos = FolderSource(folder)
        measure_loader(photos, num_photos, size, False)  # files, threads, kernels
        cases = {
            "nothing decoded": lambda: measure_loader(no_files, arguments.images, size, True),
            f"{num_photos} JPEGs": lambda: measure_loader(photos, 4 * num_photos, size, False),
        }
        print_medians(cases, arguments.runs, arguments.json)


def decode(arguments: argparse.Namespace) -> None:
    """Images per second of processor time, 500 x 375 JPEGs, one thread: featx, and Pillow."""
    torch.set_num_threads(1)
    transform = v2.Compose(
        [
            v2.Resize(256, antialias=True),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    preprocess = Preprocess(transform, (224, 224), 256, "bilinear", (0.5,) * 3, (0.5,) * 3)

    place = np.empty((3, 224, 224), np.uint8)  # in a batch
    policy = ImagePolicy("apply", (255, 255, 255), 1 << 30, jpeg=SIMPLEJPEG)
    decoders: dict[str, Callable[[bytes], Any]] = {
        "Pillow and v2 transforms": lambda data: transform(
            Image.open(io.BytesIO(data)).convert("RGB")
        ),
        "featx": lambda data: np.copyto(
            place, preprocess.crop_uint8(decode_array(data, policy, 256)).numpy()
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder) / "photos", arguments.images)
        files = [path.read_bytes() for path in sorted((Path(folder) / "photos").iterdir())]

    def case(decode_one: Callable[[bytes], Any]) -> Case:
        return timed(lambda: len([decode_one(data) for data in files]), time.process_time)

    cases = {name: case(decode_one) for name, decode_one in decoders.items()}
    compare("JPEG to a crop of 224 x 224", cases, arguments.runs, "images/s")


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("loader-overhead", loader_overhead)
    command.add_argument("--images", type=int, default=40_000, help="images that cost nothing")
    command.add_argument("--photos", type=int, default=500, help="JPEGs, loaded four times")
    command.add_argument("--batch-size", type=int, default=256)
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--json", action="store_true", help="print each result as JSON as well")
    command = add("decode", decode)
    command.add_argument("--images", type=int, default=64)
    command.add_argument("--runs", type=int, default=7)
