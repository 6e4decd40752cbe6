"""featx, the script a user writes, and peers: the same images and weights, in turn."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import contenders
from benchmarks.commands import Add
from benchmarks.photos import make_photos
from benchmarks.random_weights import make_config
from featx.config import Config

SCRIPT = "the user's script"
FEATX, FEATX_FP32 = "featx", "featx precision=fp32"
THINGSVISION = "thingsvision"
CLIP_RETRIEVAL = "a pipeline like clip-retrieval's"


def run(arguments: argparse.Namespace) -> None:
    """Images per second of every contender, and its ratio to the script of the same round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", arguments.images)
        runs = {
            name: make_config(
                arguments.model, arguments.layer, folder / "photos", precision=precision
            )
            for name, precision in ((FEATX, "auto"), (FEATX_FP32, "fp32"))
        }
        contenders.in_new_process(_save_weights, runs[FEATX][0], folder / "weights.pt")
        rates: dict[str, list[float]] = {}
        folders: dict[str, Path] = {}
        for number in range(arguments.runs):
            for index, contender in enumerate(_contenders(arguments)):
                out = folder / f"{number}-{index}"
                out.mkdir()
                rate = _measure(contender, runs, arguments, out)
                rates.setdefault(contender, []).append(rate)
                folders.setdefault(contender, out)
                print(f"  {contender}: {rate:.1f} images/s", flush=True)
        _print_rates(rates, folders)


def _contenders(arguments: argparse.Namespace) -> list[str]:
    peers = [THINGSVISION] if arguments.thingsvision else []
    return [SCRIPT, FEATX, FEATX_FP32, *peers, CLIP_RETRIEVAL]


def _save_weights(config: Config, path: Path) -> None:
    """Save the random weights that featx draws from its seed, for peers that read a file."""
    import torch

    from featx.models import build_backbone

    torch.save(build_backbone(config.model, config.seed).module.state_dict(), path)


def _measure(
    contender: str,
    runs: dict[str, tuple[Config, str]],
    arguments: argparse.Namespace,
    out: Path,
) -> float:
    """Images per second of one contender, which writes its rows to `out`."""
    if contender in runs:
        measured = contenders.in_new_process(contenders.run_featx, *runs[contender], out)
        return float(measured.images_per_second)
    config, _ = runs[FEATX_FP32]
    if contender == SCRIPT:
        return float(
            contenders.in_new_process(contenders.run_tutorial, config, out).images_per_second
        )
    if contender == CLIP_RETRIEVAL:
        return contenders.in_new_process(_run_clip_retrieval_like, config, arguments.layer, out)
    script = Path(__file__).with_name("thingsvision_peer.py")
    photos, weights = out.parent / "photos", out.parent / "weights.pt"
    command = [arguments.thingsvision, script, photos, arguments.model, arguments.layer]
    done = subprocess.run([*map(str, [*command, weights, out])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"thingsvision failed:\n{done.stderr}")
    return arguments.images / float(done.stdout.split()[-1])


def _run_clip_retrieval_like(config: Config, layer: str, out: Path) -> float:
    from benchmarks.clip_retrieval_peer import extract
    from featx.models import build_backbone

    backbone = build_backbone(config.model, config.seed)
    photos = out.parent / "photos"
    seconds, rows = extract(backbone.module, layer, backbone.preprocess.reference, photos, out)
    np.save(out / contenders.FEATURES_FILE, rows.astype(np.float64))
    return len(rows) / seconds


def _print_rates(rates: dict[str, list[float]], folders: dict[str, Path]) -> None:
    for contender, contender_rates in rates.items():
        ratios = [
            mine / script for mine, script in zip(contender_rates, rates[SCRIPT], strict=True)
        ]
        cosine = contenders.smallest_cosine(folders[contender], folders[SCRIPT])
        print(
            f"{contender:36} {statistics.median(contender_rates):6.1f} images/s, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), smallest "
            f"cosine to the script's rows {cosine:.5f}"
        )
    for peer in (THINGSVISION, CLIP_RETRIEVAL):
        for mine in (FEATX, FEATX_FP32) if peer in rates else ():
            ratios = [a / b for a, b in zip(rates[mine], rates[peer], strict=True)]
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{mine} is {statistics.median(ratios):.2f} {spread} times as fast as {peer}")


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
