"""The last recorded figures, with which a checkout is compared in a few minutes.

A slower machine is no regression. So two reference speeds of the machine are measured in the same
run, without featx, and a figure is compared as a multiple of the one that it depends on.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import Figure, read_figures
from featx.jobs.bench.photos import make_photos

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
"""Model and precision whose rate is measured; every machine computes fp32."""

_IMAGES = 96


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
    """Measure reference speeds of the machine, the best of all turns, and figures in turns."""
    references: dict[str, float] = {}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="featx-short-") as name:
        for command, options in COMMANDS.items():
            _take_references(references)
            figures |= _command_figures(command, *options, cwd=Path(name))
        _take_references(references)
        figures |= _rate(Path(name))
        _take_references(references)
    return references, figures


def _take_references(best: dict[str, float]) -> None:
    for name, speed in (("python", python_speed()), ("torch", torch_speed())):
        best[name] = max(best.get(name, 0.0), speed)


def python_speed() -> float:
    """Millions of steps of a loop of plain Python per second of processor time."""
    steps, found = 300_000, {}
    begun = time.process_time()
    for i in range(steps):
        found[str(i % 1000)] = [i, i + 1]
    return steps / (time.process_time() - begun) / 1e6


def torch_speed() -> float:
    """GFLOP/s of a product of two matrices of 1024 x 1024, fp32, by all threads."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - begun)
    return 2 * 1024**3 / statistics.median(seconds) / 1e9


def _command_figures(command: str, *options: str, cwd: Path) -> dict[str, float]:
    """Figures of a command of scripts/benchmark of this checkout.

    Rates of the loader are left out: they depend on the number of cores in other ways than the
    references do. Its processor time per image is kept.
    """
    found = read_figures(
        _output([sys.executable, str(REPOSITORY / "scripts" / "benchmark"), command, *options], cwd)
    )
    return {
        figure.name: value
        for figure, value in found.items()
        if figure.metric != "images_per_second"
    }


def _rate(folder: Path) -> dict[str, float]:
    """Images per second of a run, with random weights."""
    model, precision = MODEL
    make_photos(folder / "photos", _IMAGES)
    _output(
        [sys.executable, "-m", "featx", f"model={model}", f"precision={precision}",
         "model.weights=null", "data=photos", "out=rate"],
        folder,
    )  # fmt: skip
    summary = json.loads((folder / "rate" / "summary.json").read_text())
    figure = Figure(f"{model} {precision}", "images_per_second")
    return {figure.name: summary["images_per_second"]}


def _output(command: list[str], cwd: Path) -> str:
    """What a command of this checkout prints; exit code 2 if it fails."""
    print(f"  {' '.join(command[1:])}", flush=True)
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
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
