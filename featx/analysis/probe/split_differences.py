"""Spread of metrics over random splits, and differences between layers over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.analysis.probe.metrics import mean_and_spread
from featx.analysis.probe.paired_tests import ALPHA, holm, resampled_test
from featx.analysis.probe.splits import Split


@dataclass(frozen=True)
class SplitValues:
    """Values of one metric of one layer over the splits of several seeds.

    Attributes:
        of_seeds: value on the test rows of all splits of each seed.
        of_splits: value on the test rows of each split of each seed.
    """

    of_seeds: Sequence[float]
    of_splits: Sequence[float]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation, smallest and largest value, and the values."""
    return {**mean_and_spread(list(values)), "min": min(values), "max": max(values)}


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
        corrected for the number of layers; and told_apart, whether it is below ALPHA. Without scipy
        the last four are None.
    """
    share = float(np.mean([len(split.test) / len(split.train) for split in splits]))
    found: dict[str, Any] = {}
    mine = values[best]
    for layer, theirs in values.items():
        if layer == best:
            continue
        of_splits = [a - b for a, b in zip(mine.of_splits, theirs.of_splits, strict=True)]
        of_seeds = [a - b for a, b in zip(mine.of_seeds, theirs.of_seeds, strict=True)]
        interval, p = resampled_test(of_splits, share)
        found[layer] = {**spread(of_seeds), "interval": interval, "p": p}
    p_values = [each["p"] for each in found.values()]
    known = None not in p_values
    corrected = holm(p_values) if known else p_values
    for each, p in zip(found.values(), corrected, strict=True):
        each["p_holm"], each["told_apart"] = p, p < ALPHA if known else None
    return found
