"""Every command of scripts/benchmark runs to its end, at a size that says nothing of speed.

What they measure is not asserted anywhere; that they still measure is.
"""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from conftest import REPOSITORY, run_python

SMALL = {
    "decode": "--images 4 --runs 1",
    "loader-overhead": "--images 512 --photos 8 --batch-size 16 --runs 1",
    "nearest": "--rows 3000 --features 16 --queries 64 --runs 1",
    "peers": "--model resnet18 --images 16 --runs 1",
    "read": "--gigabytes 0.2 --runs 1",
    "regressions": "HEAD HEAD --models resnet18 --precisions fp32 --images 8 --runs 1 --least 0 "
    "--commands",
    "startup": "--images 8 --runs 1",
}


def benchmark(*arguments: str, code: int = 0) -> str:
    """What a command of scripts/benchmark prints, on stderr too where it is to fail."""
    script = REPOSITORY / "scripts" / "benchmark"
    done = run_python(script, *arguments, path=[REPOSITORY], code=code, timeout=500)
    return done.stdout + (done.stderr if code else "")


def test_none_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = REPOSITORY / "scripts" / "benchmark"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    commands = re.search(r"\{([a-z,-]+)\}", capsys.readouterr().out)
    assert commands is not None
    assert set(commands[1].split(",")) == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_command_gives_figures(name: str) -> None:
    assert re.search(r"\d", benchmark(name, *SMALL[name].split()))


@pytest.mark.slow
def test_a_commit_that_is_not_there() -> None:
    printed = benchmark("regressions", "no-such-commit", code=2)
    assert "not a valid object name: no-such-commit" in printed


@pytest.mark.slow
def test_a_slower_commit_gives_exit_code_1() -> None:
    small = SMALL["regressions"].replace("--least 0", "--least 100").split()
    assert "SLOWER: resnet18 fp32: images_per_second" in benchmark("regressions", *small, code=1)


@pytest.mark.slow
def test_commands_of_two_commits_are_compared() -> None:
    small = ["--runs", "1", "--least", "0", "--models", "--commands", "startup"]
    printed = benchmark("regressions", "HEAD", "HEAD", *small)
    assert re.search(r"a run of 20 images: seconds +\d.* -> +\d.* times as good", printed)
    assert re.search(r"\| \d+ \w+ \d{4} \| \w+\.\.\w+ \| .* \d\.\d\d \|", printed), "for history.md"
