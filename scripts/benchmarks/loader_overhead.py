"""Images per second that the loader delivers, and the processor time that they cost.

The time of the process that holds the model is the one that counts on a machine with many cores and
a GPU: decoders have cores of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.photos import make_photos
from benchmarks.rounds import Add
from featx.base import keep_freed_memory
from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess
from featx.images.decode_settings import SIMPLEJPEG
from featx.sources import FolderSource
from featx.types import Listing, Part, Source

PIXELS = np.zeros((256, 256, 3), np.uint8)
"""Array that replaces a decoded image."""

CROP = torch.zeros((3, 224, 224), dtype=torch.uint8)
"""Tensor that replaces a resized and cropped image."""


@dataclass(frozen=True)
class LoaderRate:
    """Speed of the loader.

    Attributes:
        images_per_second: images delivered per second, by all decoders.
        microseconds: processor time per image of the process that holds the model.
        total_microseconds: processor time per image of this process and of the decoders, with their
            start.
    """

    images_per_second: float
    microseconds: float
    total_microseconds: float


def _decoders_s() -> float:
    """Seconds of processor time of all living descendants of this process."""
    parent_of, ticks_of = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            parent_of[int(folder.name)] = int(fields[1])
            ticks_of[int(folder.name)] = int(fields[11]) + int(fields[12])
    descendants, found = set(), {os.getpid()}
    while found:
        found = {pid for pid, parent in parent_of.items() if parent in found}
        descendants |= found
    return sum(ticks_of[pid] for pid in descendants) / os.sysconf("SC_CLK_TCK")


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


def measure(
    source: Source, num_images: int, batch_size: int, is_empty: bool, timeout_s: float | None = 60.0
) -> LoaderRate:
    """Load all images once.

    Args:
        source: source of the images.
        num_images: number of images to load, from the first on, with repeats.
        batch_size: images per batch.
        is_empty: whether decoding and resizing are replaced by nothing.
        timeout_s: time limit of an image, as in a run; None for none.
    """
    listing = source.listing()
    kind = NoResize if is_empty else Preprocess
    preprocess = kind(
        lambda image: CROP.float(), (224, 224), 256, "bilinear", (0.5,) * 3, (0.5,) * 3
    )
    policy = ImagePolicy("apply", (255, 255, 255), 1 << 28, jpeg=SIMPLEJPEG)
    settings = DecodeSettings(preprocess, policy, timeout_s=timeout_s)
    num_rows = len(listing.keys)
    # A part has 4,096 rows, as parts of a run have many batches.
    step = min(4096, num_rows)
    parts = [
        Part(number, start % num_rows, min(start % num_rows + step, num_rows))
        for number, start in enumerate(range(0, num_images, step))
    ]
    target = "featx.images.row_loader.decode_array"
    replaced = mock.patch(target, _no_pixels) if is_empty else contextlib.nullcontext()
    with replaced, Loader(source, listing, settings) as loader:
        num_loaded = 0
        started_at, processor = time.perf_counter(), time.process_time()
        for _, batch in loader.batches(parts, batch_size):
            num_loaded += batch.count
        seconds, own_s = time.perf_counter() - started_at, time.process_time() - processor
        total_s = own_s + _decoders_s()
    return LoaderRate(num_loaded / seconds, 1e6 * own_s / num_loaded, 1e6 * total_s / num_loaded)


def run(arguments: argparse.Namespace) -> None:
    """Print medians of some rounds; the two cases alternate."""
    keep_freed_memory()  # as the command does, before any thread has memory of its own
    empty: list[LoaderRate] = []
    real: list[LoaderRate] = []
    with tempfile.TemporaryDirectory(prefix="featx-loader-") as name:
        folder = Path(name, "photos")
        make_photos(folder, arguments.photos)
        photos = FolderSource(folder)
        measure(photos, arguments.photos, arguments.batch_size, False)  # files, threads, kernels
        for _ in range(arguments.runs):
            no_files = NoFiles(arguments.images)
            empty.append(measure(no_files, arguments.images, arguments.batch_size, True))
            real.append(measure(photos, 4 * arguments.photos, arguments.batch_size, False))
    for label, rates in (("nothing decoded", empty), (f"{arguments.photos} JPEGs", real)):
        median = LoaderRate(
            statistics.median(rate.images_per_second for rate in rates),
            statistics.median(rate.microseconds for rate in rates),
            statistics.median(rate.total_microseconds for rate in rates),
        )
        fastest = max(rate.images_per_second for rate in rates)
        print(
            f"{label:16} {median.images_per_second:8.0f} images/s (fastest {fastest:.0f}), "
            f"{median.microseconds:7.1f} us of processor time per image in the process of the "
            f"model, {median.total_microseconds:.1f} us in all"
        )
        if arguments.json:
            print(json.dumps({"case": label, **asdict(median)}))


def add_commands(add: Add) -> None:
    """Register this module's command, `loader-overhead`."""
    command = add("loader-overhead", run)
    command.add_argument("--images", type=int, default=40_000, help="images that cost nothing")
    command.add_argument("--photos", type=int, default=500, help="JPEGs, loaded four times")
    command.add_argument("--batch-size", type=int, default=256)
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--json", action="store_true", help="print each result as JSON as well")
