"""Paired comparisons of the best layer with the others, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ComparedLayers:
    """Paired comparison of the best layer with another one.

    Attributes:
        layer: the other layer.
        unit: 'row' or 'group'.
        best_only: number of test rows or groups for the best layer.
        other_only: number for the other layer.
        difference: accuracy of the best layer minus that of the other one.
        interval: its 95 % interval; None if every test row or group has the same difference.
        p: two-sided p-value, corrected for the number of layers.
        told_apart: whether the two layers differ by p and by the interval of the difference, if
            there is one.
    """

    layer: str
    unit: str
    best_only: int
    other_only: int
    difference: float
    interval: tuple[float, float] | None
    p: float
    told_apart: bool

    @property
    def verdict(self) -> str:
        """'equal' (cannot be told apart), 'worse' or 'better', about the other layer."""
        if not self.told_apart:
            return "equal"
        return "worse" if self.best_only > self.other_only else "better"


@dataclass(frozen=True)
class Difference:
    """Difference of a layer to the best one over the splits of several seeds.

    Attributes:
        mean: mean accuracy of the best layer minus that of this one.
        std: its standard deviation.
        told_apart: whether the corrected resampled t-test tells them apart; None if there is none.
    """

    mean: float
    std: float
    told_apart: bool | None


def comparisons(entry: Mapping[str, Any]) -> tuple[ComparedLayers, ...]:
    """Convert the entry `paired_tests` of probe.json, the largest p-value first."""
    tests = [
        ComparedLayers(
            str(layer), str(each["unit"]), int(each["first_only"]), int(each["second_only"]),
            float(each["difference"]), _interval(each["interval"]), float(each["p_holm"]),
            bool(each["told_apart"]),
        )
        for layer, each in entry.items()
    ]  # fmt: skip
    return tuple(sorted(tests, key=lambda each: -each.p))


def _interval(entry: Sequence[float] | None) -> tuple[float, float] | None:
    """Convert an interval of probe.json."""
    return None if entry is None else (float(entry[0]), float(entry[1]))


def differences_of(seeds: Mapping[str, Any] | None) -> dict[str, Difference]:
    """Convert the differences in the entry `seeds` of probe.json; empty without several seeds."""
    if seeds is None:
        return {}
    return {
        str(layer): Difference(float(each["mean"]), float(each["std"]), each["told_apart"])
        for layer, each in seeds["differences"].items()
    }
