"""Jobs on a store with codec=zstd, each as a command of its own.

A process that runs several of them has loaded the filter with the first one, and a job that does
not load what it needs would pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import Completed, run_featx
from tiny_model import COMMAND, write_images

import featx

pytestmark = pytest.mark.slow

Command = Callable[..., Completed]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with 21 images in two classes, and their store."""
    folder = tmp_path_factory.mktemp("commands")
    write_images(folder / "photos")
    run(folder, *COMMAND, "data=folder", "data.root=photos", "codec=zstd")
    return folder


@pytest.fixture
def command(made: Path, tmp_path: Path) -> Command:
    """`python -m featx ...` beside a copy of the images and their store."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return lambda *overrides: run(tmp_path, *overrides)


def run(folder: Path, *overrides: str) -> Completed:
    done = run_featx(folder, *overrides, path=[Path(__file__).parent.parent])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def rows_of(store: Path) -> np.ndarray:
    return np.asarray(featx.open(store)["conv"][:])


def flip_a_row(path: Path) -> None:
    with h5py.File(path) as file:
        address = file["features/conv"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[address + 20] ^= 1
    path.write_bytes(data)


def test_repair(command: Command, made: Path, tmp_path: Path) -> None:
    flip_a_row(tmp_path / "store/features.h5")
    code = ("model=custom", "model.factory=zoo:TwoStageConvNet")
    repaired = command("job=verify", "store=store", "verify.repair=true", *code)
    assert "The store is complete and sound." in repaired.stdout
    assert (rows_of(tmp_path / "store") == rows_of(made / "store")).all()


def test_resume(command: Command, made: Path, tmp_path: Path) -> None:
    options = (*COMMAND, "data=folder", "data.root=photos", "codec=zstd", "pack=false")
    command(*options, "out=parts")
    (tmp_path / "parts/parts/part-000002.h5").unlink()
    command(*options, "out=parts")
    assert (rows_of(tmp_path / "parts") == rows_of(made / "store")).all()


def test_export(command: Command, made: Path, tmp_path: Path) -> None:
    command("job=export", "store=store", "export.format=npy", "out=exported")
    [path] = (tmp_path / "exported").rglob("conv*.npy")
    exported = np.load(path)
    assert (exported == rows_of(made / "store")).all()


def test_report(command: Command, tmp_path: Path) -> None:
    command("job=report", "store=store")
    assert any(tmp_path.rglob("*.html"))


def test_probe(command: Command, tmp_path: Path) -> None:
    command("job=probe", "store=store")
    assert (tmp_path / "store/probe.json").exists()
