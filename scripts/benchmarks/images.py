"""Images before they reach a model: listed, decoded, and cut into boxes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.commands import COMMAND, Add
from benchmarks.process_memory import memory_cgroup, peak_mib, run_measured

if TYPE_CHECKING:
    from featx.types import Source

BOX_PIXELS = 200
"""Width and height of the boxes of `tiles`."""


def decode(arguments: argparse.Namespace) -> None:
    """Images per second of processor time, 500 x 375 JPEGs, one thread."""
    import io

    import torch
    from PIL import Image
    from torchvision.transforms import v2

    from benchmarks.photos import make_photos
    from featx.images import ImagePolicy, Preprocess
    from featx.images.decode import decode_array
    from featx.images.image_policy import SIMPLEJPEG

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
    policy = ImagePolicy("apply", (255, 255, 255), 1 << 30)
    fast_policy = ImagePolicy("apply", (255, 255, 255), 1 << 30, SIMPLEJPEG)
    preprocess = Preprocess(transform, (224, 224), 256, "bilinear", (0.5,) * 3, (0.5,) * 3)
    decoders: dict[str, Callable[[bytes], Any]] = {
        "Pillow and v2 transforms": lambda data: transform(
            Image.open(io.BytesIO(data)).convert("RGB")
        ),
        "featx, Pillow": lambda data: preprocess.crop_uint8(decode_array(data, policy, 256)),
        "featx, simplejpeg": lambda data: preprocess.crop_uint8(
            decode_array(data, fast_policy, 256)
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder) / "photos", arguments.images)
        files = [path.read_bytes() for path in sorted((Path(folder) / "photos").iterdir())]
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(arguments.runs):
        for name, decode_one in decoders.items():
            started_at = time.process_time()
            for data in files:
                decode_one(data)
            rates[name].append(len(files) / (time.process_time() - started_at))
    first = rates["Pillow and v2 transforms"]
    for name, figures in rates.items():
        ratios = [a / b for a, b in zip(figures, first, strict=True)]
        print(
            f"{name:26} {statistics.median(figures):6.0f} images/s, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def measure_listing(source: Source) -> None:
    """Print rows, classes, seconds, processor time and peak MiB of listing in this process."""
    started_at, used = time.perf_counter(), time.process_time()
    rows = source.listing()
    seconds, used = time.perf_counter() - started_at, time.process_time() - used
    print(f"{len(rows)} {len(rows.classes)} {seconds:.2f} {used:.2f} {peak_mib():.0f}")


def print_listing(command: list[str]) -> None:
    """Run a process that measures a listing, and print its figures."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows, classes, seconds, used, mib = done.stdout.split()
    print(
        f"{rows} rows, {classes} classes: {seconds} s ({used} s of processor time), "
        f"{mib} MiB at the peak"
    )


def table(arguments: argparse.Namespace) -> None:
    """Seconds, processor time and peak memory of a process that lists a CSV of paths."""
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
            print_listing([*COMMAND, "table", "--one", str(path)])


def listing(arguments: argparse.Namespace) -> None:
    """Seconds, processor time and peak memory of a process that lists a folder."""
    if arguments.one:
        from featx.sources import FolderSource

        measure_listing(FolderSource(Path(arguments.one)))
        return
    with tempfile.TemporaryDirectory(prefix="featx-listing-", dir=arguments.folder) as name:
        started_at = time.perf_counter()
        per_class = arguments.files // arguments.classes
        for i in range(arguments.classes):
            folder = Path(name) / f"class-{i:04d}"
            folder.mkdir()
            for k in range(i * per_class, (i + 1) * per_class):
                os.close(os.open(f"{folder}/img_{k:07d}.jpg", os.O_CREAT))
        seconds = time.perf_counter() - started_at
        print(f"made {per_class * arguments.classes} files in {seconds:.0f} s")
        for _ in range(arguments.runs):
            print_listing([*COMMAND, "listing", "--one", name])


