"""Files of a probe: probe.json, predictions.csv and one head per layer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from featx.analysis.probe.few_shot import few_shot_csv
from featx.analysis.probe.heads import Head, head_bytes, head_path
from featx.analysis.probe.result import SeedProbe
from featx.analysis.probe.row_predictions import TestedSplits, predictions_csv
from featx.errors import ConfigError
from featx.storage import open_folder
from featx.store import FeatureStore, layout, load_manifest, result_json


def write_probe(result: dict[str, Any], seed_probes: Sequence[SeedProbe]) -> None:
    """Write the heads, the predictions and probe.json, and name the files in it."""
    task, layers = seed_probes[0].task, seed_probes[0].layers
    store = task.training.store
    # probe.json names the other files with their checksums, so it is written last.
    heads = {layer: (each.head, each.head_method) for layer, each in layers.items()}
    write_heads(
        store,
        result,
        {layer: (head, method) for layer, (head, method) in heads.items() if head and method},
    )
    _write_few_shot(result, seed_probes[0])
    data = predictions_csv(
        task.keys,
        task.y,
        result["classes"],
        [_tested_splits(seed_probe) for seed_probe in seed_probes],
    )
    write_result(store, result, data)


def write_heads(
    store: FeatureStore, result: dict[str, Any], heads: Mapping[str, tuple[Head, str]]
) -> None:
    """Write the heads, and name each in the entry of its layer, the best one at the top."""
    folder = output_folder(store)
    disk = open_folder(folder)
    disk.make_folder(folder / layout.PROBE_HEADS)
    paths: dict[Path, str] = {}
    for layer, (head, method) in heads.items():
        path = head_path(folder, layer)
        if path in paths:
            raise ConfigError(
                f"the heads of {paths[path]} and {layer} would have one file, {path}; probe them "
                "one after the other with layers=."
            )
        paths[path] = layer
        data = head_bytes(head, _about_head(store, result, layer, method))
        disk.replace_unlocked(path, data)
        result["layers"][layer]["head"] = {
            "file": str(path.relative_to(folder)),
            "method": method,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    result["head"] = result["layers"][result["layer"]].get("head")


def _write_few_shot(result: dict[str, Any], first: SeedProbe) -> None:
    """Write few_shot.csv if there were such probes, and name it in `few_shot_predictions`."""
    draws = {
        (layer, method): method_draws
        for layer, each in first.layers.items()
        for method, method_draws in each.few_shot.items()
    }
    if not draws:
        return
    folder = output_folder(first.task.training.store)
    path = folder / layout.PROBE_HEADS / layout.PROBE_FEW_SHOT
    data = few_shot_csv(first.task, result["classes"], draws)
    open_folder(folder).replace_unlocked(path, data)
    result["few_shot_predictions"] = _file_entry(path, folder, data)


def write_result(store: FeatureStore, result: dict[str, Any], predictions: bytes) -> None:
    """Write predictions.csv, and probe.json, which names it with its checksum."""
    folder = output_folder(store)
    disk = open_folder(folder)
    path = folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS
    disk.make_folder(path.parent)
    disk.replace_unlocked(path, predictions)
    if "few_shot_predictions" not in result:  # the file of an earlier probe
        disk.remove(path.with_name(layout.PROBE_FEW_SHOT))
    result["predictions"] = _file_entry(path, folder, predictions)
    disk.replace_unlocked(folder / layout.PROBE, result_json(result, indent=1))


def _file_entry(path: Path, folder: Path, data: bytes) -> dict[str, str]:
    """Return the entry of probe.json that names a file, relative to its folder."""
    return {
        "file": str(path.relative_to(folder)),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def _tested_splits(seed_probe: SeedProbe) -> TestedSplits:
    """Return the splits and predictions of a seed."""
    task, layers = seed_probe.task, seed_probe.layers
    tested = {
        (layer, method): rows
        for layer, each in layers.items()
        for method, rows in each.tested.items()
    }
    near = next((each.near for each in layers.values() if each.near is not None), None)
    pairs = () if near is None else zip(near.test.tolist(), near.training.tolist(), strict=True)
    return TestedSplits(task.seed, task.splits, task.groups, tested, dict(pairs))


def _about_head(
    store: FeatureStore, result: dict[str, Any], layer: str, method: str
) -> dict[str, Any]:
    """Return the description that a head's file contains: how to use it, and its accuracy."""
    about = result["layers"][layer]
    manifest, _ = load_manifest(output_folder(store))
    is_same_store = manifest is not None and manifest.digest == store.attrs["fingerprint"]
    run = manifest.first_run_with(layer) if manifest is not None and is_same_store else None
    reduction = about["reduction"]
    if method == "attentive":  # which takes rows as they are stored
        reduction = {**reduction, "then": "attention", "axes": []}
    return {
        "dataset": layer,
        "method": method,
        "l2": about[method].get("head_l2", about[method]["l2"]),
        "fitted_on": about[method]["head_fitted_on"],
        "accuracy": about[method].get("accuracy"),
        "reduction": reduction,
        "classes": result["targets"] if "targets" in result else result["classes"],
        **{
            name: result[name]
            for name in ("store", "fingerprint", "model", "weights", "weights_sha256", "transform")
        },
        # How the layer was extracted, for prediction on new images. A merged file does not contain
        # it.
        "config": run.header.config if run else None,
        "resolved": dict(run.resolved) if run else None,
        "spec": next(asdict(spec) for spec in run.layers if spec.name == layer) if run else None,
    }


def output_folder(store: FeatureStore) -> Path:
    """Return the folder for files computed from a store: its folder, or that of its single file."""
    return store.root if store.root.is_dir() else store.root.parent
