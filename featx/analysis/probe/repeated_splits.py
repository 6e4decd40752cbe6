"""Means and spreads of metrics over the splits of several seeds (probe.seeds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from featx.analysis.probe.metrics import METRICS, mean_and_spread
from featx.analysis.probe.result import SeedProbe


def seeds_entry(of_seeds: Sequence[SeedProbe], methods: Sequence[str]) -> dict[str, Any]:
    """Return the entry `seeds` of probe.json.

    Args:
        of_seeds: results of each seed, two or more.
        methods: methods of the probe, of which the first one chooses the best layer.

    Returns:
        seeds; layer_of_seeds, the layer that each seed chose on its validation rows, and chosen,
        the metrics with it; layers -> method -> metrics; and differences, other layer -> accuracy
        of the first seed's best layer minus that of the other one, with the first method, on the
        test rows of each seed. A metric is given by `_spread`.
    """
    method = methods[0]
    tops = [each.top(method) for each in of_seeds]
    reference = tops[0].layer

    def values(layer: str, name: str) -> list[dict[str, Any]]:
        return [each.layers[layer].about[name] for each in of_seeds]

    return {
        "seeds": [each.task.seed for each in of_seeds],
        "layer_of_seeds": [top.layer for top in tops],
        "chosen": _metrics([top.about for top in tops]),
        "layers": {
            layer: {name: _metrics(values(layer, name)) for name in methods}
            for layer in of_seeds[0].layers
        },
        "differences": {
            layer: _spread(
                [
                    best["accuracy"] - other["accuracy"]
                    for best, other in zip(
                        values(reference, method), values(layer, method), strict=True
                    )
                ]
            )
            for layer in of_seeds[0].layers
            if layer != reference
        },
    }


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
