"""Figures of benchmark commands, as one line of JSON for each case that is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What a figure counts.

    Attributes:
        unit: unit, as it is printed.
        is_rate: whether more is better.
        reference: speed of the machine that it depends on, 'python' or 'torch'; None if on neither.
    """

    unit: str
    is_rate: bool
    reference: str | None


METRICS = {
    "images_per_second": Metric("images/s", True, "torch"),
    "microseconds": Metric("us an image", False, "python"),
    "model_milliseconds": Metric("ms an image", False, "torch"),
    "of_first": Metric("of the first case", True, None),
    "of_memmap": Metric("of memmap", True, None),
    "peak_mib": Metric("MiB", False, None),
    "processor_seconds": Metric("s of processor time", False, "python"),
    "seconds": Metric("s", False, "python"),
}
"""Name of a figure in a line of JSON -> what it counts."""


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        case: what was measured.
        metric: key of METRICS.
    """

    case: str
    metric: str

    @property
    def of(self) -> Metric:
        """What the figure counts."""
        return METRICS[self.metric]

    @property
    def name(self) -> str:
        """Case and metric, by which the figure is recorded."""
        return f"{self.case}: {self.metric}"

    @classmethod
    def named(cls, name: str) -> Figure:
        """Return the figure of a recorded name."""
        case, _, metric = name.rpartition(": ")
        return cls(case, metric)

    def speedup(self, before: float, after: float) -> float:
        """Return how many times as good a value is as an earlier one."""
        better, worse = (after, before) if self.of.is_rate else (before, after)
        return better / worse if worse else 1.0


def print_figures(case: str, **values: float) -> None:
    """Print the figures of a case as one line of JSON.

    Args:
        case: what was measured.
        values: keys of METRICS and their values.
    """
    unknown = values.keys() - METRICS.keys()
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join(METRICS)}")
    print(json.dumps({"case": case, **values}))


def read_figures(printed: str) -> dict[Figure, float]:
    """Read the lines of JSON in what a command has printed; other lines are for people."""
    figures: dict[Figure, float] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            values: Mapping[str, object] = json.loads(line)
            for metric, value in values.items():
                if metric in METRICS and isinstance(value, int | float):
                    figures[Figure(str(values["case"]), metric)] = float(value)
    return figures
