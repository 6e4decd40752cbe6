"""Two commits in alternation: the same command, images and machine, once a round each."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.commands import Add
from featx.jobs.bench.photos import make_photos

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = ("resnet50", "vit_b_16", "vit_small_patch16_224", "convnext_tiny", "efficientnet_lite0")


@dataclass
class Side:
    """One of the two commits.

    Attributes:
        name: as it was given.
        folder: its files.
        rates: images a second, one for each round.
        memory: MiB at the peak, one for each round.
    """

    name: str
    folder: Path
    rates: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> None:
    """Images a second of two commits; exit code 1 where the second is slower, 2 where one fails."""
    with (
        tempfile.TemporaryDirectory(prefix="featx-regressions-") as name,
        worktrees(Path(name), arguments.before, arguments.after) as folders,
    ):
        photos = Path(name) / "photos"
        if arguments.data is None:
            make_photos(photos, arguments.images)
        keys = [
            "model.weights=null", "data=folder", f"data.root={arguments.data or photos}",
            f"data.limit={arguments.images}", *arguments.keys,
        ]  # fmt: skip
        slower = []
        for model in arguments.models:
            for precision in arguments.precisions:
                names = f"before ({arguments.before})", f"after ({arguments.after})"
                sides = [Side(*pair) for pair in zip(names, folders, strict=True)]
                chosen = [f"model={model}", f"precision={precision}", *keys]
                for number in range(arguments.runs):
                    for side in sides:
                        measure(side, chosen, Path(name) / f"{model}-{precision}-{number}")
                if told(f"{model} {precision}", *sides, arguments.least):
                    slower.append(f"{model} {precision}")
    if slower:
        print(f"SLOWER: {', '.join(slower)}")
        raise SystemExit(1)
    print(f"no model is slower than {arguments.least} times {arguments.before}")


@contextlib.contextmanager
def worktrees(folder: Path, *commits: str) -> Iterator[list[Path]]:
    """The files of each commit in a folder of their own, while the block goes on."""
    made: list[Path] = []
    try:
        for number, commit in enumerate(commits):
            made.append(folder / f"commit-{number}")
            _git("worktree", "add", "--quiet", "--detach", str(made[-1]), commit)
        yield made
    finally:
        for tree in made:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"git {' '.join(arguments)}: {done.stderr.strip()}", file=sys.stderr)
        raise SystemExit(2)


def measure(side: Side, keys: list[str], out: Path) -> None:
    """Run the command with the files of one side, and note what its summary says."""
    out = out.with_name(f"{out.name}-{side.folder.name}")
    paths = [str(side.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "featx", *keys, f"out={out}"],
        cwd=out.parent,  # not a checkout, whose featx would be imported
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"{side.name} failed with {' '.join(keys)}:\n{done.stderr}", file=sys.stderr)
        raise SystemExit(2)
    summary = json.loads((out / "summary.json").read_text())
    side.rates.append(summary["images_per_second"])
    side.memory.append(summary["peak_memory_mib"])
    print(f"  {side.name}: {side.rates[-1]:.1f} images/s", flush=True)


def told(what: str, before: Side, after: Side, least: float) -> bool:
    """Print the medians and the verdict; whether the second side is slower."""
    ratios = [b / a for a, b in zip(before.rates, after.rates, strict=True)]
    ratio = statistics.median(ratios)
    memory = statistics.median(after.memory) / statistics.median(before.memory)
    print(
        f"{what:28} {statistics.median(before.rates):6.1f} -> "
        f"{statistics.median(after.rates):6.1f} images/s, ratio {ratio:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}), memory {memory:.2f} times: "
        f"{'SLOWER' if ratio < least else 'not slower'}",
        flush=True,
    )
    return ratio < least


def add_commands(add: Add) -> None:
    """The command of scripts/benchmark that is measured here."""
    one = add("regressions", run)
    one.add_argument("before", help="a commit, such as main~1")
    one.add_argument("after", nargs="?", default="HEAD", help="a commit; HEAD when not given")
    one.add_argument("--keys", nargs="+", default=[], help="of the command, as layers=stages")
    one.add_argument("--models", nargs="+", default=MODELS, help="random weights")
    one.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    one.add_argument("--data", help="a folder of images; made-up photographs when not given")
    one.add_argument("--images", type=int, default=96)
    one.add_argument("--runs", type=int, default=3, help="rounds, with each commit once")
    one.add_argument(
        "--least", type=float, default=0.9, help="median ratio of the rounds that is not slower"
    )
