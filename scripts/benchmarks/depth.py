"""featx up to an early layer against the full depth of a model, files to store, in turn."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks import contenders
from benchmarks.commands import Add
from benchmarks.photos import make_photos
from benchmarks.random_weights import make_config


def run(arguments: argparse.Namespace) -> None:
    """How many times as fast a run is that ends at an early layer, channels averaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        rates: dict[str, list[float]] = {layer: [] for layer in arguments.layers}
        for number in range(arguments.runs):
            for layer, layer_rates in rates.items():
                config, text = make_config(arguments.model, layer, folder / "photos", reduce="avg")
                out = folder / f"{number}-{layer}"
                out.mkdir()
                measured = contenders.in_new_process(contenders.run_featx, config, text, out)
                layer_rates.append(measured.images_per_second)
                print(f"  {layer}: {layer_rates[-1]:.1f} images/s", flush=True)
    early, last = (rates[layer] for layer in arguments.layers)
    ratios = [a / b for a, b in zip(early, last, strict=True)]
    print(
        f"{arguments.model}: {arguments.layers[0]} {statistics.median(early):.1f} images/s, "
        f"{arguments.layers[1]} {statistics.median(last):.1f}, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("depth", run)
    command.add_argument("--model", default="resnet50", help="random weights")
    command.add_argument("--layers", nargs=2, default=["layer1", "avgpool"], help="early, and last")
    command.add_argument("--images", type=int, default=512)
    command.add_argument("--runs", type=int, default=3)
