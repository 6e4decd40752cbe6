"""job=stats: against whole matrices, exact after any end and resume, also next to a store."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import math
import os
import random
import signal
import sys
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import slow_except
from interruptions import stopped_after
from made_store import make_spec, temporary_files
from PIL import Image
from processes import killed_at_sync, outcome, running
from tiny_engine import of_speed
from tiny_model import COMMAND, KEYS, MODEL, SIX_PARTS, extract, job_result, run_job, write_image

import featx
from featx.analysis.statistics import Statistics
from featx.analysis.statistics.part_moments import StatsLayer
from featx.config import StatsConfig
from featx.errors import (
    ConfigError,
    LayerError,
    NonFiniteError,
    ReduceError,
    StoreError,
    StoreLockedError,
    StoreMismatchError,
)
from featx.storage import exclusive_lock
from featx.types import LayerSpec, image_checksum

pytestmark = pytest.mark.usefixtures("in_tmp_path")

AUTO = {"batch_size": "auto", "part_rows": "auto", "precision": "auto", "compile": "auto"}


def take(data: object, **keys: Any) -> Statistics:
    """featx.stats with SIX_PARTS, where nothing else is given, of whole tensors."""
    by_position = keys.get("stats", {}).get("observation") == "position"
    has_reduce = by_position or isinstance(keys.get("layers"), dict)
    whole = {} if has_reduce else {"reduce": "flatten"}
    return featx.stats(**{**SIX_PARTS, **whole, "data": data, **keys})


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def matrix(store: featx.FeatureStore, layer: str, by_position: bool = False) -> np.ndarray:
    """(n, D) float64 of the ok rows; each place of a map (C, H, W) a row, where that is asked."""
    x = store[layer][:][store.ok].astype(np.float64)
    return np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) if by_position else x.reshape(len(x), -1)


# The numbers


def assert_moments_of(statistics: Statistics, layer: str, x: np.ndarray) -> None:
    """What numpy makes of the whole matrix."""
    moments = statistics[layer]
    assert moments.count == len(x)
    assert moments.smallest.tolist() == x.min(0).tolist()
    assert moments.largest.tolist() == x.max(0).tolist()
    scale = np.abs(x).max()
    np.testing.assert_allclose(moments.mean.numpy(), x.mean(0), atol=1e-13 * scale)
    near = {"rtol": 1e-11, "atol": 1e-12 * scale**2}
    if moments.kind == "full":
        np.testing.assert_allclose(moments.covariance().numpy(), np.cov(x, rowvar=False), **near)
        near["atol"] *= len(x)
        np.testing.assert_allclose(moments.second_moment.numpy(), x.T @ x, **near)
    np.testing.assert_allclose(moments.variance().numpy(), x.var(0, ddof=1), **near)


@pytest.mark.parametrize(
    ("keys", "stats"),
    [
        # Neither a part nor the data set ends with a whole batch.
        ({"layers": ["conv", "pool", "deep:input"], "batch_size": 3, "part_rows": 8}, {}),
        pytest.param(
            {"layers": ["conv", "deep"], "batch_size": 3, "part_rows": 8},
            {"observation": "position"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"layers": {"conv": "gem", "deep": "flatten"}},
            {"covariance": "diagonal"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"layers": {"conv": {"name": "grid", "size": 2}}},
            {"observation": "position"},
            marks=pytest.mark.slow,
        ),
        ({"layers": ["conv"], "capture": "grad_output", "target": "predicted"}, {}),
    ],
)
def test_equal_numpy_on_the_whole_matrix(
    photos: Path, keys: dict[str, Any], stats: dict[str, str]
) -> None:
    (photos / "cat" / "006.png").write_bytes(b"no image")
    store = extract(photos, out="store", dtype="float32", pack=False, **keys)
    statistics = take(photos, out="store", stats=stats, **keys)
    assert sorted(statistics) == sorted(store)
    for layer in store:
        assert_moments_of(
            statistics, layer, matrix(store, layer, stats.get("observation") == "position")
        )
        about = statistics.about(layer)
        assert about["row"] == stats.get("observation", "image")
        assert about["kind"] == stats.get("covariance", "full")
        assert math.prod(about["shape"]) == math.prod(store[layer].shape[1:])


@pytest.mark.parametrize("observation", slow_except(["image", "position"], "position"))
def test_a_finished_store_gives_the_bytes_of_a_run(photos: Path, observation: str) -> None:
    """Of the values, that is: the settings name the options of the store."""
    for name in ("cat/006.png", "dog/000.png"):
        (photos / name).write_bytes(b"no image")
    keys = {"layers": ["conv", "deep"], "max_failures": 2}
    store = extract(photos, out="store", dtype="float32", **keys)
    options = {"data": str(photos), "out": "images", "stats": {"observation": observation}}
    of_images = featx.stats(**{**KEYS, **options, **keys})
    of_rows = featx.stats(store=str(store.root), stats={"observation": observation})
    assert list(of_rows) == ["conv", "deep"]
    for layer in of_rows:
        assert of_rows[layer].sha256 == of_images[layer].sha256
        assert of_rows[layer].smallest.tolist() == of_images[layer].smallest.tolist()
        assert of_rows.about(layer)["shape"] == of_images.about(layer)["shape"]
    for key in ("num_failed", "weights_sha256", "transform", "model"):
        assert of_rows.attributes[key] == of_images.attributes[key]
    assert featx.frechet_distance(of_rows, of_images, "conv") < 1e-9
    with pytest.raises(StoreMismatchError, match=r"stats\.covariance: 'full', now 'diag"):
        featx.stats(store="store", stats={"observation": observation, "covariance": "diagonal"})
    again = featx.stats(store="store", layers=["deep"], overwrite=True)
    assert list(again) == ["deep"]


@pytest.mark.parametrize(("factory", "dim"), [("TwoStageConvNet", 8), ("OfOneSize", 512)])
def test_maps_of_unknown_channels_are_taken_as_a_whole_in_a_store_too(
    photos: Path, factory: str, dim: int
) -> None:
    """Maps with as many channels as rows and columns, which another input size would tell apart."""
    transform = {"resize": 64, "crop": 64}
    model = {**KEYS["model"], "factory": f"zoo:{factory}", "transform": transform}
    of_images = featx.stats(**{**KEYS, "model": model, "data": str(photos), "out": "images"})
    store = extract(photos, model=model, dtype="float32")
    assert store["conv"].shape[1:] == (8, 8, 8)
    of_rows = featx.stats(store="store")
    assert of_rows["conv"].dim == dim
    assert of_rows["conv"].sha256 == of_images["conv"].sha256
    unknown = pytest.raises(ReduceError, match=r"unknown\. Use stats\.observation=image\.")
    with unknown if dim == 512 else contextlib.nullcontext():
        featx.stats(store="store", stats={"observation": "position"}, overwrite=True)


@pytest.mark.parametrize("observation", ["image", "position"])
def test_maps_of_windows_have_known_channels(tmp_path: Path, observation: str) -> None:
    """8 channels of 4 x 2 positions of 32 x 16 pixels have the proportions of the image, too."""
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 16, 3), np.uint8)
        Image.fromarray(pixels).save(narrow / f"{number}.png")
    model = {**MODEL, "transform": {}, "window": {"size": 16}}
    store = extract(narrow, model=model, dtype="float32")
    assert store["conv"].shape[1:] == (8, 4, 2)
    found = featx.stats(store="store", stats={"observation": observation})["conv"]
    by_position = matrix(store, "conv", by_position=True)
    assert found.count == (5 if observation == "image" else len(by_position))
    np.testing.assert_allclose(found.mean.numpy(), by_position.mean(0), rtol=0, atol=1e-6)


def test_statistics_of_a_store_are_of_the_rows_it_has_now(photos: Path) -> None:
    image = photos / "cat" / "006.png"
    image.write_bytes(b"no image")

    def assert_current_after(message: str, **keys: Any) -> None:
        store = extract(photos, dtype="float32", **keys)
        with pytest.raises(StoreError, match=rf"{message}.* overwrite=true computes it again"):
            featx.stats(store="store", stats={"observation": "position"})
        again = featx.stats(store="store", stats={"observation": "position"}, overwrite=True)
        assert_moments_of(again, "conv", matrix(store, "conv", by_position=True))

    extract(photos, dtype="float32")
    featx.stats(store="store", stats={"observation": "position"})
    write_image(photos / "cat" / "000.png", 98)
    assert_current_after("other rows than", refresh=True)
    write_image(image, 99)
    assert_current_after("other rows than", retry_failed=True)
    write_image(photos / "cat" / "001.png", 97)
    assert_current_after("holds rows 0 to 21, expected 0 to 22", grow=True)


@pytest.mark.slow
def test_maps_are_averaged_over_positions_unless_reduce_says_otherwise(photos: Path) -> None:
    options = {**KEYS, "data": str(photos), "layers": ["conv", "pool"]}
    averaged = featx.stats(**options)
    reduced = featx.stats(**{**options, "out": "avg", "layers": {"conv": "avg", "pool": "none"}})
    assert averaged["conv"].dim == 8
    torch.testing.assert_close(averaged["conv"].mean, reduced["conv"].mean)
    torch.testing.assert_close(averaged["conv"].scatter, reduced["conv"].scatter)
    assert averaged["pool"].sha256 == reduced["pool"].sha256
    about = averaged.about("conv")
    assert (about["reduce"], about["shape"], about["averaged_from"]) == ("avg", [8], [8, 4, 4])
    assert averaged.about("pool")["averaged_from"] == [6, 1, 1]
    assert averaged["conv"].norms is not None  # of each position, before the mean
    assert featx.stats(**{**options, "out": "whole", "reduce": "flatten"})["conv"].dim == 128
    # A projection by these statistics applies the mean first.
    pca = {"name": "pca", "stats": "store", "k": 3}
    assert extract(photos, out="pca", reduce=pca, pack=False)["conv"].shape == (21, 3)


def test_leftovers_of_killed_statistics_of_a_store_are_cleared_away(photos: Path) -> None:
    store = extract(photos)
    leftover = store.root / ".tmp-stats.h5.1.2"
    for overwrite in (False, True):
        leftover.touch()
        featx.stats(store="store", overwrite=overwrite)
        assert not leftover.exists()


def test_rows_of_a_store_are_summed_as_they_are(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"reduce\.name has no effect with job=stats store"):
        featx.stats(store="store", reduce="avg")
    extract(photos, pack=False)
    next(Path("store/parts").glob("*.h5")).unlink()
    with pytest.raises(StoreError, match=r"job=status store=.*` says what is missing"):
        featx.stats(store="store")


def test_tokens_and_maps_with_channels_behind() -> None:
    options = StatsConfig(observation="position")
    tokens, behind, vector = (
        StatsLayer.of(make_spec(name, shape), options, (32, 32), None)
        for name, shape in (("tokens", (50, 7)), ("map", (4, 4, 7)), ("vector", (7,)))
    )
    assert [layer.positions for layer in (tokens, behind, vector)] == [50, 16, None]
    assert [layer.dim for layer in (tokens, behind, vector)] == [7, 7, 7]
    assert [layer.axis for layer in (tokens, behind, vector)] == [2, 3, None]

    def unreduced(shape: tuple[int, ...]) -> LayerSpec:
        return dataclasses.replace(make_spec("map", shape), reduce="none", reduce_args={})

    averaged = StatsLayer.of(unreduced((4, 4, 7)), StatsConfig(), (32, 32), None)
    assert (averaged.averaged, averaged.dim) == ((1, 2), 7)
    odd = StatsLayer.of(unreduced((3, 5, 7)), StatsConfig(), (32, 32), None)
    assert (odd.averaged, odd.dim) == ((), 105)  # which axis holds its channels is unknown


# Failures


def failures(path: str) -> list[list[str]]:
    with Path(path).open(newline="") as file:
        return list(csv.reader(file))[1:]


@pytest.mark.slow
def test_images_that_fail_are_left_out_and_listed_apart_from_a_store(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat/000.png", "dog/003.png"):
        (photos / name).write_bytes(b"no image")
    extract({"name": "folder", "root": str(photos), "limit": 10}, pack=False)
    before = sha256("store/failures.csv")
    summary = job_result("stats", **{**KEYS, "data": str(photos), "max_failures": 2})
    assert (summary["rows"], summary["failures"]) == (21, 2)
    assert summary["layers"]["conv"]["rows"] == 19
    listed = failures("store/stats-failures.csv")
    assert [row[1:3] for row in listed] == [
        ["cat/000.png", "unsupported"],
        ["dog/003.png", "unsupported"],
    ]
    assert [int(row[0]) for row in listed] == [0, 11]
    assert sha256("store/failures.csv") == before
    # The default allows one of a hundred; nothing is left to do, and they are counted all the same.
    assert run_job("stats", **{**KEYS, "data": str(photos)}) == 3
    printed = capsys.readouterr()
    assert "2 images failed:" in printed.err
    assert "stats-failures.csv" in printed.err
    assert "nothing was left to do" in printed.out


def test_no_image_can_be_read(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in photos.rglob("*.png"):
        path.write_bytes(b"no image")
    assert run_job("stats", **{**KEYS, "data": str(photos), "max_failures": 100}) == 3
    assert featx.open_stats("store")["conv"].count == 0
    assert "conv      0         8         -" in capsys.readouterr().out


@pytest.mark.slow
def test_values_that_are_not_finite_stop_the_run_or_are_left_out(photos: Path) -> None:
    model = {**MODEL, "args": {"poison": 0.02}}
    layers = ["conv", "pool"]
    with pytest.raises(NonFiniteError, match=r"layer pool, row \d+.*nonfinite=record") as error:
        take(photos, model=model, layers=layers)
    assert "dtype" not in str(error.value)  # which is none of the keys of job=stats
    store = extract(
        photos, model=model, layers=layers, nonfinite="record", dtype="float32", pack=False
    )
    statistics = take(photos, model=model, layers=layers, nonfinite="record", overwrite=True)
    assert 0 < store.ok.sum() < 21
    for layer in layers:
        assert_moments_of(statistics, layer, matrix(store, layer))
    assert len(failures("store/stats-failures.csv")) == 21 - store.ok.sum()


# Resume


def test_a_stopped_run_resumes_to_the_same_file(photos: Path) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    whole = take(photos, out="whole", layers=["conv", "pool"])
    for count, signum in ((3, signal.SIGTERM), (1, signal.SIGINT)):
        with stopped_after(count, signum) as stopped:
            take(photos, layers=["conv", "pool"])
        assert stopped.value.signum == signum
        assert not Path("store/stats.h5").exists()
        assert [row[1] for row in failures("store/stats-failures.csv")] == ["cat/000.png"]
    take(photos, layers=["conv", "pool"])
    assert_same_numbers("store", whole)
    files = set(os.listdir("store")) - {"stats-images.h5"}  # which knows images older than 2 s
    assert files == {".lock", "stats-failures.csv", "stats.h5"}


def assert_same_numbers(out: str, whole: Statistics) -> None:
    found = featx.open_stats(out)
    assert found.settings == whole.settings
    assert [found[name].sha256 for name in found] == [whole[name].sha256 for name in whole]


@pytest.mark.slow
def test_every_choice_is_taken_from_what_is_there(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The machine is a thousand times slower now, and a new probe would like bf16."""
    of_speed(monkeypatch, 3.0)
    whole = take(photos, out="whole", **AUTO)
    assert (whole.settings["batch_size"], whole.settings["part_rows"]) == (16, 16)
    with stopped_after(1):
        take(photos, **AUTO)
    # A store beside them has choices of its own.
    extract(photos, batch_size=2, part_rows=2, pack=False)
    of_speed(monkeypatch, 3000.0, in_bf16=1.0, cpu_batch=2)
    capfd.readouterr()
    take(photos, **AUTO)
    assert "fp32 (as the statistics were started)" in capfd.readouterr().err
    assert_same_numbers("store", whole)


