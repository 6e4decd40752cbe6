"""Two commits in alternation: the same commands, images and machine, once a round each."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import UNITS, Figure, read_figures
from benchmarks.photos import make_photos
from benchmarks.rounds import Add

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = ("resnet50", "vit_b_16", "vit_small_patch16_224", "convnext_tiny", "efficientnet_lite0")

COMMANDS = {
    "startup": ("--runs", "1", "--json"),
    "read": ("--gigabytes", "0.5", "--runs", "3", "--json"),
    "loader-overhead": ("--runs", "3", "--json"),
}
"""Commands of scripts/benchmark that are compared besides the models, with their options."""

HISTORY = {
    **{
        model: [f"{model} {precision}: images_per_second" for precision in ("fp32", "bf16")]
        for model in MODELS
    },
    "20 images": ["a run of 20 images: seconds"],
    "finished store": ["the same on its finished store: seconds"],
    "reader": ["vectors, batches of 256 at random: of_memmap"],
    "loader": ["nothing decoded: microseconds"],
}
"""Columns of the table in scripts/benchmarks/history.md -> names of the figures in a cell."""

_NOT_THERE = ("invalid choice", "unrecognized arguments")
"""Texts of argparse for a command, or an option of it, that a commit does not have yet."""


@dataclass
class Side:
    """One of the two commits.

    Attributes:
        name: as it was given.
        folder: its files.
        values: figure -> values, one for each round.
    """

    name: str
    folder: Path
    values: dict[Figure, list[float]] = field(default_factory=dict)

    def add(self, figures: dict[Figure, float]) -> None:
        """Add the values of one round."""
        for figure, value in figures.items():
            self.values.setdefault(figure, []).append(value)


def run(arguments: argparse.Namespace) -> None:
    """Rates, start-up, reader and loader of two commits; exit code 1 where the second is slower."""
    commits = arguments.before, arguments.after
    with (
        tempfile.TemporaryDirectory(prefix="featx-regressions-") as name,
        worktrees(Path(name), *commits) as folders,
    ):
        sides = [
            Side(f"{when} ({commit})", folder)
            for when, commit, folder in zip(("before", "after"), commits, folders, strict=True)
        ]
        compare_models(sides, arguments, Path(name))
        compare_commands(sides, arguments.commands, arguments.runs, Path(name))
    figures = dict.fromkeys(figure for side in sides for figure in side.values)
    slower = [figure.name for figure in figures if print_verdict(figure, sides, arguments.least)]
    print("\n" + history_row(sides, *map(short_name, commits)))
    if slower:
        print(f"SLOWER: {', '.join(slower)}")
        raise SystemExit(1)
    print(f"nothing is slower than {arguments.least} times {arguments.before}")


@contextlib.contextmanager
def worktrees(folder: Path, *commits: str) -> Iterator[list[Path]]:
    """Check out each commit in a folder of its own, until the end of the block."""
    made: list[Path] = []
    try:
        for number, commit in enumerate(commits):
            made.append(folder / f"commit-{number}")
            _git("worktree", "add", "--quiet", "--detach", str(made[-1]), commit)
        yield made
    finally:
        for tree in made:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"git {' '.join(arguments)}: {done.stderr.strip()}", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout.strip()


def short_name(commit: str) -> str:
    """Abbreviated hash of a commit."""
    return _git("rev-parse", "--short", commit)


def run_in_checkout(
    command: list[str], checkout: Path, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command that imports featx from a checkout, in a folder that is no checkout."""
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def machine() -> str:
    """Number of cores and name of the processor."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0].partition(":")[2].strip() if names else name
    return f"{os.cpu_count()} cores, {name}"


def compare_models(sides: Sequence[Side], arguments: argparse.Namespace, folder: Path) -> None:
    """Run the command with each model, precision and side in turn."""
    photos = folder / "photos"
    if arguments.models and arguments.data is None:
        make_photos(photos, arguments.images)
    options = [
        "model.weights=null", "data=folder", f"data.root={arguments.data or photos}",
        f"data.limit={arguments.images}", *arguments.options,
    ]  # fmt: skip
    for model in arguments.models:
        for precision in arguments.precisions:
            chosen = [f"model={model}", f"precision={precision}", *options]
            for number in range(arguments.runs):
                for side in order_of_round(sides, number):
                    name = model.replace("/", "-")  # timm/vit_base_patch16_224
                    out = folder / f"{name}-{precision}-{number}-{side.folder.name}"
                    side.add(measure(side.folder, chosen, out, f"{model} {precision}"))


def order_of_round(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return the sides in the order of a round, which changes from round to round.

    The second run of a round was 5 % slower whichever commit it was.
    """
    return sides if number % 2 == 0 else sides[::-1]


