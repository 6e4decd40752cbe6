"""Seconds of short commands, from their start to their end: most of them are imports and trials."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Add, print_medians, run_command
from benchmarks.photos import make_photos


def run(arguments: argparse.Namespace) -> None:
    """Seconds of a small run, the same on its finished store, commands without images, errors."""
    first = f"a run of {arguments.images} images"
    model = ["model=resnet18", "model.weights=null", "data=photos"]
    with tempfile.TemporaryDirectory(prefix="featx-startup-") as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        for path in (folder / "photos").rglob("*"):
            os.utime(path, (1e9, 1e9))  # images that were just written are compared by their bytes
        measure(folder, [*model, "out=store"])  # writes bytecode

        def first_run() -> dict[str, float]:
            shutil.rmtree(folder / "store")
            figures = measure(folder, [*model, "out=store"])
            summary = json.loads((folder / "store" / "summary.json").read_text())
            return {**figures, "peak_mib": summary["peak_memory_mib"]}

        cases = {
            first: first_run,
            "the same on its finished store": lambda: measure(folder, [*model, "out=store"]),
            "job=status": lambda: measure(folder, ["job=status", "store=store"]),
            "job=verify": lambda: measure(folder, ["job=verify", "store=store"]),
            "a misspelt layer": lambda: measure(folder, [*model, "layers=[layr4]"], 2),
            "a misspelt option": lambda: measure(folder, [*model, "batchsize=4"], 2),
            "--help": lambda: measure(folder, ["--help"]),
        }
        print_medians(cases, arguments.runs, arguments.json)


def measure(folder: Path, options: list[str], code: int = 0) -> dict[str, float]:
    """Run the command in a folder, and return the seconds that it takes."""
    before, started_at = os.times(), time.perf_counter()
    run_command(sys.executable, "-m", "featx", *options, cwd=folder, code=code)
    seconds, now = time.perf_counter() - started_at, os.times()
    processor = now.children_user + now.children_system
    processor -= before.children_user + before.children_system
    return {"seconds": seconds, "processor_seconds": processor}


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("startup", run)
    command.add_argument("--images", type=int, default=20)
    command.add_argument("--runs", type=int, default=5, help="rounds, with each command once")
    command.add_argument("--json", action="store_true", help="print the medians as JSON as well")
