"""Seconds from the command to the first row in its store: imports, model, probes and a part."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.commands import Add
from featx.jobs.bench.photos import make_photos

LOOK_S = 0.02
GIVE_UP_S = 600.0


def run(arguments: argparse.Namespace) -> None:
    """Wall-clock seconds of the command until its first part is durable."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        for number in range(arguments.runs):
            found.append(seconds_to_first_row(arguments.model, folder, folder / f"out-{number}"))
            print(f"  {found[-1]:.1f} s", flush=True)
    middle = statistics.median(found)
    print(f"{arguments.model}: {middle:.1f} s ({min(found):.1f} to {max(found):.1f})")


def seconds_to_first_row(model: str, folder: Path, out: Path) -> float:
    """Start a run over folder/photos, and end it by a signal when its first part is there."""
    command = [sys.executable, "-m", "featx", f"model={model}", "model.weights=null"]
    command += ["data=folder", f"data.root={folder / 'photos'}", f"out={out}"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not any((out / "parts").glob("part-*.h5")):
            if process.poll() is not None or time.perf_counter() - begun > GIVE_UP_S:
                process.kill()
                assert process.stderr is not None
                raise SystemExit(f"no row came:\n{process.stderr.read()}")
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - begun
        process.terminate()
    return seconds


def add_commands(add: Add) -> None:
    """The command of scripts/benchmark that is measured here."""
    one = add("first-row", run)
    one.add_argument("--model", default="resnet18", help="random weights")
    one.add_argument("--images", type=int, default=2000, help="of the run, which is ended early")
    one.add_argument("--runs", type=int, default=3)
