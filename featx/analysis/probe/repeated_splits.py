"""Means and spreads of metrics over the splits of several seeds (probe.seeds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from featx.analysis.probe.metrics import METRICS
from featx.analysis.probe.nested_selection import split_accuracies
from featx.analysis.probe.result import SeedProbe
from featx.analysis.probe.split_differences import SplitValues, differences, spread


def seeds_entry(of_seeds: Sequence[SeedProbe], methods: Sequence[str]) -> dict[str, Any]:
    """Return the entry `seeds` of probe.json.

    Args:
        of_seeds: results of each seed, two or more.
        methods: methods of the probe, of which the first one chooses the best layer.

    Returns:
        seeds; layer_of_seeds, the layer that each seed chose on its validation rows, and chosen,
        the metrics with it; layers -> method -> metrics; layer, the one with the highest mean
        accuracy on the validation rows of all seeds; and differences, other layer -> entry of
        `differences`. A metric is given by `spread`.
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
    splits = [split for each in of_seeds for split in each.task.splits]
    accuracies = {
        layer: SplitValues(
            [about["accuracy"] for about in values(layer, method)],
            [value for each in of_seeds for value in split_accuracies(each, layer, method)],
        )
        for layer in layers
    }
    return {
        "seeds": [each.task.seed for each in of_seeds],
        "layer_of_seeds": [top.layer for top in tops],
        "chosen": _metrics([top.about for top in tops]),
        "layers": {
            layer: {name: _metrics(values(layer, name)) for name in methods} for layer in layers
        },
        "layer": best,
        "differences": differences(accuracies, best, splits),
    }


def _metrics(of_seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of each metric, None for one that is not available for every seed."""
    found: dict[str, Any] = {}
    for name in METRICS:
        values = [each[name] for each in of_seeds]
        found[name] = None if None in values else spread(values)
    return found
