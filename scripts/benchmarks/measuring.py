"""Cases that are measured in turn, once a round; their figures; and commands that are run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]

UNITS = {
    "images_per_second": "images/s",
    "microseconds": "us an image",
    "of_memmap": "of memmap",
    "peak_mib": "MiB",
    "processor_seconds": "s of processor time",
    "seconds": "s",
}
"""Name of a figure in a line of JSON -> its unit, as it is printed."""

RATES = ("images_per_second", "of_memmap")
"""Figures of which more is better."""

Case = Callable[[], float]
"""Takes one measurement, and returns a rate."""

Add = Callable[[str, Callable[[argparse.Namespace], None]], argparse.ArgumentParser]
"""Makes a command of a function; its docstring is the help, its options are added to the parser."""


def timed(function: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> Case:
    """Make a case of a function that returns how many items it processed."""

    def rate() -> float:
        started_at = clock()
        count = function()
        return count / (clock() - started_at)

    return rate


def compare(title: str, cases: Mapping[str, Case], runs: int, unit: str) -> dict[str, float]:
    """Measure every case once a round, and print medians and ratios to the first case.

    The ratios are those to the first case in the same round; their medians are returned.
    """
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, measure in cases.items():
            rates[name].append(measure())
            print(f"  {name}: {rates[name][-1]:.1f} {unit}", file=sys.stderr, flush=True)
    print(title)
    first = next(iter(rates.values()))
    found = {}
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        found[name] = statistics.median(ratios)
        print(
            f"  {name:36} {statistics.median(values):12.1f} {unit} ({min(values):.1f} to "
            f"{max(values):.1f}), ratio {found[name]:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
    return found


def print_medians(
    cases: Mapping[str, Callable[[], dict[str, float]]], runs: int, as_json: bool
) -> None:
    """Measure every case once a round, and print medians and ranges of its figures, of UNITS."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, measure in cases.items():
            rounds[name].append(measure())
    for name, found in rounds.items():
        medians, texts = {}, []
        for metric in found[0]:
            values = [figures[metric] for figures in found]
            medians[metric] = statistics.median(values)
            texts.append(
                f"{medians[metric]:.2f} {UNITS[metric]} ({min(values):.2f} to {max(values):.2f})"
            )
        print(f"{name:34} {', '.join(texts)}")
        if as_json:
            print_figures(name, **medians)


def print_figures(case: str, **values: float) -> None:
    """Print the figures of a case as one line of JSON; their names are keys of UNITS."""
    print(json.dumps({"case": case, **values}))


@dataclass(frozen=True)
class Figure:
    """What a value was measured of, and a key of UNITS."""

    case: str
    metric: str

    @property
    def name(self) -> str:
        """Case and metric, as they are printed."""
        return f"{self.case}: {self.metric}"

    def speedup(self, before: float, after: float) -> float:
        """Return how many times as good a value is as an earlier one."""
        better, worse = (after, before) if self.metric in RATES else (before, after)
        return better / worse if worse else 1.0


def read_figures(printed: str) -> dict[Figure, float]:
    """Read the lines of JSON in what a command has printed; other lines are for people."""
    figures: dict[Figure, float] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            values = json.loads(line)
            case = values.pop("case")
            figures |= {Figure(case, key): x for key, x in values.items() if key in UNITS}
    return figures


class CommandError(RuntimeError):
    """A command has ended with another exit code than expected."""


def run_command(
    *words: str | Path, cwd: Path | None = None, checkout: Path = REPOSITORY, code: int = 0
) -> str:
    """Return what a command prints that imports featx from a checkout.

    Raises CommandError with the end of its errors if it has another exit code.
    """
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # An installed package has bytecode. Without it, each command would compile featx first.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        line = " ".join(map(str, words))
        raise CommandError(f"{line} ended with {done.returncode}:\n{done.stderr[-1500:]}")
    return done.stdout


def smallest_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Smallest cosine between a row of `a` and the same row of `b`, both (N, ...).

    Rows of random weights may be zero: two such rows are equal and count as 1, one as 0.
    """
    a, b = (each.reshape(len(each), -1).astype(np.float64) for each in (a, b))
    norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    product = norms[0] * norms[1]
    cosines = (a * b).sum(1) / np.where(product == 0, 1, product)
    return float(np.where((norms[0] == 0) & (norms[1] == 0), 1, cosines).min())
