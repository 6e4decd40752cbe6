"""Two commits in alternation: the same commands, images and machine, once a round each."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measuring import REPOSITORY, UNITS, Add, Figure, read_figures, run_command
from benchmarks.photos import make_photos

MODELS = ("resnet50", "vit_b_16", "vit_small_patch16_224", "convnext_tiny", "efficientnet_lite0")

COMMANDS = {
    "startup": ("--runs", "1", "--json"),
    "read": ("--gigabytes", "0.5", "--runs", "3", "--json"),
    "loader-overhead": ("--runs", "3", "--json"),
}
"""Commands of scripts/benchmark that are compared besides the models, with their options."""

HISTORY = {
    **{
        model: [f"{model} {kind}: images_per_second" for kind in ("fp32", "bf16")]
        for model in MODELS
    },
    "20 images": ["a run of 20 images: seconds"],
    "finished store": ["the same on its finished store: seconds"],
    "reader": ["vectors, batches of 256 at random: of_memmap"],
    "loader": ["nothing decoded: microseconds"],
}
"""Columns of the table in scripts/benchmarks/history.md -> names of the figures in a cell."""


@dataclass
class Side:
    """One of the two commits: its name, its files, and the values of each figure in each round."""

    name: str
    folder: Path
    values: dict[Figure, list[float]] = field(default_factory=dict)

    def add(self, figures: dict[Figure, float]) -> None:
        """Add the values of one round."""
        for figure, value in figures.items():
            self.values.setdefault(figure, []).append(value)


def run(arguments: argparse.Namespace) -> None:
    """Rates, start-up, reader and loader of two commits; exit code 1 where the second is slower."""
    with tempfile.TemporaryDirectory(prefix="featx-regressions-") as name:
        folder = Path(name)
        sides = [
            Side(commit, files_of(commit, folder / when))
            for when, commit in (("before", arguments.before), ("after", arguments.after))
        ]
        compare_models(sides, arguments, folder)
        compare_commands(sides, arguments.commands, arguments.runs, folder)
    figures = dict.fromkeys(figure for side in sides for figure in side.values)
    slower = [figure.name for figure in figures if print_verdict(figure, sides, arguments.least)]
    print(history_row(sides))
    if slower:
        print(f"SLOWER: {', '.join(slower)}")
        raise SystemExit(1)
    print(f"nothing is slower than {arguments.least} times {arguments.before}")


def files_of(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a new folder."""
    archive = f"{folder}.tar"
    run_command("git", "-C", REPOSITORY, "archive", f"--output={archive}", commit)
    shutil.unpack_archive(archive, folder, filter="data")
    return folder


def compare_models(sides: Sequence[Side], arguments: argparse.Namespace, folder: Path) -> None:
    """Run the command with each model, precision and side in turn."""
    if arguments.models:
        make_photos(folder / "photos", arguments.images)
    for model in arguments.models:
        for precision in arguments.precisions:
            case = f"{model} {precision}"
            options = (f"model={model}", f"precision={precision}", "model.weights=null")
            for number in range(arguments.runs):
                for side in order_of_round(sides, number):
                    out = Path(tempfile.mkdtemp(dir=folder), "store")
                    words = (sys.executable, "-m", "featx", *options, "data=photos", f"out={out}")
                    run_command(*words, cwd=folder, checkout=side.folder)
                    summary = json.loads((out / "summary.json").read_text())
                    rate = summary["images_per_second"]
                    print(f"  {case}, {side.name}: {rate:.1f} images/s", flush=True)
                    side.add(
                        {
                            Figure(case, "images_per_second"): rate,
                            Figure(case, "peak_mib"): summary["peak_memory_mib"],
                        }
                    )


def compare_commands(
    sides: Sequence[Side], commands: Sequence[str], runs: int, folder: Path
) -> None:
    """Run commands of scripts/benchmark of each side in turn."""
    for name in commands:
        for number in range(runs):
            for side in order_of_round(sides, number):
                words = (sys.executable, side.folder / "scripts" / "benchmark", name)
                printed = run_command(*words, *COMMANDS[name], cwd=folder, checkout=side.folder)
                print(f"  {name}, {side.name}: done", flush=True)
                side.add(read_figures(printed))


def order_of_round(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return the sides in the order of a round, which changes from round to round.

    The second run of a round was 5 % slower whichever commit it was.
    """
    return sides if number % 2 == 0 else sides[::-1]


def speedups(figure: Figure, sides: Sequence[Side]) -> list[float]:
    """Return how many times as good a figure is in each round; empty if a commit lacks it."""
    rounds = zip(*(side.values.get(figure, []) for side in sides), strict=False)
    return [figure.speedup(*pair) for pair in rounds]


def history_row(sides: Sequence[Side]) -> str:
    """Return the row of these commits in scripts/benchmarks/history.md."""
    words = "git", "-C", REPOSITORY, "rev-parse", "--short"
    commits = "..".join(run_command(*words, f"{side.name}^{{commit}}").strip() for side in sides)
    cells = [time.strftime("%-d %B %Y"), commits, f"{os.cpu_count()} cores"]
    for names in HISTORY.values():
        measured = [speedups(figure, sides) for figure in sides[0].values if figure.name in names]
        cells.append(
            " / ".join(f"{statistics.median(ratios):.2f}" for ratios in measured if ratios)
        )
    return f"| {' | '.join(cells)} |"


def print_verdict(figure: Figure, sides: Sequence[Side], least: float) -> bool:
    """Print the medians and the verdict of one figure; return whether it is slower.

    Memory is printed but not judged: the allocator makes it differ by a tenth from run to run.
    """
    before, after = (side.values.get(figure, []) for side in sides)
    shown = [f"{statistics.median(x):9.2f}" if x else "not there" for x in (before, after)]
    text = f"{figure.name:58} {' -> '.join(shown)} {UNITS[figure.metric]}"
    slower = False
    if ratios := speedups(figure, sides):
        ratio = statistics.median(ratios)
        slower = ratio < least and figure.metric != "peak_mib"
        text += f", {ratio:.2f} times as good ({min(ratios):.2f} to {max(ratios):.2f})"
    print(text + (": SLOWER" if slower else ""), flush=True)
    return slower


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("regressions", run)
    command.add_argument("before", help="a commit, such as main~1")
    command.add_argument("after", nargs="?", default="HEAD", help="a commit; HEAD when not given")
    command.add_argument("--models", nargs="*", default=MODELS, help="random weights")
    command.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    command.add_argument("--commands", nargs="*", default=[*COMMANDS], help="of scripts/benchmark")
    command.add_argument("--images", type=int, default=96)
    command.add_argument("--runs", type=int, default=3, help="rounds, with each commit once")
    command.add_argument(
        "--least", type=float, default=0.9, help="median ratio of the rounds that is not slower"
    )
