"""job=neighbors: the nearest neighbours of a row, a new image, texts, or every row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress, Table, log_message, write_csv
from featx.config import Config, NeighborsConfig
from featx.errors import ConfigError, DataError
from featx.jobs.base import JOBS, Input, Job, code_options, print_summary
from featx.jobs.similarity_files import (
    chosen_layer,
    class_name,
    entries_table,
    open_input,
    result_folder,
)
from featx.sources import origins_of
from featx.storage import AtomicFolder
from featx.store import FeatureStore
from featx.types import Json

if TYPE_CHECKING:
    from featx.analysis.similarity import Neighbours, RowIndex

CSV_PAIRS = 1_000_000
"""Largest number of pairs that are also written to neighbors.csv."""


def run(config: Config, config_yaml: str) -> int:
    """Find neighbours, write those of every row to files, and print the result."""
    store, options = open_input(config.store_path()), config.neighbors
    if options.text is not None:
        return _print_nearest_to_texts(options.text, store, config)
    layer = chosen_layer(store, config)
    if options.key is None and options.image is None:
        found_of_all, index = _neighbors_of_all(store, layer, config)
        print_summary(config, found_of_all, _facts_of_all(found_of_all, index, config))
        return 0
    if options.image is not None:
        rows, scores = _nearest_to_image(options.image, store, layer, config)
        summary: dict[str, Any] = {"image": options.image, "layer": layer}
        image = options.image
    else:
        from featx.analysis.similarity import nearest_rows  # which imports torch

        key = str(options.key)
        found = nearest_rows(
            store,
            layer,
            options.k,
            options.metric,
            key=key,
            device=config.device,
            standardise=options.standardise,
        )
        rows, scores = found.neighbours[0], found.scores[0]
        row = int(found.rows[0])
        name = class_name(store, row)
        summary = {"key": key, "row": row, "class": name, "layer": layer}
        image = f"{key}  {name or ''}"
    summary["nearest"] = _described(store, rows, scores, options.metric)
    summary["standardised"] = options.standardise
    nearest = _table("nearest", summary["nearest"], options.metric)
    facts = [("image", image), ("layer", layer), ("metric", _metric_text(config))]
    print_summary(config, summary, facts, nearest)
    return 0


def _print_nearest_to_texts(given: str | Sequence[str], store: FeatureStore, config: Config) -> int:
    """Print the rows nearest to each text."""
    from featx.analysis import read_texts, search  # both import torch

    options = config.neighbors
    if config.layers not in (None, "embedding", ["embedding"], ("embedding",)):
        raise ConfigError("neighbors.text is compared with layers=embedding; leave layers out.")
    texts = read_texts("neighbors.text", given)
    found = search(store, texts, options.k, config.device)
    results: list[Json] = [
        {"text": text, "nearest": _described(store, rows, scores, options.metric)}
        for text, rows, scores in zip(texts, *found, strict=True)
    ]
    tables = [_table(each["text"], each["nearest"], options.metric) for each in results]
    print_summary(config, {"layer": "embedding", "texts": results}, *tables)
    return 0


def _described(
    store: FeatureStore,
    rows: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
    metric: str,
) -> list[dict[str, object]]:
    return [
        {
            "row": row,
            "key": store.key_of(row),
            "class": class_name(store, row),
            metric: float(score),
        }
        for row, score in zip(rows.tolist(), scores, strict=True)
    ]


def _table(title: str, nearest: Sequence[Mapping[str, object]], metric: str) -> Table:
    header = (title, "class", "row", metric)
    return entries_table(header, ("key", "class", "row", metric), nearest, digits=3)


def _nearest_to_image(
    image: str, store: FeatureStore, layer: str, config: Config
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Find the rows nearest to an image file that is no row, and their scores."""
    from featx.analysis import Embedder
    from featx.analysis.similarity import nearest_to  # both import torch

    with Embedder(config, store, [layer], pads=True) as embed:
        embedding = embed([image])
    if embedding.failures:
        failure = embedding.failures[0]
        raise DataError(f"{image}: {failure['status']}: {failure['message']}")
    options, vectors = config.neighbors, embedding[layer]
    rows, scores = nearest_to(
        store,
        layer,
        vectors,
        options.k,
        options.metric,
        device=config.device,
        standardise=options.standardise,
    )
    return rows[0], scores[0]


def _neighbors_of_all(
    store: FeatureStore, layer: str, config: Config
) -> tuple[dict[str, object], RowIndex | None]:
    """Find the neighbours of every row, exactly or with an index, and write them to files."""
    from featx.analysis.similarity import nearest_rows, retrieval_metrics  # both import torch

    options, disk = config.neighbors, result_folder(store, config)
    index = None if options.recall is None else _index(options.recall, store, layer, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()))
        if index is not None:
            found = index.nearest_rows(progress.step)
        else:
            found = nearest_rows(
                store,
                layer,
                options.k,
                options.metric,
                device=config.device,
                standardise=options.standardise,
                on_progress=progress.step,
            )
    files = _write_files(disk, store, layer, found, index, options.standardise)
    # An approximate search misses rows, so that its ranking is not that of the layer.
    retrieval = None
    if index is None:
        retrieval = retrieval_metrics(
            store, layer, found.metric, config.device, options.standardise
        )
    summary = {
        "layer": layer,
        "metric": found.metric,
        "standardised": options.standardise,
        "rows": len(found.rows),
        "k": found.neighbours.shape[1],
        "exact": index is None,
        "index": None if index is None else index.as_dict(),
        "nearest_of_same_class": _same_class_share(store, found),
        "retrieval": retrieval,
        "files": [str(path) for path in files],
    }
    return summary, index


