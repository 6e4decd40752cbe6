"""Means and spreads of metrics over the splits of several seeds (probe.seeds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from featx.analysis.probe.metrics import METRICS
from featx.analysis.probe.nested_selection import split_accuracies
from featx.analysis.probe.result import SeedProbe
from featx.analysis.probe.split_differences import SplitValues, differences, metric_spreads


def seeds_entry(seed_probes: Sequence[SeedProbe], methods: Sequence[str]) -> dict[str, Any]:
    """Return the entry `seeds` of probe.json.

    Returns:
        seeds; layer_of_splits, the layer that each split chose on its validation rows, every fold
        of every seed, and chosen, the metrics with it; layers -> method -> metrics; layer, the one
        with the highest mean accuracy on the validation rows of all seeds; and differences, other
        layer -> entry of `differences`. A metric is given by `spread`.
    """
    method = methods[0]
    tops = [each.top(method) for each in seed_probes]
    layers = list(seed_probes[0].layers)

    def entries(layer: str, name: str) -> list[dict[str, Any]]:
        return [each.layers[layer].about[name] for each in seed_probes]

    def merit(layer: str) -> float:
        accuracies = [about["validation_accuracy"] for about in entries(layer, method)]
        return round(float(np.mean(accuracies)), 12)  # means may differ in their last bits

    best = max(layers, key=merit)
    splits = [split for each in seed_probes for split in each.task.splits]
    accuracies = {
        layer: SplitValues(
            [about["accuracy"] for about in entries(layer, method)],
            [value for each in seed_probes for value in split_accuracies(each, layer, method)],
        )
        for layer in layers
    }
    return {
        "seeds": [each.task.seed for each in seed_probes],
        "layer_of_splits": [choice.layer for each in seed_probes for choice in each.choice.chosen],
        "chosen": metric_spreads(METRICS, [top.about for top in tops]),
        "layers": {
            layer: {name: metric_spreads(METRICS, entries(layer, name)) for name in methods}
            for layer in layers
        },
        "layer": best,
        "differences": differences(accuracies, best, splits),
    }
