"""job=duplicates: groups of near-duplicates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import CountProgress, printable
from featx.config import Config, DuplicatesConfig
from featx.errors import counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import (
    chosen_layer,
    class_name,
    open_input,
    result_folder,
    write_json,
    write_table,
)
from featx.sources import origin_of
from featx.store import FeatureStore
from featx.types import NO_IMAGE

if TYPE_CHECKING:
    from featx.analysis import LayerVectors


def run(config: Config, config_yaml: str) -> int:
    """Find groups of near-duplicates, write them to duplicates.csv, and print a summary."""
    from featx.analysis import LayerRows, LayerVectors  # both import torch
    from featx.analysis.similarity import linked_groups
    from featx.base import choose_device

    store, standardise = open_input(config.store_path()), config.neighbors.standardise
    layer, threshold = chosen_layer(store, config), config.duplicates.least_cosine(standardise)
    disk, device = result_folder(store, config), choose_device(config.device)
    ok_rows = LayerRows(store, layer, np.flatnonzero(store.ok))
    vectors = LayerVectors([ok_rows], device, unit=True, standardise=standardise)
    with CountProgress("rows") as progress:
        progress.begin(len(vectors))
        groups = linked_groups(vectors, threshold, progress.step)
    header = ("group", "size", "row", "key", "class", "cosine_to_first", "same_file")
    members = list(_members(store, vectors, groups))
    table = write_table(disk, "duplicates.csv", header, members)
    num_copies = sum(1 for member in members if member[-1])
    mixed = [group for group in groups if len({*store.labels[group].tolist()} - {-1}) > 1]
    num_ok, num_in_groups = int(store.ok.sum()), sum(map(len, groups))
    summary = {
        "layer": layer,
        "threshold": threshold,
        "standardised": standardise,
        "rows": num_ok,
        "groups": len(groups),
        "rows_in_groups": num_in_groups,
        "copies_of_files": num_copies,
        "groups_of_several_classes": len(mixed),
        **table,
    }
    of_several = counted(len(mixed), "group has", "groups have")
    write_json(disk, "duplicates.json", store, summary)
    rows = [
        ("layer", layer),
        (
            "threshold",
            f"a cosine of {threshold:g}{' of standardised values' if standardise else ''}",
        ),
        ("rows", f"{num_in_groups} of {num_ok} in {counted(len(groups), 'group')}"),
        ("classes", f"{of_several} images of several classes"),
        ("copies", f"{counted(num_copies, 'row')} of the same file as the first of its group"),
        ("file", table["file"]),
    ]
    lines = [
        f"{len(group)} rows: "
        f"{', '.join(printable(store.key_of(row)) for row in group[:3].tolist())}"
        f"{', ...' if len(group) > 3 else ''}"
        for group in sorted(groups, key=len, reverse=True)[:5]
    ]
    print_summary(config, summary, rows, "\n".join(lines) if lines else None)
    return 0


def _members(
    store: FeatureStore, vectors: LayerVectors, groups: list[npt.NDArray[np.int64]]
) -> Iterable[tuple[object, ...]]:
    from featx.analysis.similarity import cosines_to_first

    images = store.image_checksums
    for number, group in enumerate(groups):
        cosines, first = cosines_to_first(vectors, group), int(group[0])
        for row, cosine in zip(group.tolist(), cosines.tolist(), strict=True):
            key, kind = store.key_of(row), class_name(store, row) or ""
            is_copy = row != first and NO_IMAGE < images[row] == images[first]
            # Boxes, views and frames of one file are no copies of each other.
            is_copy = is_copy and _region(store.key_bytes[row]) == _region(store.key_bytes[first])
            yield (
                *(number, len(group), row, key, kind),
                *(f"{cosine:.6f}", "yes" if is_copy else ""),
            )


def _region(key: bytes) -> bytes:
    """Return frame, box and view of a row, such as '#10,20,64,48#hflip'; empty for an image."""
    return key[len(origin_of(key)[0]) :]


JOBS.register(
    Job(
        "duplicates",
        "Find groups of near-duplicates in a store.",
        DuplicatesConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device", "neighbors.standardise"),
    )
)
