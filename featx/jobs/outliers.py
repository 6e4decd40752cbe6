"""job=outliers: rows that are far from all others, or from the others of their class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress, Table
from featx.config import Config, OutliersConfig
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import (
    chosen_layer,
    class_name,
    open_input,
    result_folder,
    write_csv,
    write_json,
)
from featx.store import FeatureStore

if TYPE_CHECKING:
    from featx.analysis.similarity import Outliers

_HEADER = ("rank", "row", "key", "class", "distance", "class_distance", "nearest_key")


def run(config: Config, config_yaml: str) -> int:
    """Find outliers, write all rows to outliers.csv, and print the first ones."""
    from featx.analysis.similarity import find_outliers  # which imports torch

    store, options = open_input(config), config.outliers
    layer, disk = chosen_layer(store, config), result_folder(store, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()) + int((store.ok & (store.labels >= 0)).sum()))
        found = find_outliers(store, layer, options.k, options.metric, config.device, progress.step)
    order = np.argsort(-found.distances, kind="stable")
    path = disk.root / "outliers.csv"
    with disk.stream_file(path) as file:
        write_csv(file, _HEADER, (_line(store, found, *pair) for pair in enumerate(order, 1)))
    of_class = np.flatnonzero(~np.isnan(found.class_distances))
    of_class = of_class[np.argsort(-found.class_distances[of_class], kind="stable")]
    summary: dict[str, Any] = {
        "layer": layer,
        "metric": found.metric,
        "k": found.k,
        "rows": len(found.rows),
        "farthest": _described(store, found, order[: options.show]),
        "farthest_in_class": _described(store, found, of_class[: options.show]),
        "file": str(path),
    }
    write_json(disk, "outliers.json", store, summary)
    rows = [
        ("layer", layer),
        ("distance", f"{found.metric}, mean of the {found.k} nearest rows, standardised values"),
        ("rows", f"{len(found.rows)}"),
        ("file", str(path)),
    ]
    tables = [_table("far from all rows", "distance", summary["farthest"])]
    if len(set(store.labels[found.rows].tolist())) > 1:
        title = "far from their class"
        tables.append(_table(title, "class_distance", summary["farthest_in_class"]))
    print_summary(config, summary, rows, *tables)
    return 0


def _line(store: FeatureStore, found: Outliers, rank: int, place: int) -> tuple[Any, ...]:
    """Return a line of outliers.csv."""
    one = _described(store, found, np.array([place]))[0]
    distances = one["distance"], one["class_distance"]
    return (
        *(rank, one["row"], one["key"], one["class"] or ""),
        *("" if distance is None else f"{distance:.6g}" for distance in distances),
        one["nearest_key"],
    )


def _described(
    store: FeatureStore, found: Outliers, places: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Describe rows as JSON types."""
    described = []
    for place in places.tolist():
        row, class_distance = int(found.rows[place]), float(found.class_distances[place])
        described.append(
            {
                "row": row,
                "key": str(store.keys[row]),
                "class": class_name(store, row),
                "distance": float(found.distances[place]),
                "class_distance": None if np.isnan(class_distance) else class_distance,
                "nearest_key": str(store.keys[int(found.nearest[place])]),
            }
        )
    return described


def _table(title: str, distance: str, described: list[dict[str, Any]]) -> Table:
    """Return the first rows of a ranking."""
    cells = [
        (one["key"], one["class"] or "-", f"{one[distance]:.4f}", one["nearest_key"])
        for one in described
    ]
    return Table((title, "class", "distance", "nearest row"), cells, left=2)


JOBS.register(
    Job(
        "outliers",
        "Find rows of a store that are far from all others, or from their class.",
        OutliersConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device"),
        why="it reads an existing store; `layers` selects its layers",
    )
)
