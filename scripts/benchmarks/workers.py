"""The command with one process and with workers: parts of a model without cost, and a real one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.rounds import Add, compare


def parts(arguments: argparse.Namespace) -> None:
    """Parts per minute with a model that costs nothing, from the first part that is ready on."""
    import h5py

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        pixels = np.random.default_rng(0).integers(0, 256, (arguments.parts, 8, 8, 3), np.uint8)
        with h5py.File(folder / "images.h5", "w") as file:
            file["x"] = pixels
        options = [
            "model=custom", "model.factory=benchmarks.null_model:MeanColour",
            "model.weights=null", "model.transform.resize=8", "model.transform.crop=8",
            "layers=[mean]", "precision=fp32", "compile=false", "batch_size=1",
            "part_rows=1", "pack=false", "data=hdf5",
            f"data.root={folder / 'images.h5'}", "data.dataset=/x",
        ]  # fmt: skip
        compare_workers(arguments, folder, options, 60, "parts a minute")


def workers(arguments: argparse.Namespace) -> None:
    """Images per second of a real model, by one process and by workers, from the first batch on."""
    options = [
        "data=textiles", f"data.limit={arguments.images}", "precision=fp32", "compile=false",
        "pack=false", *arguments.options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        compare_workers(arguments, Path(name), options, 1, "images/s")


def compare_workers(
    arguments: argparse.Namespace, folder: Path, options: list[str], factor: float, unit: str
) -> None:
    """Run the command for each of `arguments.workers`, with images/s multiplied by `factor`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = folder / "store"

    def measure(count: str) -> float:
        last = [f"out={out}", "overwrite=true", f"executor.workers={count}"]
        command = [sys.executable, "-m", "featx", *options, *last]
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        rate = json.loads((out / "summary.json").read_text())["images_per_second"]
        return factor * float(rate)

    cases = {
        f"executor.workers={count}": lambda count=count: measure(count)
        for count in arguments.workers
    }
    compare("one process, and workers", cases, arguments.runs, unit)


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("parts", parts)
    command.add_argument("--parts", type=int, default=2000, help="of one row each")
    real = add("workers", workers)
    real.add_argument("options", nargs="*", help="of featx, such as model=resnet50")
    real.add_argument("--images", type=int, default=1024)
    for each in (command, real):
        each.add_argument(
            "--workers", nargs="+", default=["null", "1", "2"], help="worker processes"
        )
        each.add_argument("--runs", type=int, default=3)
        each.add_argument("--folder", help="where the store lies")