def measure(folder: Path, options: list[str], out: Path, case: str) -> dict[Figure, float]:
    """Run the command with the files of a commit.

    Returns:
        Images per second and peak memory, as its summary says.
    """
    done = run_in_checkout(
        [sys.executable, "-m", "featx", *options, f"out={out}"], folder, out.parent
    )
    if done.returncode:
        print(f"{folder} failed with {' '.join(options)}:\n{done.stderr}", file=sys.stderr)
        raise SystemExit(2)
    summary = json.loads((out / "summary.json").read_text())
    print(f"  {case}: {summary['images_per_second']:.1f} images/s", flush=True)
    return {
        Figure(case, "images_per_second"): summary["images_per_second"],
        Figure(case, "peak_mib"): summary["peak_memory_mib"],
    }


def compare_commands(
    sides: Sequence[Side], commands: Sequence[str], runs: int, folder: Path
) -> None:
    """Run commands of scripts/benchmark of each side in turn."""
    for name in commands:
        for number in range(runs):
            for side in order_of_round(sides, number):
                figures = command_figures(side.folder, [name, *COMMANDS[name]], folder)
                print(f"  {name}, {side.name}: {'not there' if figures is None else 'done'}")
                side.add(figures or {})


def command_figures(folder: Path, command: list[str], cwd: Path) -> dict[Figure, float] | None:
    """Figures of a command of scripts/benchmark of a commit.

    Args:
        folder: files of the commit.
        command: name of the command, and options with --json.
        cwd: folder that is no checkout.

    Returns:
        None if the commit does not have the command, or cannot print its figures as JSON.
    """
    done = run_in_checkout(
        [sys.executable, str(folder / "scripts" / "benchmark"), *command], folder, cwd
    )
    if done.returncode == 2 and any(text in done.stderr for text in _NOT_THERE):
        return None
    if done.returncode:
        print(f"{folder} failed with {' '.join(command)}:\n{done.stderr}", file=sys.stderr)
        raise SystemExit(2)
    return read_figures(done.stdout)


def speedups(figure: Figure, sides: Sequence[Side]) -> list[float]:
    """Return how many times as good a figure is in each round; empty if a commit lacks it."""
    before, after = (side.values.get(figure, []) for side in sides)
    return [figure.speedup(*pair) for pair in zip(before, after, strict=False)]


def print_verdict(figure: Figure, sides: Sequence[Side], least: float) -> bool:
    """Print the medians and the verdict of one figure; return whether it is slower.

    Memory is printed but not judged: the allocator makes it differ by a tenth from run to run.
    """
    shown = [
        f"{statistics.median(values):9.2f}" if values else "not there"
        for values in (side.values.get(figure, []) for side in sides)
    ]
    text = f"{figure.name:58} {' -> '.join(shown)} {UNITS[figure.metric]}"
    slower = False
    if ratios := speedups(figure, sides):
        ratio = statistics.median(ratios)
        slower = ratio < least and figure.metric != "peak_mib"
        text += f", {ratio:.2f} times as good ({min(ratios):.2f} to {max(ratios):.2f})"
    print(text + (": SLOWER" if slower else ""), flush=True)
    return slower


def history_row(sides: Sequence[Side], before: str, after: str) -> str:
    """Row for the table of scripts/benchmarks/history.md, whose columns are those of HISTORY."""
    cells = [time.strftime("%d %B %Y").lstrip("0"), f"{before}..{after}", machine()]
    for names in HISTORY.values():
        figures = [Figure.named(name) for name in names]
        ratios_of = [speedups(figure, sides) for figure in figures]
        is_measured = any(figure in side.values for figure in figures for side in sides)
        shown = [f"{statistics.median(ratios):.2f}" for ratios in ratios_of if ratios]
        cells.append(" / ".join(shown) or ("not there" if is_measured else ""))
    return f"| {' | '.join(cells)} |"


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("regressions", run)
    command.add_argument("before", help="a commit, such as main~1")
    command.add_argument("after", nargs="?", default="HEAD", help="a commit; HEAD when not given")
    command.add_argument("--options", nargs="+", default=[], help="of featx, such as layers=stages")
    command.add_argument("--models", nargs="*", default=MODELS, help="random weights")
    command.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    command.add_argument("--commands", nargs="*", default=[*COMMANDS], help="of scripts/benchmark")
    command.add_argument("--data", help="a folder of images; made-up photographs when not given")
    command.add_argument("--images", type=int, default=96)
    command.add_argument("--runs", type=int, default=3, help="rounds, with each commit once")
    command.add_argument(
        "--least", type=float, default=0.9, help="median ratio of the rounds that is not slower"
    )
