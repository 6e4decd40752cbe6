"""job=neighbors: the nearest neighbours of one row, of a new image or of every row."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress, facts, log_message, table
from featx.config import Config, NeighborsConfig
from featx.errors import DataError
from featx.jobs.base import CUSTOM_CODE, JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import (
    chosen_layer,
    class_name,
    open_input,
    result_folder,
    write_csv,
)
from featx.store import FeatureStore

if TYPE_CHECKING:
    from featx.analysis.similarity import Neighbours, RowIndex

CSV_PAIRS = 1_000_000
"""Largest number of pairs that are also written to neighbors.csv."""


def run(config: Config, config_yaml: str) -> int:
    """Find neighbours, write those of every row to files, and print the result."""
    store, options = open_input(config), config.neighbors
    if options.image is not None:
        result = _neighbors_of_image(options.image, store, config)
    elif options.key is not None:
        result = _neighbors_of_row(options.key, store, config)
    else:
        result = _neighbors_of_all(store, config)
    print_summary(config, *result)
    return 0


def _neighbors_of_row(key: str, store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    """Find the neighbours of one row."""
    from featx.analysis.similarity import nearest_rows  # which imports torch

    layer, metric = chosen_layer(store, config), config.neighbors.metric
    neighbours = nearest_rows(store, layer, config.neighbors.k, metric, key, config.device)
    row = int(neighbours.rows[0])
    summary = {"key": key, "row": row, "class": class_name(store, row), "layer": layer}
    text = facts([("image", f"{key}  {class_name(store, row) or ''}"), ("layer", layer)])
    nearest, nearest_table = _describe_nearest(
        store, neighbours.neighbours[0], neighbours.scores[0], metric
    )
    return {**summary, "nearest": nearest}, f"{text}\n\n{nearest_table}"


def _neighbors_of_image(
    image: str, store: FeatureStore, config: Config
) -> tuple[dict[str, Any], str]:
    """Find the neighbours of an image file that is no row."""
    from featx.analysis import embed_images
    from featx.analysis.similarity import nearest_to  # both import torch

    layer, options = chosen_layer(store, config), config.neighbors
    embedding = embed_images(config, store, [image], [layer])
    if embedding.failures:
        raise DataError(f"{image}: {embedding.failures[0]}")
    rows, scores = nearest_to(
        store, layer, embedding[layer], options.k, options.metric, config.device
    )
    text = facts([("image", image), ("layer", layer)])
    nearest, nearest_table = _describe_nearest(store, rows[0], scores[0], options.metric)
    return {"image": image, "layer": layer, "nearest": nearest}, f"{text}\n\n{nearest_table}"


def _describe_nearest(
    store: FeatureStore,
    rows: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
    metric: str,
) -> tuple[list[dict[str, Any]], str]:
    """Describe the k nearest rows of one image, as JSON types and as a table."""
    nearest = [
        {
            "row": row,
            "key": str(store.keys[row]),
            "class": class_name(store, row),
            metric: float(score),
        }
        for row, score in zip(rows.tolist(), scores, strict=True)
    ]
    cells = [
        (one["key"], one["class"] or "-", str(one["row"]), f"{one[metric]:.4f}") for one in nearest
    ]
    return nearest, table(("nearest", "class", "row", metric), cells, left=2)


def _neighbors_of_all(store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    """Find the neighbours of every row and write them to files."""
    from featx.analysis.similarity import retrieval_metrics  # which imports torch

    layer, options = chosen_layer(store, config), config.neighbors
    index = None if options.recall is None else _index(options.recall, store, layer, config)
    neighbours = _search(store, layer, index, config)
    files = _write_files(store, layer, neighbours, 1.0 if index is None else index.recall, config)
    # An approximate search misses rows, so that its ranking is not that of the layer.
    retrieval = None
    if options.recall is None:
        retrieval = retrieval_metrics(store, layer, neighbours.metric, config.device)
    summary = {
        "layer": layer,
        "metric": neighbours.metric,
        "rows": len(neighbours.rows),
        "k": neighbours.neighbours.shape[1],
        "exact": options.recall in (None, 1),
        "index": None if index is None else index.as_dict(),
        "nearest_of_same_class": _same_class(store, neighbours),
        "retrieval": retrieval,
        "files": [str(path) for path in files],
    }
    return summary, _text_of_all(summary, None if index is None else _index_text(index))


def _search(store: FeatureStore, layer: str, index: RowIndex | None, config: Config) -> Neighbours:
    """Find the neighbours of every row, exactly or with an index, and show the progress."""
    from featx.analysis.similarity import nearest_rows  # which imports torch

    options = config.neighbors
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()))
        if index is not None:
            return index.nearest_rows(progress.step)
        return nearest_rows(
            store, layer, options.k, options.metric, None, config.device, progress.step
        )


def _write_files(
    store: FeatureStore, layer: str, neighbours: Neighbours, recall: float, config: Config
) -> list[Path]:
    """Write neighbors.npz, and neighbors.csv for up to CSV_PAIRS pairs."""
    disk = result_folder(store, config)
    table_file, csv_file = disk.root / "neighbors.npz", disk.root / "neighbors.csv"
    with disk.stream_file(table_file) as file:
        np.savez(
            file,
            row=neighbours.rows,
            neighbor=neighbours.neighbours,
            score=neighbours.scores,
            key=store.key_bytes[neighbours.rows],
            metric=np.array(neighbours.metric),
            layer=np.array(layer),
            fingerprint=np.array(str(store.attrs.get("fingerprint", ""))),
            recall=np.array(recall),
        )
    if neighbours.neighbours.size > CSV_PAIRS:
        disk.remove(csv_file)
        return [table_file]
    header = ("row", "key", "rank", "neighbor", "neighbor_key", neighbours.metric)
    with disk.stream_file(csv_file) as file:
        write_csv(file, header, _pairs(store, neighbours))
    return [table_file, csv_file]


def _text_of_all(summary: dict[str, Any], index: str | None) -> str:
    """Format the result for every row."""
    same, retrieval = summary["nearest_of_same_class"], summary["retrieval"]
    rows = [
        ("layer", summary["layer"]),
        ("rows", f"{summary['rows']}, {summary['k']} nearest of each"),
        ("metric", summary["metric"]),
    ]
    if index is not None:
        rows.append(("found", index))
    if same is not None and retrieval is None:  # recall@1 says the same
        rows.append(("same class", f"{same:.1%} of the nearest ones"))
    if retrieval is not None:
        rows.append(("retrieval", _retrieval_text(retrieval)))
    return facts([*rows, ("files", "\n".join(summary["files"]))])


def _index(recall: float, store: FeatureStore, layer: str, config: Config) -> RowIndex:
    """Build an index with the given recall, and log a message if it saves no time."""
    from featx.analysis.similarity import RowIndex  # which imports torch

    k, metric = config.neighbors.k, config.neighbors.metric
    index = RowIndex(store, layer, recall, k, metric, config.seed, config.device)
    if recall < 1 and 4 * index.num_probed_lists > index.num_lists:
        log_message(
            f"the index searches {index.num_probed_lists} of its {index.num_lists} lists (nprobe) "
            f"to find {recall:g} of the nearest rows: without neighbors.recall the search would be "
            "exact and hardly slower"
        )
    return index


def _index_text(index: RowIndex) -> str:
    """Describe how the index found the rows, and its recall."""
    if not index.num_measured_rows:
        return "all of the nearest rows, by faiss's exact search"
    return (
        f"{index.recall:.2%} of the nearest rows, measured on {index.num_measured_rows} rows by "
        f"exact\nsearch; {index.num_probed_lists} of {index.num_lists} lists (nprobe) were "
        "searched for each row"
    )


def _retrieval_text(retrieval: dict[str, Any]) -> str:
    """Describe recall@k and mAP, and which rows they are about."""
    texts = [f"recall@{k} {share:.1%}" for k, share in retrieval["recall"].items()]
    mean = retrieval["map"]
    texts.append(
        f"mAP not available: {retrieval['not_available']}" if mean is None else f"mAP {mean:.3f}"
    )
    text = f"{', '.join(texts)}\nof {retrieval['queries']} labelled rows among all labelled ones"
    if left_out := retrieval["queries_left_out"]:
        text += f"; {left_out} left out as the only ones of their class"
    return text


def _same_class(store: FeatureStore, neighbours: Neighbours) -> float | None:
    """Return the share of labelled rows whose nearest row has the same class, or None."""
    labels = store.labels[neighbours.rows]
    is_labelled = labels >= 0
    if not is_labelled.any():
        return None
    return float(
        (store.labels[neighbours.neighbours[is_labelled, 0]] == labels[is_labelled]).mean()
    )


def _pairs(store: FeatureStore, found: Neighbours) -> Iterable[tuple[Any, ...]]:
    """Yield the lines of neighbors.csv, one per row and neighbour."""
    for row, neighbours, scores in zip(found.rows, found.neighbours, found.scores, strict=True):
        for rank, (other, score) in enumerate(zip(neighbours, scores, strict=True), 1):
            yield row, store.keys[row], rank, other, store.keys[other], f"{score:.6g}"


def _reads_with(config: Config) -> Collection[str]:
    """Return `seed` if an index samples rows, and the code of the model if an image is computed."""
    index = () if config.neighbors.recall is None else ("seed",)
    if config.neighbors.image is None:
        return index
    code = () if config.model.code is None else CUSTOM_CODE
    return (*index, *code, "reduce.name", "reduce.stats")


JOBS.register(
    Job(
        "neighbors",
        "Find the nearest neighbours of a row of a store, of a new image, or of every row.",
        NeighborsConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device"),
        why="it reads an existing store; `layers` selects its layers",
        reads_with=_reads_with,
    )
)
