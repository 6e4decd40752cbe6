"""What a terminal shows while somebody waits, and what is refused or answered before a run."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_featx, with_path
from tiny_model import COMMAND, KEYS, write_images

import featx
from featx.__main__ import run_command
from featx.cli import job_help_text, read_command_line, sweep_of
from featx.config import make_reduce
from featx.errors import ConfigError
from featx.jobs import JOBS
from featx.layers import RowLayout, reduction
from featx.types import Listing

TESTS = Path(__file__).parent


def read_until(descriptor: int, text: str, seconds: float = 120) -> str:
    """Read a terminal until a text has come."""
    shown, end = "", time.monotonic() + seconds
    while text not in shown and time.monotonic() < end:
        if select.select([descriptor], [], [], 1)[0]:
            try:
                shown += os.read(descriptor, 4096).decode(errors="replace")
            except OSError:  # the process has ended
                break
    return shown


def test_a_terminal_shows_the_steps_and_what_is_kept_after_ctrl_c(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 6)
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "featx", *COMMAND, "data=./photos"],
        cwd=tmp_path,
        env=with_path(TESTS),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = read_until(ours, "importing PyTorch")
    run.send_signal(signal.SIGINT)
    shown += read_until(ours, "no such text")
    assert run.wait(60) == 130
    os.close(ours)
    for step in ("listing the images of", "6 images listed", "importing PyTorch"):
        assert step in shown
    # The second text stands where the signal comes within the import.
    texts = ("nothing was written yet", "the same command resumes after the last complete part")
    assert any(f"stopped; {text}." in shown for text in texts)


@pytest.mark.slow
def test_a_sweep_names_its_runs_and_ends_with_a_table(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 6)
    sweep = ("data=./photos", "layers=[conv],[nothing]")
    arguments = [text for text in COMMAND if not text.startswith(("layers=", "out="))]
    sweep += ("dtype=float16,float32",)
    done = run_featx(tmp_path, "-m", *arguments, *sweep, path=[TESTS])
    assert "[1 of 4] layers=[conv] dtype=float16" in done.stderr
    assert "[4 of 4] " in done.stderr
    table = done.stderr[done.stderr.rindex("exit code") :]
    # The default of `out` has its name, and the columns say what that store has.
    lines = [line.split() for line in table.splitlines()]
    first = next(words for words in lines if words[:2] == ["layers=[conv]", "dtype=float16"])
    assert (first[2:5], first[-1]) == (["0", "6", "0"], "runs/photos/custom")
    assert "layers=[conv] dtype=float32" in table
    assert done.returncode == 2
    assert sum(" 6 " in line for line in table.splitlines()) >= 1


def test_null_in_a_sweep_is_null() -> None:
    line = read_command_line(["-m", "model.weights=null,default", "model=resnet18,resnet34"])
    assert 'model.weights=null,"default"' in line.arguments
    assert sweep_of(line) == (4, {"model.weights", "model"})


def test_a_sweep_of_a_file_names_and_counts_its_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "two.yaml").write_text(
        "# @package _global_\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {store: 'a,b'}}}\njob: {name: status}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["featx", "experiment=two"])
    assert run_command() == 2
    assert re.findall(r"\[.*", capsys.readouterr().err) == ["[1 of 2] store=a", "[2 of 2] store=b"]
    monkeypatch.setattr("sys.argv", ["featx", "-m", "experiment=two", "store=c,d,e"])
    assert run_command() == 2
    assert "[3 of 3] store=e" in capsys.readouterr().err


def test_a_sweep_over_a_pattern_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "featx",
            "-m",
            "job=models",
            "models.query=resnet18",
            "experiment=glob([web_images,exact])",
        ],
    )
    assert run_command() == 0
    assert "[2 of 2] experiment=web_images" in capsys.readouterr().err


def test_a_sweep_shows_values_as_they_were_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["featx", "-m", "job=status", 'store=["a,b"],"a,c"'])
    assert run_command() == 2
    shown = capsys.readouterr().err
    assert '[1 of 2] store=["a,b"]\n' in shown
    assert "[2 of 2] store=a,c\n" in shown


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--watch", "status.watch=true"),
        ("--limit=3", "data.limit=3"),
        ("--out=x", "key=value, without dashes: out=x"),
        ("--repair", "verify.repair=true"),
    ],
)
def test_a_flag_is_answered_with_the_option(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_command_line([typed])
    assert answer in str(caught.value)


def test_the_help_of_a_job_has_its_options_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = job_help_text(JOBS.get("probe"), JOBS.get("probe").may_read)
    assert "probe.method=" in text
    assert "\n  store=" in text
    assert "export.format" not in text
    assert "model.weights" not in text
    monkeypatch.setattr(sys, "argv", ["featx", "job=probe", "--help"])
    assert run_command() == 0
    assert capsys.readouterr().out.strip() == text.strip()


def test_a_sample_is_spread_over_classes() -> None:
    labels = np.array([0] * 50 + [1] * 3 + [2] * 47)
    keys = np.array([b"%03d" % row for row in range(100)])
    taken = Listing(keys, labels, ("a", "b", "c")).sample(13)
    assert np.bincount(taken.labels).tolist() == [5, 3, 5]
    assert (taken.keys[1:] > taken.keys[:-1]).all()
    assert taken.keys[0] == b"000"
    assert len(Listing(keys, labels, ("a", "b", "c")).sample(500)) == 100


def test_a_limit_says_of_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "photos", 6)
    keys = {**KEYS, "out": tmp_path / "a"}
    featx.extract(tmp_path / "photos", data_limit=2, **keys)  # type: ignore[arg-type, call-arg]
    assert "4 of 6 images by data.limit=2" in " ".join(capsys.readouterr().err.split())
    keys["out"] = tmp_path / "b"
    store = featx.extract(tmp_path / "photos", data_sample=2, **keys)  # type: ignore[arg-type, call-arg]
    assert sorted(store.labels.tolist()) == [0, 1]
    with pytest.raises(ConfigError, match="give one"):
        featx.extract({"root": "x", "limit": 1, "sample": 1})


@pytest.mark.parametrize("name", ["avg", "max", "gem"])
def test_pooling_leaves_a_vector_as_it_is(name: str) -> None:
    vectors = torch.tensor([[-1.0, 0.0, 2.0]])
    pooled = reduction(make_reduce(name), RowLayout("head", (3,), (32, 32)))(vectors)
    assert torch.equal(pooled, vectors)


@pytest.mark.slow
def test_a_plan_of_what_cannot_be_read_ends_otherwise(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for i in range(3):
        (tmp_path / "photos" / f"{i}.png").write_bytes(b"no image")
    done = run_featx(tmp_path, *COMMAND, "data=./photos", "job=plan", path=[TESTS])
    assert done.returncode == 1
    assert "runs it" not in done.stdout
    assert "none of the images tried can be read" in done.stdout
