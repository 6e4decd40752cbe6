"""Images before they reach a model."""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.photos import make_photos
from benchmarks.rounds import Add, compare, timed


def decode(arguments: argparse.Namespace) -> None:
    """Images per second of processor time, 500 x 375 JPEGs, one thread: featx, and Pillow."""
    import torch
    from PIL import Image
    from torchvision.transforms import v2

    from featx.images import ImagePolicy, Preprocess
    from featx.images.decode import decode_array
    from featx.images.decode_settings import SIMPLEJPEG

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

    def by_featx(*jpeg: Any) -> Callable[[bytes], Any]:
        policy = ImagePolicy("apply", (255, 255, 255), 1 << 30, *jpeg)
        return lambda data: np.copyto(
            place, preprocess.crop_uint8(decode_array(data, policy, 256)).numpy()
        )

    decoders = {
        "Pillow and v2 transforms": lambda data: transform(
            Image.open(io.BytesIO(data)).convert("RGB")
        ),
        "featx, Pillow": by_featx(),
        "featx, simplejpeg": by_featx(SIMPLEJPEG),
    }
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder) / "photos", arguments.images)
        files = [path.read_bytes() for path in sorted((Path(folder) / "photos").iterdir())]

    def count(decode_one: Callable[[bytes], Any]) -> int:
        for data in files:
            decode_one(data)
        return len(files)

    cases = {
        name: timed(lambda decode_one=decode_one: count(decode_one), time.process_time)
        for name, decode_one in decoders.items()
    }
    compare("JPEG to a crop of 224 x 224", cases, arguments.runs, "images/s")


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("decode", decode)
    command.add_argument("--images", type=int, default=64)
    command.add_argument("--runs", type=int, default=7)
