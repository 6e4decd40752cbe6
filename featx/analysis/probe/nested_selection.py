"""Layer that each split chose on its validation rows, and the accuracy that this choice has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from featx.analysis.probe.metrics import mean_and_spread
from featx.analysis.probe.result import SeedProbe


def selection_entry(seed_probes: Sequence[SeedProbe], method: str) -> dict[str, Any] | None:
    """Return the entry `layer_selection` of probe.json.

    The highest of several test accuracies is too high on average, because the test rows chose it.
    Each fold of each seed therefore chooses its layer on its own validation rows, and only the
    chosen layer is tested (nested selection: G. Cawley and N. Talbot, On Over-fitting in Model
    Selection and Subsequent Selection Bias in Performance Evaluation, JMLR 11, 2010).

    Returns:
        splits, one entry for each fold of each seed: seed, fold (None for one split), layer,
        validation_accuracy and accuracy of the chosen layer; counts, layer -> number of splits that
        chose it, the most frequent first; accuracy, mean and spread over the splits; and
        highest_on_test, layer and accuracy of the layer with the highest mean over the test rows of
        the splits. None with a single layer.
    """
    layers = list(seed_probes[0].layers)
    if len(layers) == 1:
        return None
    chosen: list[dict[str, Any]] = [
        {
            "seed": each.task.seed,
            "fold": fold if len(each.task.splits) > 1 else None,
            "layer": choice.layer,
            "validation_accuracy": choice.merit[0],
            "accuracy": choice.predictions.accuracy,
        }
        for each in seed_probes
        for fold, choice in enumerate(each.choice.chosen, 1)
    ]
    names = [split["layer"] for split in chosen]
    means = {
        layer: float(np.mean([split_accuracies(each, layer, method) for each in seed_probes]))
        for layer in layers
    }
    highest = max(means, key=lambda layer: means[layer])
    return {
        "splits": chosen,
        "counts": dict(Counter(names).most_common()),
        "accuracy": mean_and_spread([split["accuracy"] for split in chosen]),
        "highest_on_test": {"layer": highest, "accuracy": means[highest]},
    }


def split_accuracies(seed_probe: SeedProbe, layer: str, method: str) -> list[float]:
    """Return the test accuracy of a layer in each split of a seed."""
    about = seed_probe.layers[layer].about[method]
    values: list[float] = about["folds"]["values"] if "folds" in about else [about["accuracy"]]
    return values
