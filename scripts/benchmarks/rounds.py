"""Cases that are measured in turn, once a round, and compared with the first of them."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping

Case = Callable[[], float]
"""Takes one measurement, and returns a rate."""

Run = Callable[[argparse.Namespace], None]

Add = Callable[[str, Run], argparse.ArgumentParser]
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

    Args:
        title: what all cases do.
        cases: name -> takes one measurement.
        runs: number of rounds.
        unit: unit of the rates.

    Returns:
        Name -> median of the ratios to the first case in the same round.
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
