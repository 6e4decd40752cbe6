"""The last recorded figures, with which a checkout is compared in a few minutes.

A slower machine is no regression. So two reference speeds of the machine are measured in the same
run, without featx, and a figure is compared as a multiple of the one that it depends on. Other
programs are no regression either: what depends on the machine is measured in processor time on one
CPU, where no thread waits for another.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.checkout import run_in_checkout
from benchmarks.figures import Figure, read_figures
from benchmarks.photos import make_photos
from benchmarks.startup import processor_seconds

REPOSITORY = Path(__file__).resolve().parents[2]

FILE = Path(__file__).with_suffix(".json")
"""File of the recorded figures."""

LEAST = 0.5
"""Smallest share of a recorded figure, on the same machine, that passes."""

COMMANDS = {
    "startup": ("--runs", "1", "--json"),
    "read": ("--gigabytes", "0.2", "--runs", "3", "--json"),
    "loader-overhead": ("--images", "10000", "--photos", "64", "--runs", "3", "--json"),
}
"""Commands of scripts/benchmark in the short form, with their options."""

MODEL = ("resnet18", "fp32")
"""Model and precision of which an image is measured; every machine computes fp32."""

_LEFT_OUT = ("images_per_second", "seconds")
"""Figures of commands that other programs on the machine change."""

_FEW, _MANY = 64, 192
"""Numbers of images of two runs, whose difference is the time of the images alone."""


@dataclass(frozen=True)
class Recorded:
    """Figures of one commit on one machine.

    Attributes:
        date: day of the measurement.
        commit: abbreviated hash of the commit.
        machine: processor and number of cores.
        references: 'python' and 'torch' -> speed of the machine without featx.
        figures: name of a figure -> value.
    """

    date: str
    commit: str
    machine: str
    references: Mapping[str, float]
    figures: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Read a file of recorded figures."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write the figures to a file."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def shares(
        self, references: Mapping[str, float], figures: Mapping[str, float]
    ) -> dict[str, float]:
        """Speed of each recorded figure now, as a share of the recorded one on this machine.

        Args:
            references: reference speeds of this machine, measured in the same run.
            figures: name of a figure -> value now; one that is missing has the share 0.
        """
        found = {}
        for name, before in self.figures.items():
            figure = Figure.named(name)
            share = figure.speedup(before, figures[name]) if name in figures else 0.0
            reference = figure.of.reference
            if reference is not None:
                share *= self.references[reference] / references[reference]
            found[name] = share
        return found


Measured = tuple[dict[str, float], dict[str, float]]
"""Reference speeds of the machine, and figures of the checkout by their names."""


def check(path: Path, record: bool = False, measured: Callable[[], Measured] | None = None) -> None:
    """Measure the checkout, print the shares, and end with exit code 1 if one is below LEAST.

    A figure below is measured a second time, because another program may have slowed it down.

    Args:
        path: file of the recorded figures.
        record: write the file instead.
        measured: takes the measurements; `measure` when not given.
    """
    measured = measured or measure
    references, figures = measured()
    if record:
        commit = _git_commit()
        Recorded(time.strftime("%Y-%m-%d"), commit, machine(), references, figures).write(path)
        print(f"recorded {len(figures)} figures in {path}")
        return
    recorded = Recorded.read(path)
    shares = recorded.shares(references, figures)
    if min(shares.values(), default=1.0) < LEAST:
        again = recorded.shares(*measured())
        shares = {name: max(share, again[name]) for name, share in shares.items()}
    print(f"\nshares of the figures of {recorded.commit}, {recorded.date}, on this machine")
    for name, share in shares.items():
        print(f"{name:58} {share:6.2f}")
    for name in figures.keys() - shares.keys():
        print(f"{name:58}    new: regressions --short --record writes it")
    if slow := [name for name, share in shares.items() if share < LEAST]:
        print(f"BELOW {LEAST} of the last figure: {', '.join(slow)}")
        raise SystemExit(1)


def measure() -> Measured:
    """Measure reference speeds of the machine, the best of all rounds, and figures in turn."""
    best: dict[str, float] = {}
    figures: dict[str, float] = {}

    def take_references() -> None:
        for name, speed in (("python", python_speed()), ("torch", torch_speed())):
            best[name] = max(best.get(name, 0.0), speed)

    with tempfile.TemporaryDirectory(prefix="featx-short-") as name:
        for command, options in COMMANDS.items():
            take_references()
            figures |= _command_figures(command, *options, cwd=Path(name))
        take_references()
        figures |= _measure_image(Path(name))
        take_references()
    return best, figures


def python_speed() -> float:
    """Millions of steps of a loop of plain Python per second of processor time."""
    steps, values = 300_000, {}
    started_at = time.process_time()
    for i in range(steps):
        values[str(i % 1000)] = [i, i + 1]
    return steps / (time.process_time() - started_at) / 1e6


def torch_speed() -> float:
    """GFLOP of products of matrices of 1024 x 1024, fp32, per second of processor time."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    torch.mm(a, b)
    started_at = time.process_time()
    for _ in range(10):
        torch.mm(a, b)
    return 10 * 2 * 1024**3 / (time.process_time() - started_at) / 1e9


def _command_figures(command: str, *options: str, cwd: Path) -> dict[str, float]:
    """Figures of a command of scripts/benchmark of this checkout."""
    script = str(REPOSITORY / "scripts" / "benchmark")
    on_one_cpu = command != "read"  # it compares readers with each other
    figures = read_figures(_output([sys.executable, script, command, *options], cwd, on_one_cpu))
    return {
        figure.name: value for figure, value in figures.items() if figure.metric not in _LEFT_OUT
    }


def _measure_image(folder: Path) -> dict[str, float]:
    """Processor time of an image on one CPU, from file to store, with random weights."""
    model, precision = MODEL
    make_photos(folder / "photos", _MANY)
    seconds = {}
    for count in (_FEW, _MANY):
        command = [
            sys.executable, "-m", "featx", f"model={model}", f"precision={precision}",
            "model.weights=null", "data=photos", f"data.limit={count}", f"out=first-{count}",
        ]  # fmt: skip
        before = processor_seconds()
        _output(command, folder, on_one_cpu=True)
        seconds[count] = processor_seconds() - before
    each = 1e3 * (seconds[_MANY] - seconds[_FEW]) / (_MANY - _FEW)
    return {Figure(f"{model} {precision}", "model_milliseconds").name: each}


def _output(command: list[str], cwd: Path, on_one_cpu: bool = False) -> str:
    """What a command of this checkout prints; exit code 2 if it fails."""
    print(f"  {' '.join(command[1:])}", flush=True)
    done = run_in_checkout(command, REPOSITORY, cwd, on_one_cpu)
    if done.returncode:
        print(f"{' '.join(command)} failed:\n{done.stderr}", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout


def machine() -> str:
    """Number of cores and name of the processor."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0].partition(":")[2].strip() if names else name
    return f"{os.cpu_count()} cores, {name}"


def _git_commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
