"""Probes of numbers and labels: results of one seed, and their spread over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.analysis.probe.heads import Head
from featx.analysis.probe.split_differences import SplitValues, differences, metric_spreads
from featx.analysis.probe.value_methods import FittedValues
from featx.analysis.probe.value_task import Matrix, ValueTask


@dataclass(frozen=True)
class ValueTop:
    """Numbers of the best layer of one seed with one method.

    Attributes:
        layer: layer with the smallest validation loss.
        about: its entry for the method. With several folds and layers its metrics are those of the
            layers that the folds chose (nested validation), which `layer_of_folds` names.
        predicted: (n, T) predictions for the test rows that the metrics are of.
    """

    layer: str
    about: dict[str, Any]
    predicted: Matrix


@dataclass(frozen=True)
class ValueSeed:
    """Results of all layers with the splits of one seed.

    Attributes:
        task: targets and splits.
        layers: layer -> its entry in probe.json.
        fits: (layer, method) -> fit of each split.
        heads: layer -> head for new images, of the method linear; empty for other seeds than the
            first one.
    """

    task: ValueTask
    layers: dict[str, dict[str, Any]]
    fits: dict[tuple[str, str], list[FittedValues]]
    heads: dict[str, Head]

    def top(self, method: str) -> ValueTop:
        """Return the numbers of the best layer; each fold chooses on its own validation rows."""
        best = min(self.layers, key=lambda layer: self.layers[layer][method]["validation_loss"])
        folds = range(len(self.task.rows.splits))
        chosen = self.chosen_layers(method)
        predicted = [self.fits[chosen[fold], method][fold].predicted for fold in folds]
        rows, about = np.concatenate(predicted), self.layers[best][method]
        if len(folds) > 1 and len(self.layers) > 1:
            metrics = self.task.judge(self.task.test_places, rows)
            about = {**about, "layer_of_folds": chosen, **metrics}
        return ValueTop(best, about, rows)

    def chosen_layers(self, method: str) -> list[str]:
        """Return the layer with the smallest validation loss in each fold."""
        folds = range(len(self.task.rows.splits))
        return [
            min(self.layers, key=lambda layer: self.fits[layer, method][fold].validation_loss)
            for fold in folds
        ]

    def split_values(self, layer: str, method: str) -> list[float | None]:
        """Return the first metric of a layer on the test rows of each split."""
        pairs = zip(self.task.rows.splits, self.fits[layer, method], strict=True)
        targets = self.task.targets
        return [self.task.first_metric(targets[split.test], fit.predicted) for split, fit in pairs]


def value_seeds_entry(seed_probes: Sequence[ValueSeed], methods: Sequence[str]) -> dict[str, Any]:
    """Return the entry `seeds` of probe.json.

    Returns:
        seeds; layer_of_splits, the layer that each split chose on its validation rows, every fold
        of every seed, and chosen, the metrics with it; layers -> method -> metrics; layer, the one
        with the smallest mean loss on the validation rows of all seeds; and differences of the
        first metric, as returned by `differences`, None if it is not available in every split. A
        metric is given by `spread`.
    """
    first, method = seed_probes[0], methods[0]
    names, layers = first.task.metrics, list(first.layers)
    tops = [each.top(method) for each in seed_probes]

    def entries(layer: str, name: str) -> list[dict[str, Any]]:
        return [each.layers[layer][name] for each in seed_probes]

    def loss(layer: str) -> float:
        return float(np.mean([about["validation_loss"] for about in entries(layer, method)]))

    best = min(layers, key=loss)
    return {
        "seeds": [each.task.seed for each in seed_probes],
        "layer_of_splits": [layer for each in seed_probes for layer in each.chosen_layers(method)],
        "chosen": metric_spreads(names, [top.about for top in tops]),
        "layers": {
            layer: {name: metric_spreads(names, entries(layer, name)) for name in methods}
            for layer in layers
        },
        "layer": best,
        "differences": _differences(seed_probes, best, method),
    }


def _differences(seed_probes: Sequence[ValueSeed], best: str, method: str) -> dict[str, Any] | None:
    """Compare a layer with each other one by the first metric."""
    name = seed_probes[0].task.metrics[0]
    values = {}
    for layer in seed_probes[0].layers:
        by_seed = [each.layers[layer][method][name] for each in seed_probes]
        by_split = [value for each in seed_probes for value in each.split_values(layer, method)]
        available = [value for value in by_split if value is not None]
        if None in by_seed or len(available) < len(by_split):
            return None
        values[layer] = SplitValues(by_seed, available)
    splits = [split for each in seed_probes for split in each.task.rows.splits]
    return differences(values, best, splits)
