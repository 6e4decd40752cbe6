"""job=duplicates: groups of near-duplicates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress
from featx.config import Config, DuplicatesConfig
from featx.errors import counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import class_name, open_input, result_folder, write_csv
from featx.store import FeatureStore, only_layer


def run(config: Config, config_yaml: str) -> int:
    """Find groups of near-duplicates, write them to duplicates.csv, and print a summary."""
    from featx.analysis.similarity import duplicate_groups  # which imports torch

    store = open_input(config)
    layer, threshold = only_layer(store, config.layers), config.duplicates.threshold
    disk = result_folder(store, config)
    with CountProgress("rows") as progress:
        progress.begin(int(store.ok.sum()))
        groups = duplicate_groups(store, layer, threshold, config.device, progress.step)
    path = disk.root / "duplicates.csv"
    header = ("group", "size", "row", "key", "class", "cosine_to_first")
    with disk.stream_file(path) as file:
        write_csv(file, header, _members(store, layer, groups))
    mixed = [group for group in groups if len(set(store.labels[group].tolist())) > 1]
    num_ok, num_in_groups = int(store.ok.sum()), sum(map(len, groups))
    summary = {
        "layer": layer,
        "threshold": threshold,
        "rows": num_ok,
        "groups": len(groups),
        "rows_in_groups": num_in_groups,
        "groups_of_several_classes": len(mixed),
        "file": str(path),
    }
    of_several = counted(len(mixed), "group has", "groups have")
    rows = [
        ("layer", layer),
        ("threshold", f"a cosine of {threshold:g}"),
        ("rows", f"{num_in_groups} of {num_ok} in {counted(len(groups), 'group')}"),
        ("classes", f"{of_several} images of several classes"),
        ("file", str(path)),
    ]
    lines = [
        f"{len(group)} rows: {', '.join(store.keys[group[:3]])}{', ...' if len(group) > 3 else ''}"
        for group in sorted(groups, key=len, reverse=True)[:5]
    ]
    print_summary(config, summary, rows, "\n".join(lines) if lines else None)
    return 0


def _members(
    store: FeatureStore, layer: str, groups: list[npt.NDArray[np.int64]]
) -> Iterable[tuple[Any, ...]]:
    from featx.analysis.similarity import cosines_to_first

    for number, group in enumerate(groups):
        cosines = cosines_to_first(store, layer, group)
        for row, cosine in zip(group.tolist(), cosines.tolist(), strict=True):
            key, kind = store.keys[row], class_name(store, row) or ""
            yield number, len(group), row, key, kind, f"{cosine:.6f}"


JOBS.register(
    Job(
        "duplicates",
        "Find groups of near-duplicates in a store.",
        DuplicatesConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device"),
        why="it reads an existing store; `layers` selects its layers",
    )
)
