"""Every command of scripts/benchmark runs to its end, at a size that says nothing of speed.

What they measure is not asserted anywhere; that they still measure is.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = {
    "bench": "test_resnet --images 6 --runs 1",
    "checks": "--gigabytes 0.01 --runs 1",
    "codecs": "--images 8 --megabytes 1 --codecs none zstd --runs 1",
    "commit": "--mib 4 8",
    "copies": "--models resnet18 --runs 1",
    "decode": "--images 4 --runs 1",
    "depth": "--model resnet18 --images 16 --runs 1",
    "listing": "--files 100 --classes 10 --runs 1",
    "loader": "--gigabytes 0.01 --workers 0 1 --runs 1",
    "malloc": "--batch-size 2 --runs 1 --seconds 0.2",
    "many-parts": "--parts 6 --rows 2 --tokens 5",
    "nearest": "--rows 3000 --features 16 --queries 64 --runs 1",
    "parts": "--parts 6 --workers null 1 --runs 1",
    "peers": "--model resnet18 --images 16 --runs 1",
    "probe": "--rows 400 --features 16 --runs 1",
    "read": "--gigabytes 0.2 --runs 1",
    "loader-overhead": "--images 512 --photos 8 --batch-size 16 --runs 1",
    "regressions": "HEAD HEAD --models resnet18 --precisions fp32 --images 8 --runs 1 --least 0 "
    "--commands",
    "roofline": "--models resnet18 --batch-size 2 --runs 1",
    "scale": "--rows 1000 2000",
    "startup": "--images 8 --runs 1",
    "workers": "--images 32 --workers null 1 --runs 1",
    "tiles": "--side 400 --boxes 4",
    "tokens": "--gigabytes 0.01 --runs 1 --batches 2 --memory-mib 4 --json",
    "table": "--rows 1000 --runs 1",
}


def benchmark(*arguments: str, code: int = 0) -> str:
    """What a command of scripts/benchmark prints, on stderr too where it is to fail."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "benchmark"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + (done.stderr if code else "")


def test_none_is_left_out() -> None:
    commands = re.search(r"\{([a-z,-]+)\}", benchmark("--help"))
    assert commands is not None
    assert set(commands[1].split(",")) == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_command_gives_figures(name: str) -> None:
    assert re.search(r"\d", benchmark(name, *SMALL[name].split()))


@pytest.mark.slow
def test_a_memory_cgroup_limits_the_command_and_is_removed() -> None:
    cgroups = Path("/sys/fs/cgroup/memory")
    if not os.access(cgroups, os.W_OK):
        pytest.skip("needs root and a writable memory cgroup of version 1")
    small = SMALL["tiles"].split()
    printed = benchmark("tiles", *small, "--limit", "2000000000")
    assert "ended with 0 in a memory cgroup of 2,000,000,000 bytes" in printed
    killed = benchmark("tiles", *small, "--limit", "100000000", code=1)
    assert "ended with 1 in a memory cgroup of 100,000,000 bytes" in killed
    assert not list(cgroups.glob("featx-benchmark-*"))


@pytest.mark.slow
def test_a_commit_that_is_not_there() -> None:
    assert "git worktree add" in benchmark("regressions", "no-such-commit", code=2)


@pytest.mark.slow
def test_a_slower_commit_gives_exit_code_1() -> None:
    small = SMALL["regressions"].replace("--least 0", "--least 100").split()
    assert "SLOWER: resnet18 fp32: images_per_second" in benchmark("regressions", *small, code=1)


@pytest.mark.slow
def test_commands_of_two_commits_are_compared() -> None:
    """The older commit cannot print its figures as JSON."""
    known = subprocess.run(["git", "-C", REPOSITORY, "cat-file", "-e", "c74101a^{commit}"])
    if known.returncode:
        pytest.skip("a clone without history")
    small = ["--runs", "1", "--least", "0", "--models", "--commands", "startup"]
    printed = benchmark("regressions", "c74101a", "HEAD", *small)
    assert "startup, before (c74101a): not there" in printed
    assert re.search(r"a run of 20 images: seconds +not there -> +\d", printed)
    assert re.search(r"\| \d+ \w+ \d{4} \| c74101a\w*\.\.\w+ \| .* not there", printed)


FIGURES = {
    "a run: seconds": 6.0,
    "resnet18 fp32: images_per_second": 40.0,
    "vectors: of_memmap": 0.6,
    "a run: peak_mib": 900.0,
}
REFERENCES = {"python": 5.0, "torch": 100.0}


@pytest.fixture
def last_figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    return importlib.import_module("benchmarks.last_figures")


@pytest.mark.parametrize(
    ("references", "changed", "below"),
    [
        ({}, {}, ""),
        ({}, {"a run: seconds": 11.9, "vectors: of_memmap": 0.31}, ""),
        ({}, {"a run: seconds": 12.1}, "a run: seconds"),
        ({}, {"resnet18 fp32: images_per_second": 19.9}, "resnet18 fp32: images_per_second"),
        ({}, {"vectors: of_memmap": 0.29}, "vectors: of_memmap"),
        ({}, {"a run: peak_mib": 1801.0}, "a run: peak_mib"),
        # A machine of a third of the speed makes no figure fail, and a fast one hides none.
        ({"python": 5 / 3}, {"a run: seconds": 18.0}, ""),
        ({"torch": 100 / 3}, {"resnet18 fp32: images_per_second": 13.3}, ""),
        ({"python": 15.0}, {"a run: seconds": 4.1}, "a run: seconds"),
        ({"torch": 33.0}, {"a run: seconds": 12.1}, "a run: seconds"),
        ({}, {"a run: seconds": None}, "a run: seconds"),
    ],
)
def test_the_short_form_fails_below_half_of_the_last_figures(
    last_figures: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    references: dict[str, float],
    changed: dict[str, float | None],
    below: str,
) -> None:
    path = tmp_path / "last.json"
    last_figures.Recorded("2026-11-23", "abc", "a machine", REFERENCES, FIGURES).write(path)
    found = {name: value for name, value in {**FIGURES, **changed}.items() if value is not None}
    turns = []

    def measured() -> tuple[dict[str, float], dict[str, float]]:
        turns.append(1)
        return {**REFERENCES, **references}, found

    if not below:
        last_figures.check(path, measured=measured)
        assert len(turns) == 1
        return
    with pytest.raises(SystemExit) as ended:
        last_figures.check(path, measured=measured)
    assert ended.value.code == 1
    assert capsys.readouterr().out.endswith(f"BELOW 0.5 of the last figure: {below}\n")
    assert len(turns) == 2, "measured again before it fails"


def test_another_program_that_slowed_a_figure_down_makes_nothing_fail(
    last_figures: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "last.json"
    last_figures.Recorded("2026-11-23", "abc", "a machine", REFERENCES, FIGURES).write(path)
    turns = iter([{**FIGURES, "a run: seconds": 30.0}, FIGURES])
    last_figures.check(path, measured=lambda: (REFERENCES, next(turns)))


def test_the_recorded_figures_can_be_compared(last_figures: ModuleType) -> None:
    recorded = last_figures.Recorded.read(last_figures.FILE)
    shares = recorded.shares(recorded.references, recorded.figures)
    assert set(shares.values()) == {1.0}
    assert "a run of 20 images: processor_seconds" in shares