def tiles(arguments: argparse.Namespace) -> None:
    """Seconds and memory of the command for many boxes of one large image."""
    limit = arguments.limit
    with (
        contextlib.nullcontext() if limit is None else memory_cgroup(limit) as cgroup,
        tempfile.TemporaryDirectory(prefix="featx-tiles-", dir=arguments.folder) as name,
    ):
        folder = Path(name)
        image = make_large_image(folder / "images", arguments.side, arguments.format)
        write_boxes(folder / "boxes.csv", image.name, arguments.side, arguments.boxes)
        options = [
            "model=test_resnet", "model.weights=null", "data=folder", "data.root=images",
            "data.boxes=boxes.csv", "data.max_pixels=500000000", "data.timeout_s=300", "out=store",
        ]  # fmt: skip
        if arguments.batch_size is not None:
            options.append(f"batch_size={arguments.batch_size}")
        done = run_measured([sys.executable, "-m", "featx", *options], folder, cgroup)
        where = "" if limit is None else f" in a memory cgroup of {limit:,} bytes"
        memory = f"{done.resident_mib:.0f} MiB resident, {done.private_mib:.0f} MiB of that private"
        if done.code:
            print(f"ended with {done.code}{where} after {done.seconds:.1f} s; {memory}")
            raise SystemExit(done.output)
        summary = json.loads((folder / "store" / "summary.json").read_text())
        print(
            f"{arguments.boxes} boxes of one {image.suffix[1:]} file of {arguments.side} x "
            f"{arguments.side} pixels, {image.stat().st_size / 1e6:.0f} MB: {done.seconds:.1f} s, "
            f"{summary['images_per_second']:.1f} images/s, {memory}; ended with 0{where}"
        )


def make_large_image(folder: Path, side: int, file_format: str) -> Path:
    """Write a square image of smooth noise.

    Args:
        folder: new folder for the file.
        side: width and height in pixels.
        file_format: 'jpeg', or 'tiff' for tiles of 256 x 256 pixels compressed by zlib.
    """
    import numpy as np
    from PIL import Image

    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    image = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
    if file_format == "jpeg":
        path = folder / "large.jpg"
        image.save(path, quality=88)
        return path
    import tifffile

    path = folder / "large.tiff"
    pixels = np.asarray(image)
    tifffile.imwrite(path, pixels, tile=(256, 256), compression="zlib", photometric="rgb")
    return path


def write_boxes(path: Path, key: str, side: int, count: int) -> None:
    """Write a table of boxes on a grid, row by row from the upper left corner."""
    per_row = side // BOX_PIXELS
    if count > per_row**2:
        raise SystemExit(f"--boxes {count}: expected at most {per_row**2} for --side {side}")
    with path.open("w") as file:
        file.write("path,x,y,width,height\n")
        for i in range(count):
            y, x = divmod(i, per_row)
            file.write(f"{key},{x * BOX_PIXELS},{y * BOX_PIXELS},{BOX_PIXELS},{BOX_PIXELS}\n")


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("decode", decode)
    command.add_argument("--images", type=int, default=64)
    command.add_argument("--runs", type=int, default=7)
    command = add("listing", listing)
    command.add_argument("--files", type=int, default=1_000_000)
    command.add_argument("--classes", type=int, default=1000)
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where the files are made")
    command.add_argument("--one", help=argparse.SUPPRESS)
    command = add("table", table)
    command.add_argument("--rows", type=int, default=10_000_000)
    command.add_argument("--runs", type=int, default=1)
    command.add_argument("--folder", help="where the table is made")
    command.add_argument("--one", help=argparse.SUPPRESS)
    command = add("tiles", tiles)
    command.add_argument("--boxes", type=int, default=10_000, help="of 200 x 200 pixels")
    command.add_argument("--format", choices=["jpeg", "tiff"], default="jpeg")
    command.add_argument("--side", type=int, default=20_000, help="width and height of the image")
    command.add_argument(
        "--batch-size", type=int, help="of the run; chosen by featx when not given"
    )
    command.add_argument(
        "--limit", type=int, help="bytes of memory of a cgroup for the command; root"
    )
    command.add_argument("--folder", help="where the image and the store are made")
