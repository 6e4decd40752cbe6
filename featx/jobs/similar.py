"""job=similar: nearest rows, near-duplicates, and the likeness of layers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from featx.analysis.similarity.duplicates import cosines_to_first, duplicate_groups
from featx.analysis.similarity.faiss_index import RowIndex
from featx.analysis.similarity.nearest_neighbours import Neighbours, nearest_rows
from featx.analysis.similarity.representation_similarity import (
    ROWS,
    LayerSimilarity,
    layer_similarity,
)
from featx.base.console import log_message, print_result
from featx.base.progress import CountProgress
from featx.base.text import facts, table
from featx.config.run_config import Config
from featx.errors import ConfigError, counted
from featx.storage.local_folder import AtomicFolder
from featx.store.layer_selection import matching_layers
from featx.store.reader import FeatureStore

CSV_PAIRS = 1_000_000
"""More pairs than this are in neighbours.npz only."""

_K = 10
_TITLES = {"cka": "linear CKA", "cka_debiased": "linear CKA, debiased", "rsa": "RSA"}


def run(config: Config, config_yaml: str) -> int:
    """Look for what is asked, write it down, and say it; returns the exit code."""
    assert config.store is not None, "the config was checked"
    store = FeatureStore(config.store, verify="rows")
    if not store.complete:
        log_message(f"{store.root} is not complete; {int(store.ok.sum())} rows are there and ok")
    asked = config.similar
    if asked.key is not None:
        summary, text = _of_one(store, config)
    elif asked.duplicates is not None:
        summary, text = _duplicates(store, config)
    elif asked.cka:
        summary, text = _likeness(store, config)
    else:
        summary, text = _of_all(store, config)
    print_result(json.dumps(summary, indent=2) if config.job.json else text)
    return 0


def _of_one(store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    layer, asked = _one_layer(store, config), config.similar
    metric = asked.metric or "cosine"
    found = nearest_rows(store, layer, asked.k or _K, metric, asked.key, config.device)
    rows = found.neighbours[0].tolist()
    nearest = [
        {"row": row, "key": str(store.keys[row]), "class": _class(store, row), metric: float(score)}
        for row, score in zip(rows, found.scores[0], strict=True)
    ]
    row = int(found.rows[0])
    summary = {"key": asked.key, "row": row, "class": _class(store, row), "layer": layer}
    cells = [
        (one["key"], one["class"] or "-", str(one["row"]), f"{one[metric]:.4f}") for one in nearest
    ]
    text = facts([("picture", f"{asked.key}  {_class(store, row) or ''}"), ("layer", layer)])
    shown = table(("nearest", "class", "row", metric), cells, left=2)
    return {**summary, "nearest": nearest}, f"{text}\n\n{shown}"


def _of_all(store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    layer, asked = _one_layer(store, config), config.similar
    disk = _disk(store, config)
    index = None if asked.recall is None else _index(store, layer, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()))
        if index is None:
            k, metric = asked.k or _K, asked.metric or "cosine"
            found = nearest_rows(store, layer, k, metric, None, config.device, progress.step)
        else:
            found = index.nearest_rows(progress.step)
    files = [disk.root / "neighbours.npz"]
    with disk.streamed(files[0]) as file:
        np.savez(
            file,
            row=found.rows,
            neighbour=found.neighbours,
            score=found.scores,
            key=store.key_bytes[found.rows],
            metric=np.array(found.metric),
            layer=np.array(layer),
            fingerprint=np.array(str(store.attrs.get("fingerprint", ""))),
            recall=np.array(1.0 if index is None else index.recall),
        )
    if found.neighbours.size <= CSV_PAIRS:
        files.append(disk.root / "neighbours.csv")
        header = ("row", "key", "rank", "neighbour", "neighbour_key", found.metric)
        with disk.streamed(files[1]) as file:
            _write_csv(file, header, _pairs(store, found))
    else:
        disk.remove(disk.root / "neighbours.csv")
    same = _same_class(store, found)
    summary = {
        "layer": layer,
        "metric": found.metric,
        "rows": len(found.rows),
        "k": found.neighbours.shape[1],
        "exact": asked.recall in (None, 1),
        "index": None if index is None else index.about,
        "nearest_of_same_class": same,
        "files": [str(path) for path in files],
    }
    rows = [
        ("layer", layer),
        ("rows", f"{len(found.rows)}, {found.neighbours.shape[1]} nearest of each"),
        ("metric", found.metric),
    ]
    if index is not None:
        rows.append(("found", _index_text(index)))
    if same is not None:
        rows.append(("same class", f"{same:.1%} of the nearest ones"))
    return summary, facts([*rows, ("files", "\n".join(map(str, files)))])


def _index(store: FeatureStore, layer: str, config: Config) -> RowIndex:
    """An index, and a word where it does not pay."""
    asked = config.similar
    assert asked.recall is not None, "it was asked for"
    k, metric = asked.k or _K, asked.metric or "cosine"
    index = RowIndex(store, layer, asked.recall, k, metric, config.seed, config.device)
    if asked.recall < 1 and 4 * index.looked_at > index.lists:
        log_message(
            f"the index looks at {index.looked_at} of its {index.lists} lists to find "
            f"{asked.recall:g} of the nearest rows: without similar.recall the search would be "
            "exact and hardly slower"
        )
    return index


def _index_text(index: RowIndex) -> str:
    if not index.measured_on:
        return "all of the nearest rows, by faiss's exact search"
    return (
        f"{index.recall:.2%} of the nearest rows, measured on {index.measured_on} rows by exact\n"
        f"search; {index.looked_at} of {index.lists} lists were looked at for each row"
    )


def _duplicates(store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    layer, threshold = _one_layer(store, config), config.similar.duplicates
    assert threshold is not None, "it was asked for"
    disk = _disk(store, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()))
        groups = duplicate_groups(store, layer, threshold, config.device, progress.step)
    path = disk.root / "duplicates.csv"
    header = ("group", "size", "row", "key", "class", "cosine_to_first")
    with disk.streamed(path) as file:
        _write_csv(file, header, _members(store, layer, groups))
    mixed = [group for group in groups if len(set(store.labels[group].tolist())) > 1]
    summary = {
        "layer": layer,
        "threshold": threshold,
        "rows": int(store.ok.sum()),
        "groups": len(groups),
        "rows_in_groups": sum(map(len, groups)),
        "groups_of_several_classes": len(mixed),
        "file": str(path),
    }
    rows = [
        ("layer", layer),
        ("threshold", f"a cosine of {threshold:g}"),
        (
            "rows",
            f"{summary['rows_in_groups']} of {summary['rows']} in {counted(len(groups), 'group')}",
        ),
        (
            "classes",
            f"{counted(len(mixed), 'group has', 'groups have')} pictures of several classes",
        ),
        ("file", str(path)),
    ]
    largest = sorted(groups, key=len, reverse=True)[:5]
    lines = [
        f"{len(group)} rows: {', '.join(store.keys[group[:3]])}{', ...' if len(group) > 3 else ''}"
        for group in largest
    ]
    return summary, "\n".join([facts(rows), *([""] if lines else []), *lines])


def _likeness(store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    asked = config.similar
    other = None if asked.other is None else FeatureStore(asked.other, verify="rows")
    disk = _disk(store, config)
    with CountProgress("layers") as progress:
        count = len(matching_layers(store, config.layer))
        if other is not None:
            count += len(matching_layers(other, config.layer))
        progress.begin(count)
        n, seed, tell = asked.rows or ROWS, config.seed, progress.step
        found = layer_similarity(store, other, config.layer, n, seed, config.device, tell)
    summary = {
        "store": str(store.root),
        "other": None if other is None else str(other.root),
        "rows": found.num_rows,
        "rows_in_common": found.num_common,
        "seed": config.seed,
        "layers": list(found.layers),
        "others": list(found.others),
        **{name: _as_json(values) for name, values in found.measures.items()},
    }
    path = disk.root / "layers.json"
    disk.replace_unlocked(path, json.dumps(summary, indent=2).encode())
    whole = found.num_rows == found.num_common
    sampled = "all" if whole else f"chosen of {found.num_common}, seed {config.seed}"
    rows = [("pictures", f"{found.num_rows}, {sampled}"), ("file", str(path))]
    if other is not None:
        rows = [("down", str(store.root)), ("across", str(other.root)), *rows]
    return summary, "\n\n".join([facts(rows), *_tables(found)])


def _tables(found: LayerSimilarity) -> list[str]:
    """A table a measure."""
    shown = []
    for name, values in found.measures.items():
        cells = [
            (layer, *(f"{value:.3f}" for value in row))
            for layer, row in zip(found.layers, values.tolist(), strict=True)
        ]
        shown.append(table((_TITLES[name], *found.others), cells))
    return shown


def _one_layer(store: FeatureStore, config: Config) -> str:
    names = matching_layers(store, config.layer)
    if len(names) > 1:
        raise ConfigError(f"name one layer with layer=: {store.root} has {', '.join(names)}.")
    return names[0]


def _disk(store: FeatureStore, config: Config) -> AtomicFolder:
    """Where the results go, made if it is not there."""
    disk = AtomicFolder(config.out_beside(store.root, "similar"))
    disk.make_folder(disk.root)
    return disk


def _class(store: FeatureStore, row: int) -> str | None:
    label = int(store.labels[row])
    return str(store.classes[label]) if label >= 0 else None


def _same_class(store: FeatureStore, found: Neighbours) -> float | None:
    """The share of rows with a class whose nearest row has the same one; None without classes."""
    labels = store.labels[found.rows]
    known = labels >= 0
    if not known.any():
        return None
    return float((store.labels[found.neighbours[known, 0]] == labels[known]).mean())


def _pairs(store: FeatureStore, found: Neighbours) -> Iterable[tuple[Any, ...]]:
    for row, neighbours, scores in zip(found.rows, found.neighbours, found.scores, strict=True):
        for rank, (other, score) in enumerate(zip(neighbours, scores, strict=True), 1):
            yield row, store.keys[row], rank, other, store.keys[other], f"{score:.6g}"


def _members(
    store: FeatureStore, layer: str, groups: list[npt.NDArray[np.int64]]
) -> Iterable[tuple[Any, ...]]:
    for number, group in enumerate(groups):
        cosines = cosines_to_first(store, layer, group)
        for row, cosine in zip(group.tolist(), cosines.tolist(), strict=True):
            key, kind = store.keys[row], _class(store, row) or ""
            yield number, len(group), row, key, kind, f"{cosine:.6f}"


def _write_csv(file: BinaryIO, header: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
    # Bytes of a key that are not UTF-8 stay as they are, as in failures.csv.
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    writer = csv.writer(text)  # lines end in \r\n: a \r in a key is quoted then
    writer.writerow(header)
    writer.writerows(rows)
    text.flush()
    text.detach()


def _as_json(values: npt.NDArray[np.float64]) -> list[list[float | None]]:
    """NaN, which JSON does not have, as null."""
    return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]
