"""featx and a plain script: each runs from files to a closed HDF5 file, in its own process."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from featx.analysis import FEATURES
from featx.base import num_cpus
from featx.config import Config
from featx.errors import DataError
from featx.types import Batch, Listing, Part

T = TypeVar("T")

FEATURES_FILE = "features.npy"
"""File with the rows of a contender, for the comparison of values."""


@dataclass(frozen=True)
class Measurement:
    """One run of one contender.

    Attributes:
        images_per_second: rate from the warm and compiled model to the closed file.
        images: number of images.
        stages: busy seconds per stage, as far as the contender counts them.
    """

    images_per_second: float
    images: int
    stages: dict[str, float] = field(default_factory=dict)


def in_new_process(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a new process, so that no contender finds what another one left."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *args).result()


def run_featx(config: Config, config_yaml: str, folder: Path) -> Measurement:
    """Measure featx, from files to a packed store."""
    from featx.pipeline import run_extraction
    from featx.store import FeatureStore

    out = folder / "store"
    with contextlib.redirect_stderr(io.StringIO()):
        summary = run_extraction(replace(config, out=str(out)), config_yaml, FEATURES)
    store = FeatureStore(out)
    np.save(folder / FEATURES_FILE, _rows(store[summary["layers"][0]][:]))
    seconds = summary["rows"] / summary["images_per_second"] + summary["seconds"]["pack"]
    return Measurement(summary["rows"] / seconds, summary["rows"], summary["seconds"])


def run_tutorial(config: Config, folder: Path) -> Measurement:
    """Measure the plain script with the same model, layer and images."""
    import torch

    from benchmarks.baseline_script import ImageFiles, extract
    from featx.base import choose_device
    from featx.config import layer_requests
    from featx.layers import select, trace_forward, with_evidence
    from featx.models import build_backbone
    from featx.sources import open_source

    device = choose_device(config.device)
    backbone = build_backbone(config.model, config.seed)
    module = backbone.module.to(device)
    noise = torch.randn(2, *backbone.preprocess.shape, device=device)
    requests, traced = layer_requests(config), trace_forward(module, noise)
    if "embedding" in dict(requests):
        traced = with_evidence(traced, module, noise, backbone.embedding)
    module.requires_grad_(True)  # as it comes from its library
    chosen = select(requests, traced, backbone.classifier, backbone.stages).chosen
    point, _ = chosen[0]
    listing = open_source(config.data).listing()
    root = Path(config.data.root or "")  # of data=folder, which needs one
    paths = [root / os.fsdecode(bytes(key)) for key in listing.keys]
    images = ImageFiles(paths[: config.data.limit], backbone.preprocess.reference)
    with torch.no_grad():
        module(torch.zeros(32, *backbone.preprocess.shape, device=device))
    seconds, features = extract(
        module, point.module, point.capture == "input", images, device, num_cpus(), folder / "x.h5"
    )
    np.save(folder / FEATURES_FILE, _rows(features))
    return Measurement(len(features) / seconds, len(features))


def stages_alone(config: Config, config_yaml: str) -> dict[str, float]:
    """Measure the images per second of reading, decoding and the model, each on its own."""
    from featx.images import Loader
    from featx.pipeline import FeatureOutput, Passes, build_run_context

    with build_run_context(config, config_yaml, FEATURES, FeatureOutput(config)) as context:
        num_rows, engine = len(context.listing), context.engine
        keys = [bytes(key) for key in context.listing.keys]
        started_at = time.perf_counter()
        data = {key: context.source.read(key) for key in keys}
        reading = time.perf_counter() - started_at
        in_memory = _InMemory(context.listing, data)
        started_at = time.perf_counter()
        images = None
        with Loader(in_memory, context.listing, context.decoding) as loader:
            for _, batch in loader.batches([Part(0, 0, num_rows)], engine.compute.batch_size):
                images = batch.images
        decoding = time.perf_counter() - started_at
        if images is None:
            raise DataError("the data set has no rows.")
        passes = max(3, num_rows // len(images))
        engine.run(images)
        # The mean over several passes, as in a run; the fastest pass alone would be too good.
        batches = [(Part(0, 0, num_rows), Batch(images, 0, len(images), []))] * passes
        with Passes(context, lambda engine, batch: engine.run(batch.images)) as parallel:
            started_at = time.perf_counter()
            for _, _, computed in parallel.each(batches):
                computed()
        model = (time.perf_counter() - started_at) / (passes * len(images))
    return {"read": num_rows / reading, "decode": num_rows / decoding, "model": 1 / model}


class _InMemory:
    """Source of encoded images in memory, so that only decoding remains."""

    def __init__(self, listing: Listing, data: dict[bytes, bytes]) -> None:
        self._listing = listing
        self._data = data

    def listing(self) -> Listing:
        return self._listing

    def read(self, key: bytes) -> bytes:
        return self._data[key]


def smallest_cosine(first: Path, second: Path) -> float | None:
    """Return the smallest cosine of two contenders' rows; None if a reduction changed the shape."""
    a, b = np.load(first / FEATURES_FILE), np.load(second / FEATURES_FILE)
    if a.shape != b.shape:
        return None
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / np.maximum(lengths, 1e-30)).min())


def _rows(features: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Flatten (N, ...) to (N, D) float64."""
    return features.reshape(len(features), -1).astype(np.float64)
