"""featx, the script a user writes, and peers: the same images and weights, files to a closed file.

Every contender runs in a process of its own, so that none finds what another one left, and its
rate is that from the warm model to the closed file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import Add, Case, compare, run_command, smallest_cosine
from benchmarks.photos import make_photos
from featx.analysis import FEATURES
from featx.base import num_cpus
from featx.config import Config, from_composed, from_keywords, saved_yaml
from featx.models import build_backbone
from featx.pipeline import run_extraction
from featx.store import FeatureStore

SCRIPT = "the user's script"
FEATX, FEATX_FP32 = "featx", "featx precision=fp32"
THINGSVISION = "thingsvision"
CLIP_RETRIEVAL = "a pipeline like clip-retrieval's"

FEATURES_FILE = "features.npy"
"""File with the rows of a contender, for the comparison of values."""


class ImageFiles(Dataset[tuple[torch.Tensor, str]]):
    """Image files, opened by Pillow and preprocessed as the weights require, with their paths."""

    def __init__(self, folder: Path, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.paths = sorted(path for path in folder.rglob("*.*") if path.is_file())
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        path = self.paths[index]
        return self.transform(Image.open(path).convert("RGB")), str(path)


def run_featx(config: Config, config_yaml: str, out: Path) -> float:
    """Measure featx, from files to a packed store, in images per second."""
    with contextlib.redirect_stderr(io.StringIO()):
        store = str(out / "store")
        summary = run_extraction(replace(config, out=store), config_yaml, FEATURES)
    np.save(out / FEATURES_FILE, FeatureStore(store)[summary["layers"][0]][:])
    seconds = summary["rows"] / summary["images_per_second"] + summary["seconds"]["pack"]
    return float(summary["rows"] / seconds)


def run_script(config: Config, layer: str, out: Path) -> float:
    """Measure what a good tutorial shows: a DataLoader, one hook, fp32, one array, h5py."""
    # The default start method of Linux, whichever this process was started with.
    loading = {"batch_size": 32, "num_workers": num_cpus(), "multiprocessing_context": "fork"}

    def write(outputs: list[torch.Tensor], names: list[str]) -> np.ndarray:
        features = torch.cat(outputs).numpy()
        with h5py.File(out / "x.h5", "w") as file:
            file["features"] = features
        return features

    return run_loop(config, layer, out, loading, write)


def run_clip_retrieval_like(config: Config, layer: str, out: Path) -> float:
    """Measure a pipeline in the manner of clip-retrieval's `inference`.

    Its own command takes CLIP models only, whose weights are downloaded. What it does around them
    stands here: Pillow in four DataLoader workers, batches of 256, and a writer that saves arrays
    as float16 with the files' names beside them.
    """
    loading = {"batch_size": 256, "num_workers": 4, "multiprocessing_context": "fork"}

    def write(outputs: list[torch.Tensor], names: list[str]) -> np.ndarray:
        rows = np.concatenate([each.flatten(1).numpy() for each in outputs]).astype(np.float16)
        np.save(out / "img_emb_0.npy", rows)
        (out / "metadata_0.json").write_text(json.dumps(names))
        return rows

    return run_loop(config, layer, out, loading, write)


def run_loop(
    config: Config,
    layer: str,
    out: Path,
    loading: dict[str, Any],
    write: Callable[[list[torch.Tensor], list[str]], np.ndarray],
) -> float:
    """Measure a loop over a DataLoader with one hook, in images per second.

    `write` writes the outputs of all batches, and returns them as one array.
    """
    backbone = build_backbone(config.model, config.seed)
    module, outputs, names = backbone.module, [], []
    images = ImageFiles(Path(config.data.root or ""), backbone.preprocess.reference)
    with torch.no_grad():
        module(torch.zeros(32, *backbone.preprocess.shape))
        started_at = time.perf_counter()
        handle = module.get_submodule(layer).register_forward_hook(
            lambda module, args, output: outputs.append(output.cpu())
        )
        for batch, paths in DataLoader(images, **loading):
            module(batch)
            names += paths
        handle.remove()
        rows = write(outputs, names)
    seconds = time.perf_counter() - started_at
    np.save(out / FEATURES_FILE, rows)
    return len(rows) / seconds


def run_thingsvision(python: str, photos: Path, *given: str | Path) -> float:
    """Measure thingsvision in the interpreter that has it, in images per second."""
    script = Path(__file__).with_name("thingsvision_peer.py")
    printed = run_command(python, script, photos, *given)
    return len(list(photos.iterdir())) / float(printed.split()[-1])


def save_weights(config: Config, path: Path) -> None:
    """Save the random weights that featx draws from its seed, for peers that read a file."""
    torch.save(build_backbone(config.model, config.seed).module.state_dict(), path)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, and return its value."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def make_config(model: str, layer: str, photos: Path, precision: str) -> tuple[Config, str]:
    """Make the config of one layer of all photos with random weights, and its saved YAML."""
    weights = {"name": model, "weights": None}
    node = from_keywords(
        {"model": weights, "layers": [layer], "data": photos, "precision": precision}
    )
    return from_composed(node), saved_yaml(node)


def run(arguments: argparse.Namespace) -> None:
    """Images per second of every contender, and its ratio to the script of the same round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos = folder / "photos"
        make_photos(photos, arguments.images)
        auto, exact = (
            make_config(arguments.model, arguments.layer, photos, precision)
            for precision in ("auto", "fp32")
        )
        layer, outs = arguments.layer, dict[str, Path]()

        def case(name: str, function: Callable[..., float], *given: Any) -> Case:
            def measure() -> float:
                outs[name] = Path(tempfile.mkdtemp(dir=folder))
                return float(in_new_process(function, *given, outs[name]))

            return measure

        cases = {
            SCRIPT: case(SCRIPT, run_script, exact[0], layer),
            FEATX: case(FEATX, run_featx, *auto),
            FEATX_FP32: case(FEATX_FP32, run_featx, *exact),
            CLIP_RETRIEVAL: case(CLIP_RETRIEVAL, run_clip_retrieval_like, exact[0], layer),
        }
        if arguments.thingsvision:
            weights = folder / "weights.pt"
            in_new_process(save_weights, exact[0], weights)
            given = (arguments.thingsvision, photos, arguments.model, layer, weights)
            cases[THINGSVISION] = case(THINGSVISION, run_thingsvision, *given)
        ratios = compare(f"{arguments.model}, files to store", cases, arguments.runs, "images/s")
        for name, out in outs.items():
            rows, expected = (np.load(each / FEATURES_FILE) for each in (out, outs[SCRIPT]))
            cosine = smallest_cosine(rows, expected)
            print(f"  {name}: smallest cosine to the script's rows {cosine:.5f}")
        for peer in (THINGSVISION, CLIP_RETRIEVAL):
            for mine in (FEATX, FEATX_FP32) if peer in ratios else ():
                print(f"{mine} is {ratios[mine] / ratios[peer]:.2f} times as fast as {peer}")


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("peers", run)
    command.add_argument("--model", default="resnet50", help="of torchvision; random weights")
    command.add_argument("--layer", default="avgpool")
    command.add_argument("--images", type=int, default=512)
    command.add_argument("--runs", type=int, default=3)
    command.add_argument(
        "--thingsvision", metavar="PYTHON", help="an interpreter that imports thingsvision"
    )
