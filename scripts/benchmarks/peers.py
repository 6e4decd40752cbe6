"""featx, the script a user writes, and peers: the same pictures and weights, in turn."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.commands import Add
from benchmarks.random_weights import run_of
from featx.config.run_config import Config
from featx.jobs.bench import contenders
from featx.jobs.bench.photos import make_photos

SCRIPT = "the user's script"
FEATX, FEATX_FP32 = "featx", "featx precision=fp32"
THINGSVISION = "thingsvision"
CLIP_RETRIEVAL = "a pipeline in clip-retrieval's manner"


def run(arguments: argparse.Namespace) -> None:
    """Images a second of every contender, and its ratio to the user's script of the same round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        runs = {
            name: run_of(arguments.model, arguments.layer, folder / "photos", precision=precision)
            for name, precision in ((FEATX, "auto"), (FEATX_FP32, "fp32"))
        }
        contenders.in_new_process(_save_weights, runs[FEATX][0], folder / "weights.pt")
        rates: dict[str, list[float]] = {}
        places: dict[str, Path] = {}
        for number in range(arguments.runs):
            for which, contender in enumerate(_names(arguments)):
                place = folder / f"{number}-{which}"
                place.mkdir()
                rate = _measure(contender, runs, arguments, place)
                rates.setdefault(contender, []).append(rate)
                places.setdefault(contender, place)
                print(f"  {contender}: {rate:.1f} images/s", flush=True)
        _print(rates, places)


def _names(arguments: argparse.Namespace) -> list[str]:
    peers = [THINGSVISION] if arguments.thingsvision else []
    return [SCRIPT, FEATX, FEATX_FP32, *peers, CLIP_RETRIEVAL]


def _save_weights(config: Config, path: Path) -> None:
    """The random weights that featx draws from its seed, for who takes them from a file."""
    import torch

    from featx.models import build_backbone

    torch.save(build_backbone(config.model, config.seed).module.state_dict(), path)


def _measure(
    contender: str,
    runs: dict[str, tuple[Config, str]],
    arguments: argparse.Namespace,
    place: Path,
) -> float:
    """Images a second of one contender, which leaves its rows in the folder."""
    if contender in runs:
        measured = contenders.in_new_process(contenders.run_featx, *runs[contender], place)
        return float(measured.images_per_second)
    config, _ = runs[FEATX_FP32]
    if contender == SCRIPT:
        return float(
            contenders.in_new_process(contenders.run_tutorial, config, place).images_per_second
        )
    if contender == CLIP_RETRIEVAL:
        return contenders.in_new_process(_run_clip_retrieval_like, config, arguments.layer, place)
    script = Path(__file__).with_name("thingsvision_peer.py")
    photos, weights = place.parent / "photos", place.parent / "weights.pt"
    command = [arguments.thingsvision, script, photos, arguments.model, arguments.layer]
    done = subprocess.run([*map(str, [*command, weights, place])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"thingsvision failed:\n{done.stderr}")
    return arguments.images / float(done.stdout.split()[-1])


def _run_clip_retrieval_like(config: Config, layer: str, place: Path) -> float:
    from benchmarks.clip_retrieval_peer import extract
    from featx.models import build_backbone

    backbone = build_backbone(config.model, config.seed)
    photos = place.parent / "photos"
    seconds, rows = extract(backbone.module, layer, backbone.preprocess.reference, photos, place)
    np.save(place / contenders.FEATURES_FILE, rows.astype(np.float64))
    return len(rows) / seconds


def _print(rates: dict[str, list[float]], places: dict[str, Path]) -> None:
    for contender, found in rates.items():
        ratios = [mine / script for mine, script in zip(found, rates[SCRIPT], strict=True)]
        cosine = contenders.smallest_cosine(places[contender], places[SCRIPT])
        print(
            f"{contender:36} {statistics.median(found):6.1f} images/s, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), smallest "
            f"cosine to the script's rows {cosine:.5f}"
        )
    for peer in (THINGSVISION, CLIP_RETRIEVAL):
        for mine in (FEATX, FEATX_FP32) if peer in rates else ():
            ratios = [a / b for a, b in zip(rates[mine], rates[peer], strict=True)]
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{mine} is {statistics.median(ratios):.2f} {spread} times as fast as {peer}")


def add_commands(add: Add) -> None:
    """The command of scripts/benchmark that is measured here."""
    one = add("peers", run)
    one.add_argument("--model", default="resnet50", help="of torchvision; random weights")
    one.add_argument("--layer", default="avgpool")
    one.add_argument("--images", type=int, default=512)
    one.add_argument("--runs", type=int, default=3)
    one.add_argument(
        "--thingsvision", metavar="PYTHON", help="an interpreter that imports thingsvision"
    )
