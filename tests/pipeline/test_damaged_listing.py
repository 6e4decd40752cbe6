"""A bit flips in samples.h5 before the store is finished: the listing found now takes its place."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import featx as package
from featx.storage import AtomicFolder

Command = Callable[..., subprocess.CompletedProcess[str]]


def stored(featx: Command, photos: Path) -> list[str]:
    """Arguments of a command that has made a store with parts."""
    arguments = ["model=mobilenet_v3_small", "model.weights=null", "data=folder",
                 f"data.root={photos}", "out=run", "part_rows=4", "batch_size=4", "precision=fp32",
                 "pack=false", "device=cpu"]  # fmt: skip
    done = featx(*arguments)
    assert done.returncode == 0, done.stderr
    return arguments


def damage(root: Path, name: str) -> None:
    """Remove the last part of a store, and flip a bit of a dataset of its listing."""
    AtomicFolder(root).remove(sorted((root / "parts").iterdir())[-1])
    path = root / "samples.h5"
    with h5py.File(path) as file:
        at = file[name].id.get_offset()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["key", "label", "classes"])
def test_the_same_command_resumes(featx: Command, photos: Path, tmp_path: Path, name: str) -> None:
    arguments = stored(featx, photos)
    root = tmp_path / "run"
    expected = package.open(root)
    keys, labels, classes = expected.keys, expected.labels, expected.classes
    features = expected["embedding"][:]
    damage(root, name)
    done = featx(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"samples.h5 is not valid: its dataset /{name}" in done.stderr
    assert "It was written again" in done.stderr
    assert "Traceback" not in done.stderr
    store = package.open(root)
    assert store.complete
    assert (store.keys == keys).all()
    assert (store.labels == labels).all()
    assert store.classes == classes
    np.testing.assert_array_equal(store["embedding"][:], features)


@pytest.mark.slow
def test_another_data_set_is_not_taken_for_it(featx: Command, photos: Path, tmp_path: Path) -> None:
    arguments = stored(featx, photos)
    damage(tmp_path / "run", "key")
    sorted(photos.rglob("*.*"))[0].unlink()
    done = featx(*arguments)
    assert done.returncode == 2
    assert "samples.h5 is damaged" in done.stderr
    assert "Traceback" not in done.stderr
