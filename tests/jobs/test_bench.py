"""job=bench: every contender does the whole work, and the ratios are those of one round."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_model import COMMAND, KEYS, run_job

from featx import jobs
from featx.config import BenchConfig, Config, JobConfig, from_keywords, from_omegaconf, saved_yaml
from featx.errors import ConfigError
from featx.jobs import bench
from featx.jobs.bench import contenders
from featx.jobs.bench.contenders import Measurement
from featx.jobs.bench.photos import make_photos


def test_the_photos_are_ordinary_and_always_the_same(tmp_path: Path) -> None:
    make_photos(tmp_path / "a", 5)
    make_photos(tmp_path / "b", 3)
    paths = sorted((tmp_path / "a").iterdir())
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (500, 375)
    assert len({path.read_bytes() for path in paths}) == 5
    assert all(20_000 < path.stat().st_size < 150_000 for path in paths)
    for path in sorted((tmp_path / "b").iterdir()):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_the_script_gives_the_rows_that_featx_gives(photos: Path, tmp_path: Path) -> None:
    node = from_keywords({**KEYS, "data": str(photos), "dtype": "float32", "decode": "reference"})
    config, text = from_omegaconf(node), saved_yaml(node)
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


def test_ratios_are_of_one_round_and_the_slowest_stage_is_named(tmp_path: Path) -> None:
    for name, rows in (("a", [[1.0, 0.0]]), ("b", [[1.0, 1.0]])):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / contenders.FEATURES_FILE, np.array(rows))
    # The folder has fewer images than were asked for.
    config = Config(job=JobConfig("bench"), bench=BenchConfig(num_images=100, runs=3))
    seconds = {"copy": 1.0, "write": 0.0}
    result = bench._result(
        config,
        {
            bench.SCRIPT: [Measurement(rate, 50) for rate in (10, 20, 10)],
            "featx": [Measurement(rate, 50, seconds) for rate in (30, 40, 60)],
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


def test_keys_of_bench_alone() -> None:
    with pytest.raises(ConfigError, match=r"bench\.runs has an effect with job=bench only"):
        jobs.check(from_omegaconf(from_keywords({"bench": {"runs": 2}})))
    with pytest.raises(ConfigError, match=r"bench\.runs=0"):
        BenchConfig(runs=0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "hdf5", "root": "x.h5", "dataset": "/x"}, "data=hdf5: job=bench reads files"),
        ({"name": "folder", "root": ".", "boxes": "boxes.csv"}, "whole images"),
    ],
)
def test_images_that_the_script_could_not_read_are_refused(
    data: dict[str, str], message: str
) -> None:
    keys = {key: value for key, value in KEYS.items() if key != "out"}
    with pytest.raises(ConfigError, match=message):
        run_job("bench", **{**keys, "data": data})


def test_gradients_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="job=bench captures no gradients"):
        run_job("bench", capture="grad_output", layers=["conv"])


@pytest.mark.slow
def test_the_command(featx: Any, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    options = [option for option in COMMAND if not option.startswith("out=")]
    done = featx(
        "job=bench", "job.json=true", *options, "data=folder", f"data.root={photos}",
        "bench.num_images=6", "bench.runs=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["contenders"]) == {
        bench.SCRIPT,
        "featx",
        "featx precision=fp32",
        "featx precision=fp32 compile=true",
    }
