"""job=mislabelled: labelled rows whose label a probe finds improbable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress
from featx.config import Config
from featx.errors import counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import (
    NUM_SHOWN,
    chosen_layer,
    entries_table,
    open_input,
    result_folder,
    write_json,
    write_ranking,
)
from featx.store import FeatureStore

if TYPE_CHECKING:
    from featx.analysis.probe import JudgedLabels


def run(config: Config, config_yaml: str) -> int:
    """Judge all labels, write them to mislabelled.csv, and print the least credible ones."""
    from featx.analysis.probe import judge_labels  # which imports torch

    store, options = open_input(config.store_path()), config.probe
    layer, disk = chosen_layer(store, config), result_folder(store, config)
    with CountProgress("folds") as progress:
        folds = options.folds or 5
        progress.begin(folds)
        judged = judge_labels(
            store,
            layer,
            folds,
            label_column=options.label_column,
            seed=config.seed,
            device=config.device,
            on_progress=progress.step,
        )
    order = np.argsort(judged.confidences, kind="stable")
    table = write_ranking(disk, "mislabelled.csv", _described(store, judged, order))
    num_doubtful = int(judged.are_doubtful.sum())
    summary: dict[str, Any] = {
        "layer": layer,
        "label_column": options.label_column,
        "folds": judged.folds,
        "seed": config.seed,
        "rows": len(judged.rows),
        "accuracy": float((judged.predicted == judged.labels).mean()),
        "doubtful": num_doubtful,
        "least_credible": list(_described(store, judged, order[:NUM_SHOWN])),
        "notes": list(judged.notes),
        **table,
    }
    write_json(disk, "mislabelled.json", store, summary)
    rows = [
        ("layer", layer),
        ("probe", f"linear, {judged.folds} folds; {summary['accuracy']:.1%} of the labels agree"),
        ("rows", counted(len(judged.rows), "labelled row")),
        ("doubtful", f"{num_doubtful} (confident in another class)"),
        ("notes", "\n".join(judged.notes) or None),
        ("file", table["file"]),
    ]
    least_credible = entries_table(
        ("least credible label", "label", "p", "predicted", "p", "doubtful"),
        ("key", "label", "p_label", "predicted", "p_predicted", "doubtful"),
        summary["least_credible"],
        digits=4,
    )
    print_summary(config, summary, rows, least_credible)
    return 0


def _described(
    store: FeatureStore, judged: JudgedLabels, places: npt.NDArray[np.int64]
) -> Iterator[dict[str, object]]:
    confidences, predicted, doubtful = judged.confidences, judged.predicted, judged.are_doubtful
    for place in places.tolist():
        yield {
            "row": int(judged.rows[place]),
            "key": store.key_of(judged.rows[place]),
            "label": judged.classes[judged.labels[place]],
            "p_label": float(confidences[place]),
            "predicted": judged.classes[predicted[place]],
            "p_predicted": float(judged.p_predicted[place]),
            "doubtful": bool(doubtful[place]),
        }


JOBS.register(
    Job(
        "mislabelled",
        "Find rows of a labelled store whose label is improbable to a probe of the other rows.",
        run=run,
        input=Input.STORE,
        reads=(
            *("job.json", "out", "layers", "device", "seed"),
            *("probe.folds", "probe.label_column"),
        ),
    )
)
