"""The commands of docs/tutorial-cluster.md for Slurm and a bucket, on a real cluster and server."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import rows_of, upload
from seaweed import SeaweedServer, bucket_on_seaweed
from slurm_cluster import SlurmCluster, running_cluster

import featx

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("in_tmp_path"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial-cluster.md"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A cluster; the environment leads to it."""
    with running_cluster(tmp_path / "slurm") as running:
        running.set_environment(monkeypatch)
        yield running


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    with bucket_on_seaweed(tmp_path / "seaweed", monkeypatch) as running:
        yield running


def command(piece: str) -> list[str]:
    """The words of the command of the page that contains a text."""
    lines = re.findall(r"^    (python -m featx .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    found = [line for line in lines if piece in line]
    assert len(found) == 1, f"{piece} is in {len(found)} commands"
    return [sys.executable, *shlex.split(found[0])[1:]]


def run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_commands_give_the_same_rows(
    tmp_path: Path, cluster: SlurmCluster, server: SeaweedServer
) -> None:
    pytest.importorskip("conformal_clip_data", reason="the images come with featx[demo]")
    page = PAGE.read_text(encoding="utf-8")
    write_shards = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0]
    exec(write_shards, {})
    run(command("out=runs/slurm executor=slurm executor.mode=local"))
    store = featx.open("runs/slurm")
    assert len(store) == 48
    run([*command("out=runs/cluster"), "executor.cpus=1"])
    assert rows_of(featx.open("runs/cluster")) == rows_of(store)
    upload(Path("shards"), "s3://bucket/train")
    # This cluster has two nodes without GPUs.
    here = {
        "executor.workers": "2",
        "executor.cpus": "1",
        "executor.partition": "main",
        "executor.folder": str(tmp_path / "jobs"),
    }
    words = [word for word in command("out=s3://bucket/run-of-nodes") if "gres" not in word]
    run([f"{key}={here[key]}" if (key := word.partition("=")[0]) in here else word
         for word in words])  # fmt: skip
    assert rows_of(featx.open("s3://bucket/run-of-nodes")) == rows_of(store)
