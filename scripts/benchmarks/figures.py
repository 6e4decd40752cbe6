"""Figures of benchmark commands, as one line of JSON for each case that is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

UNITS = {
    "images_per_second": "images/s",
    "microseconds": "us an image",
    "of_first": "of the first case",
    "of_memmap": "of memmap",
    "peak_mib": "MiB",
    "processor_seconds": "s of processor time",
    "seconds": "s",
}
"""Name of a figure in a line of JSON -> its unit, as it is printed."""

RATES = ("images_per_second", "of_first", "of_memmap")
"""Figures of which more is better."""


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        case: what was measured.
        metric: key of UNITS.
    """

    case: str
    metric: str

    @property
    def name(self) -> str:
        """Case and metric, as they are printed."""
        return f"{self.case}: {self.metric}"

    @classmethod
    def named(cls, name: str) -> Figure:
        """Return the figure of a printed name."""
        case, _, metric = name.rpartition(": ")
        return cls(case, metric)

    def speedup(self, before: float, after: float) -> float:
        """Return how many times as good a value is as an earlier one."""
        better, worse = (after, before) if self.metric in RATES else (before, after)
        return better / worse if worse else 1.0


def print_figures(case: str, **values: float) -> None:
    """Print the figures of a case as one line of JSON; their names are keys of UNITS."""
    unknown = values.keys() - UNITS.keys()
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join(UNITS)}")
    print(json.dumps({"case": case, **values}))


def read_figures(printed: str) -> dict[Figure, float]:
    """Read the lines of JSON in what a command has printed; other lines are for people."""
    figures: dict[Figure, float] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            values: Mapping[str, object] = json.loads(line)
            for metric, value in values.items():
                if metric in UNITS and isinstance(value, int | float):
                    figures[Figure(str(values["case"]), metric)] = float(value)
    return figures
