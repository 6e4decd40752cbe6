"""Pictures before they reach a model: listed and decoded."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.commands import COMMAND, Add
from benchmarks.process_memory import peak_mib

if TYPE_CHECKING:
    from featx.types import Source


def decode(arguments: argparse.Namespace) -> None:
    """Images per second of processor time, 500 x 375 JPEGs, one thread."""
    import io

    import torch
    from PIL import Image
    from torchvision.transforms import v2

    from featx.images.decode import decode_array, prepare_jpeg
    from featx.images.image_policy import SIMPLEJPEG, ImagePolicy
    from featx.images.preprocess import Preprocess
    from featx.jobs.bench.photos import make_photos

    torch.set_num_threads(1)
    usual = v2.Compose(
        [
            v2.Resize(256, antialias=True),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    policy = ImagePolicy("apply", (255, 255, 255), 1 << 30)
    quick = ImagePolicy("apply", (255, 255, 255), 1 << 30, SIMPLEJPEG)
    fast = Preprocess(usual, (224, 224), 256, "bilinear", (0.5,) * 3, (0.5,) * 3)
    ways: dict[str, Callable[[bytes], Any]] = {
        "Pillow and v2 transforms": lambda data: usual(Image.open(io.BytesIO(data)).convert("RGB")),
        "featx, Pillow": lambda data: fast.crop_uint8(decode_array(data, policy, 256)),
        "featx, simplejpeg": lambda data: fast.crop_uint8(decode_array(data, quick, 256)),
        "check for decode=gpu": lambda data: prepare_jpeg(data, quick, 256),
    }
    with tempfile.TemporaryDirectory() as name:
        make_photos(Path(name) / "photos", arguments.images)
        files = [path.read_bytes() for path in sorted((Path(name) / "photos").iterdir())]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.runs):
        for way, decoded in ways.items():
            begun = time.process_time()
            for data in files:
                decoded(data)
            found[way].append(len(files) / (time.process_time() - begun))
    first = found["Pillow and v2 transforms"]
    for way, figures in found.items():
        ratios = [a / b for a, b in zip(figures, first, strict=True)]
        print(
            f"{way:26} {statistics.median(figures):6.0f} images/s, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def measure_listing(source: Source) -> None:
    """Print rows, classes, seconds, those of the CPU, and MiB at the peak, of this process."""
    begun, used = time.perf_counter(), time.process_time()
    found = source.listing()
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    print(f"{len(found)} {len(found.classes)} {seconds:.2f} {used:.2f} {peak_mib():.0f}")


def tell_listing(command: list[str]) -> None:
    """Run a process that measures a listing, and say what it found."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows, classes, seconds, used, mib = done.stdout.split()
    print(
        f"{rows} rows, {classes} classes: {seconds} s ({used} s of the CPU), {mib} MiB at the peak"
    )


def table(arguments: argparse.Namespace) -> None:
    """Seconds (and those of the CPU) and peak memory of a process that lists a CSV of paths."""
    if arguments.one:
        from featx.sources import open_source
        from featx.sources.table import TableOptions

        columns = ["patient", "magnification"]
        measure_listing(open_source(TableOptions(root=arguments.one, columns=columns)))
        return
    with tempfile.TemporaryDirectory(prefix="featx-table-", dir=arguments.folder) as name:
        path = Path(name) / "photos.csv"
        with path.open("w") as file:
            file.write("path,label,patient,magnification\n")
            file.writelines(
                f"part{i // 10000:04d}/image-{i:09d}.jpg,class{i % 1000},"
                f"P{i % 50000:06d},{i % 40}\n"
                for i in range(arguments.rows)
            )
        print(f"made {path.stat().st_size >> 20} MiB")
        for _ in range(arguments.runs):
            tell_listing([*COMMAND, "table", "--one", str(path)])


def listing(arguments: argparse.Namespace) -> None:
    """Seconds (and those of the CPU) and peak memory of a process that lists a folder."""
    if arguments.one:
        from featx.sources.base import FolderSource

        measure_listing(FolderSource(Path(arguments.one)))
        return
    with tempfile.TemporaryDirectory(prefix="featx-listing-", dir=arguments.folder) as name:
        begun = time.perf_counter()
        per_class = arguments.files // arguments.classes
        for i in range(arguments.classes):
            folder = Path(name) / f"class-{i:04d}"
            folder.mkdir()
            for k in range(i * per_class, (i + 1) * per_class):
                os.close(os.open(f"{folder}/img_{k:07d}.jpg", os.O_CREAT))
        print(f"made {per_class * arguments.classes} files in {time.perf_counter() - begun:.0f} s")
        for _ in range(arguments.runs):
            tell_listing([*COMMAND, "listing", "--one", name])


def add_commands(add: Add) -> None:
    """The commands of scripts/benchmark that are measured here."""
    one = add("decode", decode)
    one.add_argument("--images", type=int, default=64)
    one.add_argument("--runs", type=int, default=7)
    one = add("listing", listing)
    one.add_argument("--files", type=int, default=1_000_000)
    one.add_argument("--classes", type=int, default=1000)
    one.add_argument("--runs", type=int, default=3)
    one.add_argument("--folder", help="where the files are made")
    one.add_argument("--one", help=argparse.SUPPRESS)
    one = add("table", table)
    one.add_argument("--rows", type=int, default=10_000_000)
    one.add_argument("--runs", type=int, default=1)
    one.add_argument("--folder", help="where the table is made")
    one.add_argument("--one", help=argparse.SUPPRESS)
