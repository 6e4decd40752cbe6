"""job=stats store=DIR: statistics of the rows of a finished store, without model and images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from featx.analysis.probe.layer_rows import crop_of
from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import PartMoments, StatsLayer
from featx.analysis.statistics.reader import Statistics, summary_of
from featx.analysis.statistics.session import StatsSession, clear_files
from featx.analysis.statistics.stats_file import Contents, DamagedError
from featx.base import CountProgress, choose_device, command_text, rows_of_block
from featx.config import GRADIENTS, Config, from_saved
from featx.errors import ConfigError, StoreError, StoreMismatchError
from featx.storage import AtomicFolder, exclusive_lock, is_url
from featx.store import (
    FeatureStore,
    Grid,
    Manifest,
    check_rows_present,
    layout,
    manifest_of,
    matching_layers,
)
from featx.types import Failure, Part, Status


def stats_of_store(config: Config) -> dict[str, object]:
    """Compute the statistics of layers of the store that `config.store` names, in its folder.

    The rows are summed along the same tree as in a run over images, so that a store with
    dtype=float32 gives the same numbers. Of the config `layers`, `stats`, `device` and `overwrite`
    are used. Return the summary as of `run_stats`, without the measurements of a run. Raises
    FeatxError if the store is not complete or damaged, or the folder has other statistics.
    """
    store = FeatureStore(str(config.store), verify="rows")
    folder = store.folder
    if is_url(folder):
        raise ConfigError(f"store={store.root}: statistics are written to a disk only; copy it.")
    manifest = manifest_of(store)
    if manifest is None or not store.complete:
        status = command_text("job=status", f"store={store.root}")
        raise StoreError(
            f"{store.root} is not the complete store of a run; `{status}` says what is missing."
        )
    reference = None if config.stats.reference is None else Statistics(config.stats.reference)
    layers: dict[str, StatsLayer] = {}
    for name in matching_layers(store, config.layers):
        tokens = store[name].tokens
        size = (crop_of(store) or (1, 1)) if tokens is None else tokens.input_size
        layers[name] = StatsLayer.of(manifest.layers[name], config.stats, size, tokens)
    disk = AtomicFolder(folder)
    session = _session(disk, manifest, list(layers.values()), config)
    path = session.path
    with exclusive_lock(folder / layout.LOCK):
        clear_files(disk, config.overwrite)
        checksums = store.image_checksums  # before the rows: one state of the store
        failures = _failures(store)
        failed = [failure.row for failure in failures]
        if path.exists():
            try:
                found = session.read(path, 0, len(store))
            except DamagedError as error:
                raise StoreError(f"{error} overwrite=true computes it again.") from error
            same_images = np.array_equal(found.checksums, checksums)
            if not same_images or [failure.row for failure in found.failures] != failed:
                raise StoreMismatchError(
                    f"{store.root} has other rows than when {path} was computed from it (images "
                    "were refreshed, or failed ones retried). overwrite=true computes it again."
                )
        else:
            device = choose_device(config.device)
            # As a run over images with parts of the same size sums them.
            part_rows = manifest.first_run_with(next(iter(layers))).grid.part_rows
            with CountProgress("rows") as progress:
                progress.begin(len(store) * len(layers))
                moments = {
                    name: _sum(store, layer, part_rows, failed, device, progress)
                    for name, layer in layers.items()
                }
            session.write(Contents(moments, failures, checksums))
    return summary_of(Statistics(path), reference, failures)


def _session(
    disk: AtomicFolder, manifest: Manifest, layers: Sequence[StatsLayer], config: Config
) -> StatsSession:
    header = manifest.first_run_with(layers[0].spec.name).header
    settings = {
        **header.fingerprint,
        "layers": [layer.spec.name for layer in layers],
        "dtype": layers[0].spec.dtype,
        "stats.observation": config.stats.observation,
        "stats.covariance": config.stats.covariance,
    }
    del settings["codec"]
    if any(layer.spec.capture in GRADIENTS for layer in layers):
        settings["target"] = from_saved(header.config).target
    header = replace(header, fingerprint=settings)
    return StatsSession(disk, header, Grid(manifest.num_rows, 1), layers)


def _failures(store: FeatureStore) -> list[Failure]:
    """Rows without features, which are left out of every layer."""
    return [
        Failure(
            each["row"],
            bytes(store.key_bytes[each["row"]]),
            Status(int(store.status[each["row"]])),
            each["error"],
            each["message"],
        )
        for each in store.failures
        if not store.ok[each["row"]]
    ]


def _sum(
    store: FeatureStore,
    layer: StatsLayer,
    part_rows: int,
    failed: Sequence[int],
    device: torch.device,
    progress: CountProgress,
) -> Moments:
    name, part = layer.spec.name, Part(0, 0, len(store))
    moments = PartMoments(part, layer, part_rows)
    step = rows_of_block(4 * math.prod(layer.captured))
    for start in range(0, len(store), step):
        stop = min(len(store), start + step)
        read = store[name][start:stop]
        ok = np.flatnonzero(store.ok[start:stop])
        check_rows_present(store, name, start + ok, read[ok])
        rows = torch.from_numpy(read.astype(np.float32)).to(device)
        without = [row for row in failed if start <= row < stop]
        moments.add(start, rows, without)
        progress.step(len(rows))
    return moments.finish()
