"""Seconds from the command to the first row in its store: imports, model, trials and a part."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.commands import Add
from benchmarks.photos import make_photos

POLL_S = 0.02
TIMEOUT_S = 600.0


def run(arguments: argparse.Namespace) -> None:
    """Wall-clock seconds of the command until its first part is committed."""
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        for number in range(arguments.runs):
            rounds.append(seconds_to_first_row(arguments.model, folder, folder / f"out-{number}"))
            print(f"  {rounds[-1]:.1f} s", flush=True)
    median = statistics.median(rounds)
    print(f"{arguments.model}: {median:.1f} s ({min(rounds):.1f} to {max(rounds):.1f})")


def seconds_to_first_row(model: str, folder: Path, out: Path) -> float:
    """Start a run over folder/photos, and end it by a signal when its first part is there."""
    command = [sys.executable, "-m", "featx", f"model={model}", "model.weights=null"]
    # Packing removes the parts, which a short run does before they are seen here.
    command += ["data=folder", f"data.root={folder / 'photos'}", f"out={out}", "pack=false"]
    started_at = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not any((out / "parts").glob("part-*.h5")):
            if process.poll() is not None or time.perf_counter() - started_at > TIMEOUT_S:
                process.kill()
                assert process.stderr is not None
                raise SystemExit(f"no row was committed:\n{process.stderr.read()}")
            time.sleep(POLL_S)
        seconds = time.perf_counter() - started_at
        process.terminate()
    return seconds


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("first-row", run)
    command.add_argument("--model", default="resnet18", help="random weights")
    command.add_argument(
        "--images", type=int, default=2000, help="of the run, which is ended early"
    )
    command.add_argument("--runs", type=int, default=3)
