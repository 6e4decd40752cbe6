"""Spread of metrics over random splits, and differences between layers over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.analysis.probe.metrics import mean_and_spread
from featx.analysis.probe.paired_tests import ALPHA, holm, resampled_test
from featx.analysis.probe.splits import Split

_EQUAL = "the difference is the same in every split, which tells nothing about its error"
"""Reason why `resampled_test` gives no p-value."""


@dataclass(frozen=True)
class SplitValues:
    """Values of one metric of one layer over the splits of several seeds.

    Attributes:
        by_seed: value on the test rows of all splits of each seed.
        by_split: value on the test rows of each split of each seed.
    """

    by_seed: Sequence[float]
    by_split: Sequence[float]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation, smallest and largest value, and the values."""
    return {**mean_and_spread(list(values)), "min": min(values), "max": max(values)}


def metric_spreads(
    names: Sequence[str], entries: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any] | None]:
    """Return the spread of each metric over the seeds.

    Returns:
        metric -> `spread`, None if it is not available for every seed.
    """
    spreads: dict[str, dict[str, Any] | None] = {}
    for name in names:
        values = [entry[name] for entry in entries]
        spreads[name] = None if None in values else spread(values)
    return spreads


def differences(
    values: Mapping[str, SplitValues], best: str, splits: Sequence[Split]
) -> dict[str, Any]:
    """Compare a layer with each other one over the splits of all seeds.

    Args:
        values: layer -> values of a metric.
        best: the layer.
        splits: all splits.

    Returns:
        other layer -> spread over the seeds of the value of the best layer minus that of the other
        one; interval and p of the mean over all splits, as returned by `resampled_test`; p_holm,
        corrected for the number of layers; told_apart, whether it is below ALPHA; and not_tested,
        the reason if p is None, and with it the two entries before.
    """
    share = float(np.mean([len(split.test) / len(split.train) for split in splits]))
    entries: dict[str, Any] = {}
    best_values = values[best]
    for layer, layer_values in values.items():
        if layer == best:
            continue
        by_split = _differences(best_values.by_split, layer_values.by_split)
        by_seed = _differences(best_values.by_seed, layer_values.by_seed)
        interval, p = resampled_test(by_split, share)
        entries[layer] = {**spread(by_seed), "interval": interval, "p": p}
    # A layer without a p-value counts as a test of the family that finds nothing.
    corrected = holm([1.0 if entry["p"] is None else entry["p"] for entry in entries.values()])
    for entry, p in zip(entries.values(), corrected, strict=True):
        is_tested = entry["p"] is not None
        entry["p_holm"], entry["told_apart"] = (p, p < ALPHA) if is_tested else (None, None)
        entry["not_tested"] = None if is_tested else _EQUAL
    return entries


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [first - second for first, second in zip(a, b, strict=True)]
