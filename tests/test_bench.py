"""scripts/benchmark bench: contenders do the whole work, ratios are those of one round."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from tiny_model import KEYS

from featx.config import Config, from_composed, from_keywords, saved_yaml


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    return importlib.import_module("benchmarks.bench")


def test_the_photos_are_ordinary_and_always_the_same(bench: ModuleType, tmp_path: Path) -> None:
    bench.make_photos(tmp_path / "a", 5)
    bench.make_photos(tmp_path / "b", 3)
    paths = sorted((tmp_path / "a").iterdir())
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (500, 375)
    assert len({path.read_bytes() for path in paths}) == 5
    assert all(20_000 < path.stat().st_size < 150_000 for path in paths)
    for path in sorted((tmp_path / "b").iterdir()):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_the_script_gives_the_rows_that_featx_gives(
    bench: ModuleType, photos: Path, tmp_path: Path
) -> None:
    contenders = bench.contenders
    node = from_keywords({**KEYS, "data": str(photos), "dtype": "float32", "decode": "reference"})
    config, text = from_composed(node), saved_yaml(node)
    places = [tmp_path / name for name in ("featx", "script")]
    for place in places:
        place.mkdir()
    ours = contenders.run_featx(config, text, places[0])
    theirs = contenders.run_tutorial(config, places[1])
    assert ours.images_per_second > 0 < theirs.images_per_second
    assert ours.images == theirs.images
    a, b = (np.load(place / contenders.FEATURES_FILE) for place in places)
    assert a.shape == b.shape
    assert a.shape[0] == sum(1 for path in photos.rglob("*.*") if path.is_file())
    assert np.allclose(a, b, atol=1e-5)
    assert contenders.smallest_cosine(*places) == pytest.approx(1)
    np.save(places[1] / contenders.FEATURES_FILE, b[:, :3])
    assert contenders.smallest_cosine(*places) is None
    stages = contenders.stages_alone(config, text)
    assert set(stages) == {"read", "decode", "model"}
    assert all(rate > 0 for rate in stages.values())


def test_ratios_are_of_one_round_and_the_slowest_stage_is_named(
    bench: ModuleType, tmp_path: Path
) -> None:
    contenders, measured = bench.contenders, bench.Measurement
    for name, rows in (("a", [[1.0, 0.0]]), ("b", [[1.0, 1.0]])):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / contenders.FEATURES_FILE, np.array(rows))
    config = Config()
    seconds = {"copy": 1.0, "write": 0.0}
    result = bench._result(
        config,
        {
            bench.SCRIPT: [measured(rate, 50) for rate in (10, 20, 10)],
            "featx": [measured(rate, 50, seconds) for rate in (30, 40, 60)],
        },
        {bench.SCRIPT: tmp_path / "a", "featx": tmp_path / "b"},
        {"read": 1000.0, "decode": 200.0, "model": 50.0},
    )
    row = result["contenders"]["featx"]
    assert (row["ratio"], row["ratio_spread"]) == (3, [2, 6])
    assert row["cosine"] == pytest.approx(2**-0.5)
    assert result["slowest_stage"] == "model"
    assert result["share_of_slowest_stage"] == 40 / 50
    assert result["stages_alone"]["copy"] == 50
    assert result["images"] == 50
    text = bench._text(result)
    assert "featx reaches 0.80 of its slowest stage alone (model)." in text
    assert "2.00 to 6.00" in text
