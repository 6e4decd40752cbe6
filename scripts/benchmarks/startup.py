"""Seconds of short commands, from their start to their end: most of them are imports and trials."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import print_figures
from benchmarks.photos import make_photos
from benchmarks.rounds import Add


@dataclass
class Command:
    """A command that is measured once a round.

    Attributes:
        name: what it does.
        arguments: its arguments; OUT stands for a new folder of the round.
        code: exit code that it must have.
        seconds: wall-clock seconds of each round.
        processor: seconds of processor time of each round, its children included.
    """

    name: str
    arguments: list[str]
    code: int = 0
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> None:
    """Wall-clock seconds of a small run, the same on its finished store, and commands without."""
    model = [f"model={arguments.model}", "model.weights=null", "data=photos"]
    commands = [
        Command(f"a run of {arguments.images} images", [*model, "out=OUT"]),
        Command("the same on its finished store", [*model, "out=OUT"]),
        Command("a misspelt layer", [*model, "out=other", "layers=[layr4]"], 2),
        Command("a misspelt option", [*model, "out=other", "batchsize=4"], 2),
        Command("a misspelt model", ["model=resnet81", "data=photos", "out=other"], 2),
        Command("job=status", ["job=status", "store=OUT"]),
        Command("job=verify", ["job=verify", "store=OUT"]),
        Command("--help", ["--help"]),
    ]
    with tempfile.TemporaryDirectory(prefix="featx-startup-") as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        for path in (folder / "photos").rglob("*"):
            os.utime(path, (1e9, 1e9))  # images that were just written are compared by their bytes
        measure(Command("bytecode", commands[0].arguments), folder, "before")
        for number in range(arguments.runs):
            for command in commands:
                measure(command, folder, f"round-{number}")
        summary = json.loads((folder / "round-0" / "summary.json").read_text())
    print(f"{'':34} wall-clock (range)     processor time")
    for command in commands:
        print(
            f"{command.name:34} {statistics.median(command.seconds):5.2f} s "
            f"({min(command.seconds):.2f} to {max(command.seconds):.2f}) "
            f"{statistics.median(command.processor):8.2f} s"
        )
    if arguments.json:
        for command in commands:
            seconds = statistics.median(command.seconds)
            processor = statistics.median(command.processor)
            print_figures(command.name, seconds=seconds, processor_seconds=processor)
        print_figures(commands[0].name, peak_mib=summary["peak_memory_mib"])


def measure(command: Command, folder: Path, out: str) -> None:
    """Run a command in a folder, and record how long it takes."""
    line = [text.replace("OUT", out) for text in command.arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # An installed package has bytecode. Without it, each command would compile featx first.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, started_at = processor_seconds(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "featx", *line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    command.seconds.append(time.perf_counter() - started_at)
    command.processor.append(processor_seconds() - before)
    if done.returncode != command.code:
        raise SystemExit(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr}")


def processor_seconds() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("startup", run)
    command.add_argument("--model", default="resnet18", help="random weights")
    command.add_argument("--images", type=int, default=20)
    command.add_argument("--runs", type=int, default=5, help="rounds, with each command once")
    command.add_argument("--json", action="store_true", help="print the medians as JSON as well")
