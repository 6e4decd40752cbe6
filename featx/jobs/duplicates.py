"""job=duplicates: groups of near-duplicates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.similarity.duplicates import cosines_to_first, duplicate_groups
from featx.analysis.similarity.job_files import class_name, open_input, result_folder, write_csv
from featx.base.console import print_result
from featx.base.progress import CountProgress
from featx.base.text import facts
from featx.config.run_config import Config
from featx.errors import counted
from featx.store.layer_selection import only_layer
from featx.store.reader import FeatureStore


def run(config: Config, config_yaml: str) -> int:
    """Find groups of near-duplicates, write them to duplicates.csv, and print a summary.

    Returns:
        The exit code 0.
    """
    store = open_input(config)
    summary, text = _duplicates(store, config)
    print_result(json.dumps(summary, indent=2) if config.job.json else text)
    return 0


def _duplicates(store: FeatureStore, config: Config) -> tuple[dict[str, Any], str]:
    layer, threshold = only_layer(store, config.layers), config.duplicates.threshold
    disk = result_folder(store, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()))
        groups = duplicate_groups(store, layer, threshold, config.device, progress.step)
    path = disk.root / "duplicates.csv"
    header = ("group", "size", "row", "key", "class", "cosine_to_first")
    with disk.streamed(path) as file:
        write_csv(file, header, _members(store, layer, groups))
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
            f"{counted(len(mixed), 'group has', 'groups have')} images of several classes",
        ),
        ("file", str(path)),
    ]
    largest = sorted(groups, key=len, reverse=True)[:5]
    lines = [
        f"{len(group)} rows: {', '.join(store.keys[group[:3]])}{', ...' if len(group) > 3 else ''}"
        for group in largest
    ]
    return summary, "\n".join([facts(rows), *([""] if lines else []), *lines])


def _members(
    store: FeatureStore, layer: str, groups: list[npt.NDArray[np.int64]]
) -> Iterable[tuple[Any, ...]]:
    for number, group in enumerate(groups):
        cosines = cosines_to_first(store, layer, group)
        for row, cosine in zip(group.tolist(), cosines.tolist(), strict=True):
            key, kind = store.keys[row], class_name(store, row) or ""
            yield number, len(group), row, key, kind, f"{cosine:.6f}"
