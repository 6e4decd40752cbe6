"""job=cka: layer similarity by CKA, RSA, SVCCA and the Procrustes distance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import WIDTH, CountProgress, facts, shown_path, table
from featx.config import CkaConfig, Config
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import open_input, result_folder
from featx.store import FeatureStore, matching_layers

if TYPE_CHECKING:
    from featx.analysis.similarity import LayerSimilarity

_TITLES = {
    "cka": "linear CKA",
    "cka_debiased": "linear CKA, debiased",
    "rsa": "RSA",
    "svcca": "SVCCA, 99% of the variance",
    "procrustes": "Procrustes distance, squared",
}


def run(config: Config, config_yaml: str) -> int:
    """Compare layers, write the result to layers.json, and print it.

    Returns:
        The exit code 0.
    """
    from featx.analysis.similarity import layer_similarity  # which imports torch

    store, asked = open_input(config), config.cka
    other = None if asked.other_store is None else FeatureStore(asked.other_store, verify="rows")
    disk = result_folder(store, config)
    with CountProgress("layers") as progress:
        progress.begin(len(matching_layers(store, config.layers)))
        found = layer_similarity(
            store,
            other,
            config.layers,
            num_rows=asked.rows,
            seed=config.seed,
            device=config.device,
            on_progress=progress.step,
            rsa_distance=asked.rsa_distance,
            measures=asked.chosen_measures,
        )
    summary = {
        "store": str(store.root),
        "other_store": None if other is None else str(other.root),
        "rows": found.num_rows,
        "rows_in_common": found.num_common,
        "seed": config.seed,
        "layers": list(found.layers),
        "others": list(found.others),
        "rsa_distance": found.rsa_distance if "rsa" in found.measures else None,
        **{name: _as_json(values) for name, values in found.measures.items()},
    }
    path = disk.root / "layers.json"
    disk.replace_unlocked(path, json.dumps(summary, indent=2).encode())
    whole = found.num_rows == found.num_common
    sampled = "all" if whole else f"chosen of {found.num_common}, seed {config.seed}"
    rows = [("rows", f"{found.num_rows}, {sampled}"), ("wrote", shown_path(path))]
    if other is not None:
        stores = (("down", shown_path(store.root)), ("across", shown_path(other.root)))
        rows = [*stores, *rows]
    print_summary(config, summary, "\n\n".join([*_tables(found), facts(rows)]))
    return 0


JOBS.register(
    Job(
        "cka",
        "Compare the layers of one or two stores by CKA, RSA, SVCCA or the Procrustes distance.",
        CkaConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device", "seed"),
        why="it reads an existing store; `layers` selects its layers",
    )
)


def _tables(found: LayerSimilarity) -> list[str]:
    """Format one table per measure."""
    shown = []
    for name, values in found.measures.items():
        cells = [
            (layer, *(f"{value:.3f}" for value in row))
            for layer, row in zip(found.layers, values.tolist(), strict=True)
        ]
        title = _TITLES[name]
        if name == "rsa":
            title += f", {found.rsa_distance} distance"
        named = table((title, *found.others), cells)
        if max(map(len, named.splitlines())) <= WIDTH:
            shown.append(named)
            continue
        numbers = [str(number) for number in range(1, len(found.others) + 1)]
        columns = [f"{number} {layer}" for number, layer in zip(numbers, found.others, strict=True)]
        numbered = table((title, *numbers), cells)
        shown.append("\n".join([numbered, "columns:", *columns]))
    return shown


def _as_json(values: npt.NDArray[np.float64]) -> list[list[float | None]]:
    """Convert a matrix to lists, with None for NaN, which JSON does not have."""
    return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]
