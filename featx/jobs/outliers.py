"""job=outliers: rows that are far from all others, or from the others of their class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress
from featx.config import Config
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import (
    NUM_SHOWN,
    chosen_layer,
    class_name,
    entries_table,
    open_input,
    result_folder,
    write_json,
    write_ranking,
)
from featx.store import FeatureStore

if TYPE_CHECKING:
    from featx.analysis.similarity import Outliers


def run(config: Config, config_yaml: str) -> int:
    """Find outliers, write all rows to outliers.csv, and print the first ones."""
    from featx.analysis.similarity import find_outliers  # which imports torch

    store, options = open_input(config.store_path()), config.neighbors
    layer, disk = chosen_layer(store, config), result_folder(store, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()) + int((store.ok & (store.labels >= 0)).sum()))
        found = find_outliers(
            store, layer, options.k, options.metric, config.device, on_progress=progress.step
        )
    order = np.argsort(-found.distances, kind="stable")
    table = write_ranking(disk, "outliers.csv", _described(store, found, order))
    of_class = np.flatnonzero(~np.isnan(found.class_distances))
    of_class = of_class[np.argsort(-found.class_distances[of_class], kind="stable")]
    summary: dict[str, Any] = {
        "layer": layer,
        "metric": found.metric,
        "k": found.k,
        "left_out": found.left_out,
        "rows": len(found.rows),
        "farthest": list(_described(store, found, order[:NUM_SHOWN])),
        "farthest_in_class": list(_described(store, found, of_class[:NUM_SHOWN])),
        **table,
    }
    write_json(disk, "outliers.json", store, summary)
    others = "" if found.left_out is None else f" of another {found.left_out}"
    rows = [
        ("layer", layer),
        (
            "distance",
            f"{found.metric}, mean of the {found.k} nearest rows{others}, standardised values",
        ),
        ("rows", f"{len(found.rows)}"),
        ("file", table["file"]),
    ]
    rankings = [("far from all rows", "distance", summary["farthest"])]
    if len(set(store.labels[found.rows].tolist())) > 1:
        rankings.append(("far from their class", "class_distance", summary["farthest_in_class"]))
    tables = [
        entries_table(
            (title, "class", "distance", "nearest row"),
            ("key", "class", distance, "nearest_key"),
            entries,
            digits=4,
        )
        for title, distance, entries in rankings
    ]
    print_summary(config, summary, rows, *tables)
    return 0


def _described(
    store: FeatureStore, found: Outliers, places: npt.NDArray[np.int64]
) -> Iterator[dict[str, object]]:
    for place in places.tolist():
        row, class_distance = int(found.rows[place]), float(found.class_distances[place])
        yield {
            "row": row,
            "key": store.key_of(row),
            "class": class_name(store, row),
            "distance": float(found.distances[place]),
            "class_distance": None if np.isnan(class_distance) else class_distance,
            "nearest_key": store.key_of(int(found.nearest[place])),
        }


JOBS.register(
    Job(
        "outliers",
        "Find rows of a store that are far from all others, or from their class.",
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device", "neighbors.k", "neighbors.metric"),
    )
)
