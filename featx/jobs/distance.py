"""job=distance: KID and Fréchet distance between the images of two stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from featx.base import CountProgress, Table, shown_path
from featx.config import Config, listed_stores
from featx.errors import ConfigError
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import open_input
from featx.store import FeatureStore, matching_layers

if TYPE_CHECKING:
    from featx.analysis.similarity import DataSetDistance


def run(config: Config, config_yaml: str) -> int:
    """Compute the distances in every common layer and print them."""
    from featx.analysis.similarity import SUBSETS, data_set_distance  # which imports torch

    store, other = map(open_input, listed_stores(str(config.store)))
    layers = _common_layers(store, other, config)
    with CountProgress("subsets") as progress:
        progress.begin(SUBSETS * len(layers))
        distances = [
            data_set_distance(
                store,
                other,
                layer,
                seed=config.seed,
                device=config.device,
                on_progress=progress.step,
            )
            for layer in layers
        ]
    notes = _notes(distances, {layer: store[layer].shape for layer in layers})
    summary = {
        "store": str(store.root),
        "other_store": str(other.root),
        "subsets": SUBSETS,
        "seed": config.seed,
        "layers": [asdict(each) for each in distances],
        "notes": notes,
    }
    cells = [
        (
            each.layer,
            "-" if each.frechet is None else f"{each.frechet:.4g}",
            f"{each.kid:.4g}",
            f"{each.kid_std:.2g}",
        )
        for each in distances
    ]
    first = distances[0]
    rows = [
        ("store", f"{shown_path(store.root)}, {first.rows} rows"),
        ("other store", f"{shown_path(other.root)}, {first.other_rows} rows"),
        ("KID", f"mean of {SUBSETS} subsets of {first.subset_rows} rows of each store"),
        *((each.layer, f"no Fréchet distance: {each.not_available}")
          for each in distances if each.not_available is not None),
        ("notes", "\n".join(notes) if notes else None),
    ]  # fmt: skip
    header = ("layer", "Fréchet distance, squared", "KID", "std over subsets")
    print_summary(config, summary, Table(header, cells), rows)
    return 0


def _notes(
    distances: Sequence[DataSetDistance], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return what few rows do to the distances."""
    notes = []
    first = distances[0]
    fewest = min(first.rows, first.other_rows)
    biased = [
        each.layer
        for each in distances
        if each.frechet is not None and fewest < np.prod(shapes[each.layer][1:])
    ]
    if biased:
        notes.append(
            f"The Fréchet distance is biased upwards where the layer has more numbers than the "
            f"smaller store rows ({fewest}): {', '.join(biased)}. Compare equal numbers of rows "
            "only, or use KID."
        )
    if first.subset_rows == fewest:
        notes.append(
            f"Each subset has all {fewest} rows of the smaller store, so the standard deviation of "
            "KID is too small; subset_rows=N of featx.similarity.data_set_distance takes fewer."
        )
    return notes


def _common_layers(store: FeatureStore, other: FeatureStore, config: Config) -> list[str]:
    """Return the layers to compare: those of `layers`, or all that both stores have."""
    layers = matching_layers(store, config.layers)
    if config.layers is not None:
        return [name for name in layers if matching_layers(other, name)]
    common = [name for name in layers if name in other]
    if not common:
        raise ConfigError(
            f"{store.root} has {', '.join(layers)} and {other.root} has {', '.join(other.layers)}: "
            "expected a layer that both have."
        )
    return common


def _check(config: Config) -> None:
    if len(listed_stores(str(config.store))) != 2:
        raise ConfigError(
            f"store={config.store}: job=distance needs two stores, 'store=[runs/a,runs/b]'."
        )


JOBS.register(
    Job(
        "distance",
        "Compare the images of two stores by KID and Fréchet distance.",
        run=run,
        input=Input.STORE,
        reads=("job.json", "layers", "device", "seed"),
        why="it reads existing stores; `layers` selects their layers",
        check=_check,
        takes_several_stores=True,
    )
)
