"""job=cka: layer similarity by CKA, RSA, SVCCA and the Procrustes distance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import WIDTH, CountProgress, shown_path, table
from featx.config import CkaConfig, Config, listed_stores
from featx.errors import ConfigError
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import open_input, result_folder
from featx.store import FeatureStore, matching_layers

if TYPE_CHECKING:
    from featx.analysis.similarity import LayerSimilarity

_WIDE_IS_SIMILAR = ("cka", "svcca")
"""Measures that are near 1 for layers with more numbers than there are images."""

_NAN_IF_CONSTANT = ("cka", "svcca", "procrustes")
"""Measures that are NaN only for layers that are equal for all images."""

_NAN_REASONS = {
    "cka_debiased": "no two images have more in common than others",
    "rsa": "all pairs of images have the same distance",
    "rsa_cosine": "all pairs of images have the same distance",
}
"""Measure -> why it can be NaN for a layer that is not equal for all images."""

_ALL_OF_ONE_STORE = "all layers of one of the stores"

_TITLES = {
    "cka": "linear CKA",
    "cka_debiased": "linear CKA, debiased",
    "rsa": "RSA, correlation distance",
    "rsa_cosine": "RSA, cosine distance",
    "svcca": "SVCCA, 99% of the variance",
    "procrustes": "Procrustes distance, squared",
}


def run(config: Config, config_yaml: str) -> int:
    """Compare layers, write the result to layers.json, and print it."""
    from featx.analysis.similarity import layer_similarity  # which imports torch

    store, *others = map(open_input, listed_stores(str(config.store)))
    other, options = others[0] if others else None, config.cka
    disk = result_folder(store, config)
    with CountProgress("layers") as progress:
        layers: Any = config.layers  # a mapping is refused by the next line
        progress.begin(len(matching_layers(store, layers)))
        similarity = layer_similarity(
            store,
            other,
            layers,
            num_rows=options.rows,
            seed=config.seed,
            device=config.device,
            on_progress=progress.step,
            measures=options.chosen_measures,
        )
    notes = _notes(similarity, store, other)
    summary = {
        "store": str(store.root),
        "other_store": None if other is None else str(other.root),
        "rows": similarity.num_rows,
        "rows_in_common": similarity.num_common,
        "seed": config.seed,
        "layers": list(similarity.layers),
        "others": list(similarity.others),
        **{name: _as_json(values) for name, values in similarity.measures.items()},
        "notes": notes,
    }
    path = disk.root / "layers.json"
    disk.replace_unlocked(path, json.dumps(summary, indent=2).encode())
    is_complete = similarity.num_rows == similarity.num_common
    rows_text = "all" if is_complete else f"chosen of {similarity.num_common}, seed {config.seed}"
    rows = [
        ("down", None if other is None else shown_path(store.root)),
        ("across", None if other is None else shown_path(other.root)),
        ("rows", f"{similarity.num_rows}, {rows_text}"),
        ("wrote", shown_path(path)),
        ("notes", "\n".join(notes) if notes else None),
    ]
    print_summary(config, summary, *_tables(similarity), rows)
    return 0


def _notes(
    similarity: LayerSimilarity, store: FeatureStore, other: FeatureStore | None
) -> list[str]:
    """Return what the scores cannot show: layers that are too wide, or without a score."""
    notes = []
    stores = [(store, similarity.layers)]
    if other is not None:
        stores.append((other, similarity.others))
    layers = [(each, name) for each, names in stores for name in names]
    names = [
        name if other is None else f"{name} of {shown_path(each.root)}" for each, name in layers
    ]
    widths = [int(np.prod(each[name].shape[1:])) for each, name in layers]
    if similarity.num_different:
        notes.append(
            f"{similarity.num_different} of the {similarity.num_rows} images have other bytes in "
            "the other store: if their keys are those of other images, the scores say nothing."
        )
    wide = [name for name, width in zip(names, widths, strict=True) if width > similarity.num_rows]
    affected = [_TITLES[name] for name in _WIDE_IS_SIMILAR if name in similarity.measures]
    if wide and affected:
        notes.append(
            f"{' and '.join(affected)}: near 1 for any two layers, even noise, where one has more "
            f"numbers than the {similarity.num_rows} images: {', '.join(wide)}. Use cka_debiased."
        )
    without_score = {
        measure: _without_score(matrix, names) for measure, matrix in similarity.measures.items()
    }
    constant = {name for measure in _NAN_IF_CONSTANT for name in without_score.get(measure, ())}
    for measure, reason in _NAN_REASONS.items():
        listed = [name for name in without_score.get(measure, ()) if name not in constant]
        if listed:
            notes.append(f"{_TITLES[measure]}: nan where {reason}: {', '.join(listed)}.")
    if constant:
        listed = [name for name in (*names, _ALL_OF_ONE_STORE) if name in constant]
        notes.append(f"nan, because all images have the same features: {', '.join(listed)}.")
    return notes


def _without_score(matrix: npt.NDArray[np.float64], names: Sequence[str]) -> list[str]:
    """Return the layers that have no score with any other layer."""
    has_none = [bool(np.isnan(row).all()) for row in matrix]
    if len(names) > len(has_none):
        if all(has_none):  # whether by the rows or by the columns does not follow from the scores
            return [_ALL_OF_ONE_STORE]
        has_none += [bool(np.isnan(column).all()) for column in matrix.T]
    return [name for name, value in zip(names, has_none, strict=True) if value]


def _tables(similarity: LayerSimilarity) -> list[str]:
    tables = []
    for name, values in similarity.measures.items():
        cells = [
            (layer, *(f"{value:.3f}" for value in row))
            for layer, row in zip(similarity.layers, values.tolist(), strict=True)
        ]
        title = _TITLES[name]
        table_of_names = table((title, *similarity.others), cells)
        if max(map(len, table_of_names.splitlines())) <= WIDTH:
            tables.append(table_of_names)
            continue
        numbers = [str(number) for number in range(1, len(similarity.others) + 1)]
        columns = [
            f"{number} {layer}" for number, layer in zip(numbers, similarity.others, strict=True)
        ]
        table_of_numbers = table((title, *numbers), cells)
        tables.append("\n".join([table_of_numbers, "columns:", *columns]))
    return tables


def _as_json(values: npt.NDArray[np.float64]) -> list[list[float | None]]:
    """Convert a matrix to lists, with None for NaN, which JSON does not have."""
    return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]


def _check(config: Config) -> None:
    if len(listed_stores(str(config.store))) > 2:
        raise ConfigError(f"store={config.store}: job=cka compares the layers of two stores.")


JOBS.register(
    Job(
        "cka",
        "Compare the layers of one or two stores by CKA, RSA, SVCCA or the Procrustes distance.",
        CkaConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device", "seed"),
        check=_check,
        takes_several_stores=True,
    )
)
