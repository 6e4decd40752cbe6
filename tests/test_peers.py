"""scripts/benchmark peers: contenders do the whole work, on photographs that never change."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from tiny_model import KEYS

from featx.config import from_composed, from_keywords, saved_yaml


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    return importlib.import_module("benchmarks.peers")


def test_the_photos_are_ordinary_and_always_the_same(peers: ModuleType, tmp_path: Path) -> None:
    peers.make_photos(tmp_path / "a", 5)
    peers.make_photos(tmp_path / "b", 3)
    paths = sorted((tmp_path / "a").iterdir())
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (500, 375)
    assert len({path.read_bytes() for path in paths}) == 5
    assert all(20_000 < path.stat().st_size < 150_000 for path in paths)
    for path in sorted((tmp_path / "b").iterdir()):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_the_script_gives_the_rows_that_featx_gives(
    peers: ModuleType, photos: Path, tmp_path: Path
) -> None:
    node = from_keywords({**KEYS, "data": str(photos), "dtype": "float32", "decode": "reference"})
    config, text = from_composed(node), saved_yaml(node)
    folders = [tmp_path / name for name in ("featx", "script")]
    for folder in folders:
        folder.mkdir()
    assert peers.run_featx(config, text, folders[0]) > 0
    [layer] = config.layers
    assert peers.run_script(config, layer, folders[1]) > 0
    ours, script = (np.load(folder / peers.FEATURES_FILE) for folder in folders)
    assert len(ours) == sum(1 for path in photos.rglob("*.*") if path.is_file())
    assert np.allclose(ours.reshape(script.shape), script, atol=1e-5)
    assert peers.smallest_cosine(ours, script) == pytest.approx(1)