@pytest.mark.slow
def test_a_resume_keeps_the_threads_of_the_statistics(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    torch.set_num_threads(2)
    with stopped_after(2):
        take(photos)
    torch.set_num_threads(1)
    capfd.readouterr()
    assert take(photos).attributes["threads"] == 2
    assert "2 threads (as the statistics were started; 1 here would give" in capfd.readouterr().err


@pytest.mark.slow
def test_other_settings_are_refused_with_the_difference(photos: Path) -> None:
    """Of unfinished statistics as well: test_moments.py."""
    take(photos)
    before = {path: path.read_bytes() for path in Path("store").rglob("*.h5")}
    changes = {
        "precision: 'fp32', now 'bf16'": {"precision": "bf16"},
        "stats.observation: 'image', now 'position'": {"stats": {"observation": "position"}},
        r"layers: \['conv'\], now \['deep'\]": {"layers": ["deep"]},
        "nonfinite: 'error', now 'record'": {"nonfinite": "record"},
        "listing: '21 rows, sha256 .*, now '9 rows": {
            "data": {"name": "folder", "root": str(photos), "limit": 9}
        },
    }
    for message, keys in changes.items():
        with pytest.raises(StoreMismatchError, match=message) as refused:
            take(**{"data": photos, **keys})
        assert refused.value.exit_code == 2
    assert {path: path.read_bytes() for path in Path("store").rglob("*.h5")} == before


@pytest.mark.slow
def test_a_store_and_statistics_in_one_folder_do_not_touch_each_other(photos: Path) -> None:
    extract(photos)
    store = {path: path.read_bytes() for path in files("store")}
    take(photos, layers=["pool"])
    take(photos, layers=["deep"], overwrite=True)
    assert {path: path.read_bytes() for path in store} == store
    ours = {path: path.read_bytes() for path in files("store") - set(store)}
    # States of images are kept once their files are some seconds old, as on a busy machine.
    names = {path.name for path in ours} - {"stats-images.h5"}
    assert names == {"stats.h5", "stats-failures.csv"}
    extract(photos, layers=["pool"], overwrite=True, pack=False)
    assert {path: path.read_bytes() for path in ours} == ours
    assert run_job("verify", out="store") == 0


def files(folder: str) -> set[Path]:
    return {p for p in Path(folder).rglob("*") if p.is_file() and p.name != ".lock"}


def test_leftovers_of_a_killed_process_are_cleared_away(photos: Path) -> None:
    leftovers = [Path("store/.tmp-stats.h5.1.2"), Path("store/stats-parts/.tmp-rows-1.h5.1.2")]
    for path in leftovers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    foreign = Path("store/.tmp-part-000000.h5.1.2")  # a store's, which is its own business
    foreign.touch()
    take(photos)
    assert foreign.exists()
    assert not any(path.exists() for path in leftovers)


def test_the_folder_is_locked_as_for_a_store(photos: Path) -> None:
    Path("store").mkdir()
    with exclusive_lock(Path("store/.lock")), pytest.raises(StoreLockedError):
        take(photos)
    Path("file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        take(photos, out="file")


def command(data: Path, out: str = "store") -> list[str]:
    """The command whose batches take at least 0.15 s."""
    overrides = [text for text in COMMAND if not text.startswith("out=")]
    return [
        sys.executable, "-m", "featx", "job=stats", *overrides, f"out={out}",
        "+model.args={pause_s: 0.15}", "data=folder", f"data.root={data}",
    ]  # fmt: skip


def in_another_folder(photos: Path, **keys: Any) -> str:
    """sha256 of the file that an uninterrupted run of the same keys makes there."""
    Path("once").mkdir()
    with chdir("once"):
        take(photos, **keys)
        return sha256("store/stats.h5")


KILLED = {"model": {**MODEL, "args": {"pause_s": 0.15}}, "reduce": "none"}
"""The keys of `command` beside SIX_PARTS."""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # as many as the other process, whatever ran before
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("name", ["stats.h5", "rows-", "stats-failures.csv"])
def test_killed_in_the_middle_of_a_file(photos: Path, name: str) -> None:
    """The next run deletes what is left of it."""
    code = f"""
        import featx, tiny_model, torch
        torch.set_num_threads(1)
        featx.stats(**{{**tiny_model.SIX_PARTS, "data": {str(photos)!r}}})
        """
    killed_at_sync(code, name)
    [leftover] = temporary_files(Path("store"))
    assert leftover.stat().st_size
    take(photos, reduce="none")
    assert temporary_files(Path("store")) == []
    assert sha256("store/stats.h5") == in_another_folder(photos, reduce="none")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_ended_at_random_moments_again_and_again(photos: Path, signum: signal.Signals) -> None:
    draw = random.Random(5)
    for _ in range(10):
        with running(command(photos)) as process:
            deadline = time.monotonic() + draw.uniform(0.3, 9.0)
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signum)
            code, printed, _ = outcome(process)
        assert code in (0, -signum, 128 + signum), printed
    take(photos, **KILLED)
    in_another_folder(photos, **KILLED)
    # The last command may have been the one that finished it: its config is spelt otherwise.
    assert_same_numbers("store", featx.open_stats("once/store"))


# Against others, and keys


@pytest.mark.slow
def test_the_distance_to_other_statistics_is_reported(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"name": "folder", "root": str(photos), "limit": 9}
    take(few, out="few", layers=["pool", "deep"], reduce="avg")
    mine = {**KEYS, "data": str(photos), "layers": ["deep", "conv"], "reduce": "avg"}
    found = job_result("stats", **mine, stats={"reference": "few"})["frechet"]
    assert found == {"deep": featx.frechet_distance("store", "few", "deep")}
    assert found["deep"] > 0
    assert run_job("stats", **mine, stats={"reference": "few/stats.h5"}) == 0
    assert f"Fréchet distance of deep: {found['deep']:.4g}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused_before_the_work(photos: Path) -> None:
    take(photos, out="other", layers=["deep"], stats={"covariance": "diagonal"})
    for keys, error, message in (
        ({"layers": ["conv"]}, ConfigError, "of deep, of none of conv"),
        ({"layers": ["deep"]}, ConfigError, "needs stats.covariance=full there"),
        ({"layers": ["deep"], "seed": 1}, StoreMismatchError, "weights_sha256"),
        ({"layers": ["deep"], "reduce": "avg"}, StoreMismatchError, "reduce: 'avg' and 'flatten'"),
    ):
        with pytest.raises(error, match=message):
            take(photos, **keys, stats={"reference": "other"})
    assert not Path("store").exists()


@pytest.mark.slow
def test_the_frechet_distance_is_that_of_the_extracted_matrices(photos: Path) -> None:
    few = {"name": "folder", "root": str(photos), "limit": 9}
    x = matrix(extract(photos, dtype="float32", layers=["pool"], pack=False), "pool")
    a = take(photos, out="all", layers=["pool"])
    take(few, out="few", layers=["pool"])
    found = featx.frechet_distance(a, "few")
    one, other = np.cov(x, rowvar=False), np.cov(x[:9], rowvar=False)
    # The eigenvalues of a product of covariances are real and not negative.
    root_trace = np.sqrt(np.linalg.eigvals(one @ other).real.clip(0)).sum()
    shift = np.square(x.mean(0) - x[:9].mean(0)).sum()
    expected = shift + np.trace(one) + np.trace(other) - 2 * root_trace
    assert found == pytest.approx(expected, rel=1e-6)
    assert featx.frechet_distance(Path("few/stats.h5"), "all", "pool") == pytest.approx(found)
    assert featx.frechet_distance("all", a) == pytest.approx(0, abs=1e-10)


@pytest.mark.slow
def test_a_frechet_distance_that_cannot_be_computed(photos: Path) -> None:
    take(photos, out="two", layers=["pool", "conv"], reduce="flatten")
    take(photos, out="deep", layers=["deep"])
    take(photos, out="pool", layers=["pool"], reduce="avg")
    take(photos, out="diagonal", layers=["pool"], reduce="avg", stats={"covariance": "diagonal"})
    with pytest.raises(ConfigError, match=r"name the layer: .* in common: pool, conv"):
        featx.frechet_distance("two", "two")
    with pytest.raises(ConfigError, match="in common: none"):
        featx.frechet_distance("two", "deep")
    with pytest.raises(LayerError, match="no statistics of 'pool'"):
        featx.frechet_distance("two", "deep", "pool")
    with pytest.raises(StoreMismatchError, match="reduce: 'flatten' and 'avg'"):
        featx.frechet_distance("two", "pool")
    other_args = {**KEYS["model"], "args": {"poison": 1e9}}  # the weights are the same
    take(photos, out="args", layers=["pool"], reduce="avg", model=other_args)
    with pytest.raises(StoreMismatchError, match=r"model\.args"):
        featx.frechet_distance("pool", "args")
    with pytest.raises(StoreMismatchError, match=r"model\.args"):
        take(photos, layers=["pool"], reduce="avg", model=other_args, stats={"reference": "pool"})
    with pytest.raises(ConfigError, match=r"only its diagonal was kept.*stats\.covariance=full"):
        featx.frechet_distance("pool", "diagonal")
    with pytest.raises(StoreError, match="no statistics file nowhere"):
        featx.frechet_distance("pool", "nowhere")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"store": "x"}, "has no effect with job=stats store=x"),
        (
            {"stats": {"observation": "pixel"}},
            "stats.observation=pixel: expected one of image, position",
        ),
        (
            {"stats": {"covariance": "half"}},
            "stats.covariance=half: expected one of full, diagonal",
        ),
        (
            {"stats": {"covariance": "diagonal", "reference": "x"}},
            "stats.reference needs covariances",
        ),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take("photos", **keys)


