"""Contents of probe.json: the best layer first, then all layers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.analysis.probe.layer_choice import LayerChoice, best_layer
from featx.analysis.probe.layer_probe import LayerProbe
from featx.analysis.probe.leakage import NEAR_COSINE
from featx.analysis.probe.metrics import metrics_of_folds
from featx.analysis.probe.paired_tests import compare_with_best
from featx.analysis.probe.row_predictions import RowPredictions, join_folds
from featx.analysis.probe.task import ProbeTask
from featx.config import Config
from featx.store import FeatureStore

FORMAT = 1
"""Version of the format of probe.json."""

PAIRS_LISTED = 50
"""Maximum number of pairs of near-duplicates that probe.json lists."""


@dataclass(frozen=True)
class Top:
    """Numbers of the best layer of one seed with the first method.

    Attributes:
        layer: the layer with the highest validation accuracy.
        about: its entry for the method. With several folds and layers its metrics are those of the
            layers that the folds chose (nested validation), which `layer_of_folds` names.
        tested: predictions that the metrics are of.
    """

    layer: str
    about: dict[str, Any]
    tested: RowPredictions


@dataclass(frozen=True)
class SeedProbe:
    """Results of all layers with the splits of one seed.

    Attributes:
        task: rows and splits.
        layers: layer -> results.
        choice: layer that each fold chose.
    """

    task: ProbeTask
    layers: dict[str, LayerProbe]
    choice: LayerChoice

    def top(self, method: str) -> Top:
        """Return the numbers of the best layer."""
        best = best_layer({layer: each.about for layer, each in self.layers.items()}, method)
        about = self.layers[best].about[method]
        if len(self.task.splits) == 1 or len(self.layers) == 1:
            return Top(best, about, self.layers[best].tested[method])
        chosen = self.choice.chosen
        folds = [each.predictions for each in chosen]
        nested = {"layer_of_folds": [each.layer for each in chosen], **metrics_of_folds(folds)}
        return Top(best, {**about, **nested}, join_folds(folds))


def store_entries(store: FeatureStore) -> dict[str, Any]:
    """Return the entries of probe.json that identify the features of the probe."""
    names = ("fingerprint", "model", "weights", "weights_sha256", "transform")
    attributes = {name: str(store.attrs[name]) for name in names}
    return {"featx_probe": FORMAT, "store": str(store.root), **attributes}


def run_entries(config: Config, seconds: float) -> dict[str, Any]:
    """Return the entries of probe.json about the run of the job."""
    finished = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"device": config.device, "finished": finished, "seconds_in_all": round(seconds, 3)}


def probe_result(config: Config, first: SeedProbe, seconds: float) -> dict[str, Any]:
    """Assemble probe.json: the best layer first, then all layers."""
    method = config.probe.methods[0]
    task, layer_probes, top = first.task, first.layers, first.top(method)
    store, best = task.training.store, top.layer
    layers = {layer: each.about for layer, each in layer_probes.items()}
    near = _near_duplicates_entry(task, layer_probes, top.tested)
    notes = list(task.notes)
    if count := layers[best]["repeated_rows"]:
        notes.append(
            f"{count} test rows have the same vector as a training row in {best}; these may be "
            "the same images"
        )
    if near["rows"]:
        notes.append(
            f"{near['rows']} test rows have a near-duplicate among the training rows (cosine of "
            f"{near['cosine']} or more of the standardised {near['layer']}): the accuracy may be "
            "too high; probe.group_column keeps rows that belong together on one side"
        )
    return {
        **store_entries(store),
        "layer": best,
        "method": method,
        **top.about,
        "classes": list(task.training.classes),
        "rows_labelled": len(task.training.rows),
        "split": task.about,
        "near_duplicates": near,
        "paired_tests": compare_with_best(
            layer_probes[best].tested[method],
            {layer: each.tested[method] for layer, each in layer_probes.items() if layer != best},
        ),
        "chosen_by": "validation_accuracy",
        "notes_on_rows": notes,
        **run_entries(config, seconds),
        "layers": layers,
    }


def _near_duplicates_entry(
    task: ProbeTask, layer_probes: dict[str, LayerProbe], tested: RowPredictions
) -> dict[str, Any]:
    """Return the entry `near_duplicates` of probe.json."""
    near = next(each.near for each in layer_probes.values() if each.near is not None)
    checked = near.not_checked is None
    keys = task.keys
    pairs = zip(near.test.tolist(), near.training.tolist(), near.cosines.tolist(), strict=True)
    places = np.concatenate([split.test for split in task.splits])
    return {
        "layer": near.layer,
        "cosine": NEAR_COSINE,
        "rows": len(near.test) if checked else None,
        "not_checked": near.not_checked,
        "without": tested.accuracy_of(~np.isin(places, near.test)) if checked else None,
        "pairs": [
            {"test": str(keys[a]), "training": str(keys[b]), "cosine": round(cosine, 4)}
            for a, b, cosine in list(pairs)[:PAIRS_LISTED]
        ],
    }