def _same_class_share(store: FeatureStore, found: Neighbours) -> float | None:
    """Return the share of labelled rows whose nearest row of another image has their class."""
    origins = np.unique(origins_of(store.key_bytes)[0], return_inverse=True)[1]
    is_other = origins[found.neighbours] != origins[found.rows][:, None]
    nearest = found.neighbours[np.arange(len(found.rows)), is_other.argmax(1)]
    labels = store.labels[found.rows]
    same_class = (store.labels[nearest] == labels)[(labels >= 0) & is_other.any(1)]
    return float(same_class.mean()) if len(same_class) else None


def _write_files(
    disk: AtomicFolder,
    store: FeatureStore,
    layer: str,
    found: Neighbours,
    index: RowIndex | None,
    standardised: bool,
) -> list[Path]:
    """Write neighbors.npz, and neighbors.csv for up to CSV_PAIRS pairs."""
    table_file, csv_file = disk.root / "neighbors.npz", disk.root / "neighbors.csv"
    with disk.stream_file(table_file) as file:
        np.savez(
            file,
            row=found.rows,
            neighbor=found.neighbours,
            score=found.scores,
            key=store.key_bytes[found.rows],
            metric=np.array(found.metric),
            standardised=np.array(standardised),
            layer=np.array(layer),
            fingerprint=np.array(str(store.attrs.get("fingerprint", ""))),
            recall=np.array(1.0 if index is None else index.recall),
        )
        file.flush()
        disk.remove(csv_file)  # of an earlier search: this process may end here
    if found.neighbours.size > CSV_PAIRS:
        return [table_file]
    header = ("row", "key", "rank", "neighbor", "neighbor_key", found.metric)
    pairs = (
        (row, store.key_of(row), rank, other, store.key_of(other), f"{score:.6g}")
        for row, nearest, scores in zip(found.rows, found.neighbours, found.scores, strict=True)
        for rank, (other, score) in enumerate(zip(nearest, scores, strict=True), 1)
    )
    with disk.stream_file(csv_file) as file:
        write_csv(file, chain([header], pairs))
    return [table_file, csv_file]


def _metric_text(config: Config) -> str:
    of_values = " of standardised values" if config.neighbors.standardise else ""
    return f"{config.neighbors.metric}{of_values}"


def _facts_of_all(
    summary: Json, index: RowIndex | None, config: Config
) -> list[tuple[str, str | None]]:
    same, retrieval = summary["nearest_of_same_class"], summary["retrieval"]
    same_text = None
    if same is not None and retrieval is None:  # recall@1 says the same
        same_text = f"{same:.1%} of the nearest ones"
    found = None
    if index is not None:
        found = (
            f"{index.recall:.2%} of the nearest rows, measured on {index.num_measured_rows} rows "
            f"by exact\nsearch; {index.num_probed_lists} of {index.num_lists} lists (nprobe) were "
            "searched for each row"
        )
    return [
        ("layer", summary["layer"]),
        ("rows", f"{summary['rows']}, {summary['k']} nearest of each"),
        ("metric", _metric_text(config)),
        ("found", found),
        ("same class", same_text),
        ("retrieval", None if retrieval is None else _retrieval_text(retrieval)),
        ("files", "\n".join(summary["files"])),
    ]


def _index(recall: float, store: FeatureStore, layer: str, config: Config) -> RowIndex:
    """Build an index with the given recall, and log a message if it saves no time."""
    from featx.analysis.similarity import RowIndex  # which imports torch

    options = config.neighbors
    index = RowIndex(
        store,
        layer,
        recall,
        options.k,
        options.metric,
        seed=config.seed,
        device=config.device,
        standardise=options.standardise,
    )
    if 4 * index.num_probed_lists > index.num_lists:
        log_message(
            f"the index searches {index.num_probed_lists} of its {index.num_lists} lists (nprobe) "
            f"to find {recall:g} of the nearest rows: without neighbors.recall the search would be "
            "exact and hardly slower"
        )
    return index


def _retrieval_text(retrieval: Json) -> str:
    """Describe recall@k and mAP, and which rows they are about."""
    texts = [f"recall@{k} {share:.1%}" for k, share in retrieval["recall"].items()]
    mean = retrieval["map"]
    texts.append(
        f"mAP not available: {retrieval['not_available']}" if mean is None else f"mAP {mean:.3f}"
    )
    text = f"{', '.join(texts)}\nof {retrieval['queries']} labelled rows among all labelled ones"
    kind = retrieval["left_out"]
    if left_out := retrieval["queries_left_out"]:
        text += f"; {left_out} left out as the only ones of their class"
    if kind is not None:
        text += f"\nrows of the same {kind} are left out of a ranking"
    return text


def _reads_with(config: Config) -> Collection[str]:
    """`seed` if an index samples rows, and the code of the model if an image is computed."""
    index = () if config.neighbors.recall is None else ("seed",)
    if config.neighbors.image is None:
        return index
    return (*index, *code_options(config), "reduce.name", "reduce.stats")


JOBS.register(
    Job(
        "neighbors",
        "Find the nearest neighbours of a row of a store, a new image, texts, or every row.",
        NeighborsConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device"),
        reads_with=_reads_with,
    )
)