def test_positions_need_a_layer_that_has_them(photos: Path) -> None:
    with pytest.raises(ConfigError, match="the rows of these layers are vectors"):
        take(photos, layers=["head"], stats={"observation": "position"})
    assert not Path("store").exists()


# Images that changed


def change(path: Path) -> None:
    write_image(path, 1000)


def test_a_changed_image_is_refused_and_refreshed(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = sorted(photos.rglob("*.png"))[3]
    before = take(photos)
    with h5py.File(before.path) as file:
        kept = file["image_checksum"][3]
    assert kept == image_checksum(path.read_bytes())
    change(path)
    with pytest.raises(
        StoreMismatchError, match=r"1 image has changed since .*stats\.h5 was .*cat/"
    ):
        take(photos)
    after = take(photos, refresh=True)
    assert "1 image has changed since the statistics were taken" in capfd.readouterr().err
    assert_same_numbers("store", take(photos, out="fresh"))
    assert take(photos).attributes == after.attributes


@pytest.mark.slow
def test_a_resume_refuses_changed_images(photos: Path) -> None:
    with stopped_after(3):
        take(photos)
    change(sorted(photos.rglob("*.png"))[9])
    with pytest.raises(StoreMismatchError, match="1 image has changed"):
        take(photos)
    take(photos, refresh=True)
    assert_same_numbers("store", take(photos, out="fresh"))


@pytest.mark.slow
def test_touched_and_mended_images_are_no_changes(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = sorted(photos.rglob("*.png"))
    sound = paths[5].read_bytes()
    paths[5].write_bytes(sound[:50])
    before = sha256(str(take(photos, max_failures=5).path))
    paths[2].touch()
    paths[5].write_bytes(sound)
    assert sha256(str(take(photos, max_failures=5).path)) == before
    assert "1 failed image has changed since: refresh=true" in capfd.readouterr().err
    assert take(photos, max_failures=5, refresh=True).attributes["num_failed"] == 0
