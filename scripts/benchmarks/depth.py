"""featx up to an early layer against the full depth of a model, files to store, in turn."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.commands import Add
from benchmarks.random_weights import run_of
from featx.jobs.bench import contenders
from featx.jobs.bench.photos import make_photos


def run(arguments: argparse.Namespace) -> None:
    """How many times as fast a run is that ends at an early layer, channels averaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        rates: dict[str, list[float]] = {layer: [] for layer in arguments.layers}
        for number in range(arguments.runs):
            for layer, found in rates.items():
                config, text = run_of(arguments.model, layer, folder / "photos", reduce="avg")
                place = folder / f"{number}-{layer}"
                place.mkdir()
                measured = contenders.in_new_process(contenders.run_featx, config, text, place)
                found.append(measured.images_per_second)
                print(f"  {layer}: {found[-1]:.1f} images/s", flush=True)
    early, last = (rates[layer] for layer in arguments.layers)
    ratios = [a / b for a, b in zip(early, last, strict=True)]
    print(
        f"{arguments.model}: {arguments.layers[0]} {statistics.median(early):.1f} images/s, "
        f"{arguments.layers[1]} {statistics.median(last):.1f}, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def add_commands(add: Add) -> None:
    """The command of scripts/benchmark that is measured here."""
    one = add("depth", run)
    one.add_argument("--model", default="resnet50", help="random weights")
    one.add_argument("--layers", nargs=2, default=["layer1", "avgpool"], help="early, and last")
    one.add_argument("--images", type=int, default=512)
    one.add_argument("--runs", type=int, default=3)
