"""featx, a plain PyTorch script, and each stage of featx alone: the same images, in turn."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import contenders
from benchmarks.commands import Add
from benchmarks.contenders import Measurement
from benchmarks.photos import make_photos
from featx.base import log_message, table
from featx.config import DEFAULT_LAYERS, Config, from_composed, from_keywords, saved_yaml

SCRIPT = "the user's script"


def run(arguments: argparse.Namespace) -> None:
    """Ratio of featx to the script of the same round, and images per second of each stage."""
    with tempfile.TemporaryDirectory(prefix="featx-bench-") as name:
        folder = Path(name)
        photos = arguments.folder
        if photos is None:
            photos = folder / "photos"
            make_photos(photos, arguments.images)
        data = {"name": "folder", "root": str(photos), "limit": arguments.images}
        model = {"name": arguments.model, "weights": None}
        node = from_keywords({"model": model, "data": data, **arguments.options})
        config = from_composed(node)
        result = _measure(config, saved_yaml(node), arguments.runs, folder)
    print(json.dumps(result, indent=2) if arguments.json else _text(result))


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("bench", run)
    command.add_argument("model", nargs="?", default="resnet50", help="random weights")
    command.add_argument("--images", type=int, default=512, help="of each round")
    command.add_argument("--folder", type=Path, help="of images; photographs are made without it")
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--json", action="store_true")
    command.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON",
        help='further options of featx.extract, such as \'{"layers": ["layer4"]}\'',
    )  # fmt: skip


def _measure(config: Config, config_yaml: str, num_rounds: int, folder: Path) -> dict[str, Any]:
    """Run every contender once per round, in turn, and then each stage separately."""
    exact = replace(config, precision="fp32")
    variants = {
        "featx": config,
        "featx precision=fp32": exact,
        "featx precision=fp32 compile=true": replace(exact, compile=True),
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in (SCRIPT, *variants)}
    first_stores: dict[str, Path] = {}
    for number in range(num_rounds):
        log_message(f"round {number + 1} of {num_rounds}")
        for name in runs:
            run_folder = folder / f"{number}-{len(first_stores)}"
            run_folder.mkdir()
            if name == SCRIPT:
                measurement = contenders.in_new_process(contenders.run_tutorial, config, run_folder)
            else:
                measurement = contenders.in_new_process(
                    contenders.run_featx, variants[name], config_yaml, run_folder
                )
            runs[name].append(measurement)
            if name in first_stores:
                shutil.rmtree(run_folder)
            first_stores.setdefault(name, run_folder)
    out = str(folder / "stages")
    stages = contenders.in_new_process(
        contenders.stages_alone, replace(config, out=out), config_yaml
    )
    return _result(config, runs, first_stores, stages)


def _result(
    config: Config,
    runs: dict[str, list[Measurement]],
    first_stores: dict[str, Path],
    stages: dict[str, float],
) -> dict[str, Any]:
    """Return medians and spreads in JSON types."""
    images = runs["featx"][0].images
    for stage in ("copy", "write"):
        seconds = statistics.median(m.stages[stage] for m in runs["featx"])
        stages[stage] = images / seconds if seconds else float("inf")
    slowest = min(stages, key=lambda stage: stages[stage])
    rows: dict[str, dict[str, Any]] = {}
    for name, measurements in runs.items():
        rates = [m.images_per_second for m in measurements]
        ratios = [
            m.images_per_second / script.images_per_second
            for m, script in zip(measurements, runs[SCRIPT], strict=True)
        ]
        rows[name] = {
            "images_per_second": statistics.median(rates),
            "ratio": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
            "cosine": contenders.smallest_cosine(first_stores[name], first_stores[SCRIPT]),
        }
    return {
        "model": config.model.name,
        "layers": config.layers or DEFAULT_LAYERS,
        "images": images,
        "runs": len(runs["featx"]),
        "contenders": rows,
        "stages_alone": stages,
        "slowest_stage": slowest,
        "share_of_slowest_stage": rows["featx"]["images_per_second"] / stages[slowest],
    }


def _text(result: dict[str, Any]) -> str:
    """Format the result for people."""
    body = [
        (
            name,
            f"{row['images_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f}",
            "-" if row["cosine"] is None else f"{row['cosine']:.5f}",
        )
        for name, row in result["contenders"].items()
    ]
    header = ("", "images/s", "ratio", "spread", "smallest cosine to the script's rows")
    stages = [(stage, f"{rate:,.1f}") for stage, rate in result["stages_alone"].items()]
    return (
        f"{result['model']}, layers={result['layers']}, {result['images']} images, "
        f"{result['runs']} rounds in turn, files to store\n"
        f"{table(header, body)}\n\n"
        f"{table(('stage alone', 'images/s'), stages)}\n\n"
        f"featx reaches {result['share_of_slowest_stage']:.2f} of its slowest stage alone "
        f"({result['slowest_stage']})."
    )
