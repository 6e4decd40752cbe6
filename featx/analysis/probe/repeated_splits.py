"""Means and spreads of metrics over the splits of several seeds (probe.seeds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from featx.analysis.probe.metrics import METRICS, mean_and_spread
from featx.analysis.probe.nested_selection import split_accuracies
from featx.analysis.probe.paired_tests import ALPHA, holm, resampled_test
from featx.analysis.probe.result import SeedProbe


def seeds_entry(of_seeds: Sequence[SeedProbe], methods: Sequence[str]) -> dict[str, Any]:
    """Return the entry `seeds` of probe.json.

    Args:
        of_seeds: results of each seed, two or more.
        methods: methods of the probe, of which the first one chooses the best layer.

    Returns:
        seeds; layer_of_seeds, the layer that each seed chose on its validation rows, and chosen,
        the metrics with it; layers -> method -> metrics; layer, the one with the highest mean
        accuracy on the validation rows of all seeds; and differences, other layer -> entry of
        `_difference`. A metric is given by `_spread`.
    """
    method = methods[0]
    tops = [each.top(method) for each in of_seeds]
    layers = list(of_seeds[0].layers)

    def values(layer: str, name: str) -> list[dict[str, Any]]:
        return [each.layers[layer].about[name] for each in of_seeds]

    def merit(layer: str) -> float:
        found = [about["validation_accuracy"] for about in values(layer, method)]
        return round(float(np.mean(found)), 12)  # means may differ in their last bits

    best = max(layers, key=merit)
    return {
        "seeds": [each.task.seed for each in of_seeds],
        "layer_of_seeds": [top.layer for top in tops],
        "chosen": _metrics([top.about for top in tops]),
        "layers": {
            layer: {name: _metrics(values(layer, name)) for name in methods} for layer in layers
        },
        "layer": best,
        "differences": _differences(of_seeds, best, method),
    }


def _differences(of_seeds: Sequence[SeedProbe], best: str, method: str) -> dict[str, Any]:
    """Compare a layer with each other one over the splits of all seeds.

    Args:
        of_seeds: results of each seed.
        best: the layer.
        method: the method.

    Returns:
        other layer -> spread over the seeds of the accuracy of the best layer minus that of the
        other one; interval and p of the mean over all splits, as returned by `resampled_test`;
        p_holm, corrected for the number of layers; and told_apart, whether it is below ALPHA.
        Without scipy the last four are None.
    """
    splits = [split for each in of_seeds for split in each.task.splits]
    share = float(np.mean([len(split.test) / len(split.train) for split in splits]))
    found: dict[str, Any] = {}
    for layer in of_seeds[0].layers:
        if layer == best:
            continue
        of_splits, differences = list[float](), list[float]()
        for each in of_seeds:
            mine, theirs = (split_accuracies(each, name, method) for name in (best, layer))
            of_splits += [a - b for a, b in zip(mine, theirs, strict=True)]
            ours, others = (each.layers[name].about[method]["accuracy"] for name in (best, layer))
            differences.append(ours - others)
        interval, p = resampled_test(of_splits, share)
        found[layer] = {**_spread(differences), "interval": interval, "p": p}
    p_values = [each["p"] for each in found.values()]
    known = None not in p_values
    corrected = holm(p_values) if known else p_values
    for each, p in zip(found.values(), corrected, strict=True):
        each["p_holm"], each["told_apart"] = p, p < ALPHA if known else None
    return found


def _metrics(of_seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of each metric, None for one that is not available for every seed."""
    found: dict[str, Any] = {}
    for name in METRICS:
        values = [each[name] for each in of_seeds]
        found[name] = None if None in values else _spread(values)
    return found


def _spread(values: list[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation, smallest and largest value, and the values."""
    return {**mean_and_spread(values), "min": min(values), "max": max(values)}
