"""Files of a probe: probe.json, predictions.csv, few_shot.csv and one head per layer."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from featx.analysis.probe.comparisons import OtherProbe
from featx.analysis.probe.heads import extraction_entries, head_bytes, head_path
from featx.analysis.probe.records import Draw
from featx.analysis.probe.task import COLUMNS, AnyTask
from featx.analysis.value_settings import run_of_layer
from featx.base import command_text, csv_bytes, csv_cell
from featx.errors import ConfigError, StoreError
from featx.storage import open_folder
from featx.store import FeatureStore, layout, read_result, result_json
from featx.types import Json

STORE_ATTRIBUTES = ("fingerprint", "model", "weights", "weights_sha256", "transform")
"""Attributes of a store that identify the features of a probe."""


def write_probe(task: AnyTask, result: dict[str, Any]) -> None:
    """Write the heads, the predictions and probe.json, and name the files in it."""
    folder = task.store.folder
    paths = {layer: head_path(folder, layer) for layer in task.heads}
    layer_of = {path: layer for layer, path in paths.items()}
    for layer, path in paths.items():
        if layer_of[path] != layer:
            raise ConfigError(
                f"the heads of {layer} and {layer_of[path]} would have one file, {path}; probe "
                "them one after the other with layers=."
            )
    disk = open_folder(folder)

    def write(path: Path, data: bytes) -> dict[str, str]:
        """Write a file, and return the entry of probe.json that names it."""
        disk.replace_unlocked(path, data)
        name, digest = str(path.relative_to(folder)), hashlib.sha256(data).hexdigest()
        return {"file": name, "sha256": digest}

    disk.make_folder(folder / layout.PROBE_HEADS)
    # probe.json names the other files with their checksums, so it is written last.
    for layer, (head, method) in task.heads.items():
        head_data = head_bytes(head, _about_head(task, result, layer, method))
        result["layers"][layer]["head"] = {"method": method, **write(paths[layer], head_data)}
    result["head"] = result["layers"][result["layer"]].get("head")
    path = folder / layout.PROBE_HEADS / layout.PROBE_FEW_SHOT
    if task.draws:
        result["few_shot_predictions"] = write(path, csv_bytes(_few_shot_lines(task)))
    else:
        disk.remove(path)  # the file of an earlier probe
    path = folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS
    result["predictions"] = write(path, csv_bytes(_prediction_lines(task)))
    disk.replace_unlocked(folder / layout.PROBE, result_json(result, indent=1))


def _prediction_lines(task: AnyTask) -> Iterator[list[object]]:
    """Yield the lines of predictions.csv.

    It has the lines of each seed, layer, method and test row. Rows that are in no test set of a
    seed come before, for classes. Numbers are written such that they are read back without a
    difference.
    """
    yield [*COLUMNS, *task.columns]
    for seed in task.seeds:
        yield from task.untested_lines(seed)
        for (record_seed, layer, method), records in task.folds.items():
            for record in records if record_seed == seed else ():
                for row, place in enumerate(record.split.test.tolist()):
                    start = task.line_start(seed, layer, method, record.fold, "test", place)
                    for columns in task.test_columns(record, row):
                        yield [*start, *columns]


def _few_shot_lines(task: AnyTask) -> Iterator[list[object]]:
    """Yield the lines of few_shot.csv.

    The training rows of a draw are the same for all layers and methods and have one line each,
    without a layer; each test row has a line for each layer and method.
    """
    classes, seed = task.training.classes, task.config.seed

    def line(
        layer: str, method: str, draw: Draw, role: str, place: int, predicted: str
    ) -> list[object]:
        start = task.line_start(seed, layer, method, draw.fold, role, place)
        true = classes[task.targets[place]]
        return [*start, true, predicted, draw.shots, draw.number + 1]

    yield [*COLUMNS, "true", "predicted", "shots", "draw"]
    for draw in next(iter(task.draws.values())):
        for place in draw.train.tolist():
            yield line("", "", draw, "train", place, "")
    for (layer, method), draws in task.draws.items():
        for draw in draws:
            for place, label in zip(draw.test.tolist(), draw.predicted.tolist(), strict=True):
                yield line(layer, method, draw, "test", place, classes[label])


def read_prediction_lines(folder: Path, result: Json) -> Iterator[dict[str, str]] | None:
    """Read the lines of predictions.csv of the first seed, of which probe.json has the split, one
    after the other: a line may have thousands of scores.

    None if the file is missing or does not belong to the probe.json with the content `result`.
    """
    try:
        # The name in probe.json is not used: a stranger's file could name any file.
        data = (folder / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != result["predictions"]["sha256"]:
        return None
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8", "surrogateescape", newline="")
    first_seed = str(result["split"]["seed"])
    return (line for line in csv.DictReader(text) if line["seed"] == first_seed)


def is_of_answer(line: Mapping[str, str], result: Json) -> bool:
    """Return whether the numbers at the top of probe.json count a line of predictions.csv."""
    layers = result.get("layer_of_folds") or [result["layer"]]
    chosen = layers[min(int(line["fold"] or 1), len(layers)) - 1]
    names = line["split"], line["layer"], line["method"]
    return names == ("test", chosen, result["method"])


def read_probe(path: str) -> OtherProbe:
    """Read the predictions of the best layer of a store, as its probe.json names it."""
    store = FeatureStore(path)
    folder = store.folder
    remedy = f"{command_text('job=probe', f'store={path}')} makes it."
    try:
        about = read_result(folder / layout.PROBE)
        if about["task"] != "classification":
            raise StoreError(
                f"the probe in {folder} is of probe.task={about['task']}; stores are compared by "
                "their predictions of classes. Probe it again for classes."
            )
        if about["rows_sha256"] != store.rows_sha256:
            raise StoreError(f"the probe in {folder} belongs to another state of it. {remedy}")
        lines = read_prediction_lines(folder, about)
        if lines is None:
            raise StoreError(
                f"{layout.PROBE_PREDICTIONS} in {folder} is missing or was changed. {remedy}"
            )
        split, tested_store = about["split"], store
        if split["kind"] == "test_store":
            tested_store = FeatureStore(split["test_store"])
        keys = {csv_cell(str(key)): str(key) for key in tested_store.keys.tolist()}
        classes = {csv_cell(name): name for name in about["classes"]}
        tested = {
            keys[line["key"]]: (classes[line["true"]], classes[line["predicted"]])
            for line in lines
            if is_of_answer(line, about)
        }
        tested_checksums = tested_store.image_checksums.tolist()
        pairs = zip(tested_store.keys.tolist(), tested_checksums, strict=True)
        checksums = {key: checksum for key, checksum in pairs if key in tested}
        layer, method = str(about["layer"]), str(about["method"])
        return OtherProbe(str(store.root), layer, method, tested, checksums)
    except FileNotFoundError as error:
        raise StoreError(f"{folder} has no probe to compare with: {remedy}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise StoreError(f"the probe in {folder} cannot be read: {error!r}. {remedy}") from error


def _about_head(task: AnyTask, result: Json, layer: str, method: str) -> dict[str, object]:
    about, store = result["layers"][layer], task.store
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
        "classes": list(task.training.classes),
        **{name: result[name] for name in ("store", *STORE_ATTRIBUTES)},
        **extraction_entries(run_of_layer(store, layer), layer),
    }
