"""Small matrices with labels, as a store and as the probes take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from made_store import make_labelled

from featx.analysis import LayerVectors
from featx.analysis.probe import probe_rows
from featx.analysis.probe.labelled_rows import labelled_rows
from featx.analysis.probe.layer_rows import Problem, open_vectors
from featx.config import ProbeConfig
from featx.store import FeatureStore


def blobs(
    num_rows: int = 300, width: int = 20, num_classes: int = 3, signal: float = 0.6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Normal clouds that overlap: (n, D) float32 of uneven scales, and (n,) labels."""
    rng = np.random.default_rng(seed)
    y = np.arange(num_rows) % num_classes
    centres = rng.normal(size=(num_classes, width))
    x = rng.normal(size=(num_rows, width)) + signal * centres[y]
    return (x * np.geomspace(0.1, 10, width) + 3).astype(np.float32), y


def write_store(
    root: Path,
    y: np.ndarray,
    columns: dict[str, np.ndarray] | None = None,
    failed: Iterable[int] = (),
    **layers: np.ndarray,
) -> Path:
    """A packed store of these layers; classes are c0, c1, ..."""
    classes = [f"c{i}" for i in range(int(y.max()) + 1)]
    run = make_labelled(layers, y, classes, failed)
    listing = replace(run.listing, columns=columns or {})
    return replace(run, listing=listing).copied(root, packed=True)


def features_of(
    root: Path, x: np.ndarray, y: np.ndarray, memory_bytes: float = 1e9
) -> LayerVectors:
    """The rows of a store made of them, in memory or (memory_bytes=0) read in blocks."""
    if not (root / "store").exists():
        write_store(root / "store", y, x=x)
    labelled = labelled_rows(FeatureStore(root / "store"))
    rows = probe_rows(labelled.store, "x", labelled.rows)
    return open_vectors([rows], torch.device("cpu"), memory_bytes)


def problem_of(
    root: Path,
    x: np.ndarray,
    y: np.ndarray,
    options: ProbeConfig | None = None,
    memory_bytes: float = 1e9,
) -> Problem:
    """One layer as the methods take it."""
    features = features_of(root, x, y, memory_bytes)
    return Problem(features, y.astype(np.int64), int(y.max()) + 1, options or ProbeConfig(), 0)
