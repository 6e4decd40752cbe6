"""The commands of two pages of docs/ for Slurm and a bucket, on a real cluster and server."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from object_server import rows_of, upload
from seaweed import SeaweedServer
from slurm_cluster import SlurmCluster

import featx

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("in_tmp_path"),
]

pytest_plugins = ["seaweed_fixtures", "slurm_fixtures"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "tutorial-cluster.md"


def command(piece: str, page: Path = PAGE) -> list[str]:
    """The words of the command of a page that contains a text."""
    lines = re.findall(r"^    (python -m featx .*)$", page.read_text(encoding="utf-8"), re.M)
    found = [line for line in lines if piece in line]
    assert len(found) == 1, f"{piece} is in {len(found)} commands"
    return [sys.executable, *shlex.split(found[0])[1:]]


def run(words: list[str]) -> str:
    """What a command prints that succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def here(words: list[str], folder: Path) -> list[str]:
    """A command of a page on this cluster, which has two nodes of two CPUs without GPUs."""
    given = {
        "executor.workers": "2",
        "executor.cpus": "1",
        "executor.sbatch": "{partition: main}",
        "executor.folder": str(folder),
    }
    return [
        f"{key}={given[key]}" if (key := word.partition("=")[0]) in given else word
        for word in words
    ]


@pytest.fixture
def shards() -> Path:
    """The shards that the tutorial writes."""
    pytest.importorskip("conformal_clip_data", reason="the images come with featx[demo]")
    page = PAGE.read_text(encoding="utf-8")
    exec(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0], {})
    return Path("shards")


def test_the_commands_give_the_same_rows(
    tmp_path: Path, shards: Path, cluster: SlurmCluster, server: SeaweedServer
) -> None:
    run(command("out=runs/slurm executor=slurm executor.mode=local"))
    store = featx.open("runs/slurm")
    assert len(store) == 48
    run([*command("out=runs/cluster"), "executor.cpus=1"])
    assert rows_of(featx.open("runs/cluster")) == rows_of(store)
    upload(shards, "s3://bucket/train")
    run(here(command("out=s3://bucket/run-of-nodes"), tmp_path / "jobs"))
    assert rows_of(featx.open("s3://bucket/run-of-nodes")) == rows_of(store)


def test_the_first_section_of_scaling_is_complete(
    tmp_path: Path, shards: Path, cluster: SlurmCluster, server: SeaweedServer
) -> None:
    """From a bucket into a bucket, with Slurm."""
    page = DOCS / "scaling.md"
    local = ("executor=slurm", "executor.mode=local", "executor.workers=2", "executor.cpus=1")
    data = ("data=webdataset", f"data.root={shards}", "out=reference")
    run([sys.executable, "-m", "featx", *data, *local])
    upload(shards, "s3://bucket/train")
    run(command("job=plan", page))
    run(here(command("out=s3://bucket/features executor=slurm", page), tmp_path / "jobs"))
    assert "48 of 48" in run(command("job=status store=s3://bucket/features", page))
    run(command("job=verify store=s3://bucket/features", page))
    store = featx.open("s3://bucket/features")
    assert rows_of(store) == rows_of(featx.open("reference"))
    features, labels = store.xy("embedding")
    assert len(features) == len(labels) == 48
    assert not list((tmp_path / "jobs").iterdir())
