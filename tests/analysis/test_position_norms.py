"""Norms of tokens, of rows and in job=stats: against numpy, by hand, in any order of the work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from made_store import make_run, make_spec
from PIL import Image
from tiny_model import KEYS, MODEL, extract, job_result, run_job

import featx
from featx.analysis.statistics import Statistics, token_norms
from featx.analysis.statistics.moments import EDGES, PositionNorms
from featx.analysis.statistics.part_moments import PartNorms, StatsLayer, norms_summary
from featx.base import WIDTH
from featx.types import Part, TokenGeometry

pytestmark = pytest.mark.usefixtures("in_tmp_path")

PLACES = TokenGeometry(3, True, (4, 5), (64, 80))
ROWS = np.arange(10)
PATCHES = {**MODEL, "name": "patches", "factory": "zoo:PatchColours"}


def layer_of(shape: tuple[int, ...], places: TokenGeometry = PLACES) -> StatsLayer:
    return StatsLayer(make_spec("x", shape), "diagonal", tokens=places)


def norms_of(
    values: np.ndarray, cuts: Sequence[int] = (), failed: Sequence[int] = (), batch: int = 4
) -> PositionNorms:
    """Norms of rows in parts [0, cut), [cut, ...), ..., each in batches with padding."""
    edges, found = [0, *cuts, len(values)], None
    layer = layer_of(
        values.shape[1:], PLACES if values.ndim == 3 else replace(PLACES, prefix_tokens=0)
    )
    for index, (start, stop) in enumerate(itertools.pairwise(edges)):
        part = PartNorms(Part(index, start, stop), layer)
        for first in range(start, stop, batch):
            count = min(batch, stop - first)
            padded = np.full((batch, *values.shape[1:]), 7, np.float32)
            padded[:count] = values[first : first + count]
            inside = [row for row in failed if first <= row < first + count]
            part.add(first, torch.from_numpy(padded), count, inside)
        norms = part.finish()
        found = norms if found is None else found.merge(norms)
    assert found is not None
    return found


def made(num_rows: int = 40) -> np.ndarray:
    """Tokens with a large class token, and one patch that is an outlier in some images."""
    values = np.random.default_rng(0).normal(size=(num_rows, 23, 6)) + 2
    values[:, 0] *= 20
    values[4:16, 3 + 7] *= 40
    return values.astype(np.float32)


@pytest.mark.parametrize("axis", [2, 1, 3])
def test_norms_are_those_of_numpy(axis: int) -> None:
    values, prefix = made(), 3
    if axis != 2:
        patches = values[:, 3:].reshape(-1, 4, 5, 6)
        values, prefix = (patches.transpose(0, 3, 1, 2) if axis == 1 else patches), 0
    found = norms_of(values, failed=[5, 17])
    kept = np.delete(values, [5, 17], 0).astype(np.float64)
    norms = np.linalg.norm(kept, axis=axis).reshape(len(kept), -1)
    moments = found.positions
    assert moments.count == 38
    assert moments.mean.numpy() == pytest.approx(norms.mean(0), rel=1e-12)
    assert moments.std(0).numpy() == pytest.approx(norms.std(0), rel=1e-9)
    assert moments.largest.numpy() == pytest.approx(norms.max(0), rel=1e-12)
    patches = norms[:, prefix:].ravel()
    expected = np.histogram(patches, [0, *EDGES, np.inf])[0]
    assert np.array_equal(found.histogram, expected)
    for share in (0.25, 0.5, 0.75, 0.99):
        exact = np.quantile(patches, share, method="inverted_cdf")
        assert exact <= found.quantile(share) <= exact * 2 ** (1 / 64)
    low, high = (found.quantile(share) for share in (0.25, 0.75))
    fence = high + 3 * (high - low)
    assert fence <= found.threshold <= fence * 2 ** (1 / 64)
    assert found.outliers == (patches >= found.threshold).sum() == 11
    about = norms_summary(found)
    assert about is not None
    assert about["share"] == 11 / patches.size
    assert about["largest"] == pytest.approx(patches.max())
    assert (about["largest_mean"]["row"], about["largest_mean"]["column"]) == (2, 3)
    assert len(about["prefix"]) == prefix
    if prefix:
        assert about["prefix"][0]["mean"] == pytest.approx(norms[:, 0].mean())
        assert about["prefix"][0]["std"] == pytest.approx(norms[:, 0].std())


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_batches_change_no_bit_and_parts_no_count(batch: int) -> None:
    whole, found = norms_of(made()), norms_of(made(), batch=batch)
    parts = norms_of(made(), (16, 32), batch=batch)
    for name in ("mean", "scatter", "smallest", "largest"):
        expected = getattr(whole.positions, name)
        assert torch.equal(getattr(found.positions, name), expected)
        assert torch.allclose(getattr(parts.positions, name), expected, rtol=1e-12)
    assert np.array_equal(whole.histogram, found.histogram)
    assert np.array_equal(whole.histogram, parts.histogram)


def test_ends_of_the_histogram() -> None:
    values = np.zeros((3, 23, 6), np.float32)
    values[1] = 1e-20
    values[2] = 3e30
    found = norms_of(values)
    assert (found.histogram[0], found.histogram[-1]) == (40, 20)
    assert found.quantile(0.5) == EDGES[0]
    assert found.quantile(1) == EDGES[-1]
    equal = norms_of(np.ones((4, 23, 6), np.float32))
    assert equal.outliers == 0
    about = norms_summary(equal)
    assert about is not None
    assert about["median"] == about["p99"] == about["largest"] == pytest.approx(6**0.5)
    none = PartNorms(Part(0, 0, 2), layer_of((23, 6)))
    none.add(0, torch.zeros(2, 23, 6), 2, [0, 1])
    assert norms_summary(none.finish()) is None


def images(count: int) -> None:
    Path("photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"photos/{i:03d}.png")


def take(**keys: Any) -> Statistics:
    options = {**KEYS, "model": PATCHES, "layers": ["tokens"], "reduce": "none", **keys}
    return featx.stats(data="photos", stats={"covariance": "diagonal"}, **options)


def test_norms_below_the_histogram_have_no_quantiles(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(8, shapes={"x": (23, 6)})
    run = replace(run, features={"x": 1e-9 * run.features["x"]}, tokens={"x": PLACES})
    run.identified().write(Path("store"), packed=True)
    assert run_job("stats", store="store") == 0
    line = capsys.readouterr().out.split("prefix tokens\n")[1].splitlines()[0].split()
    largest = np.linalg.norm(run.features["x"][:, 3:].astype(np.float64), axis=2).max()
    assert line[:9] == ["x", "4", "x", "5", "-", "-", f"{largest:.4g}", "-", "-"]


@pytest.mark.slow
def test_the_job_writes_and_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    images(10)
    data = {"name": "folder", "root": "photos"}
    keys = {**KEYS, "model": PATCHES, "layers": ["tokens", "maps"], "data": data}
    given = {"reduce": {"name": "none"}, "stats": {"covariance": "diagonal"}}
    assert run_job("stats", **keys, **given) == 0
    out = capsys.readouterr().out
    assert "share of" in out
    assert "prefix tokens" in out
    assert all(len(line) <= WIDTH for line in out.splitlines())
    store = extract("photos", model=PATCHES, layers={"tokens": "none", "maps": "none"}, out="other")
    for layer, prefix in (("tokens", 2), ("maps", 0)):
        norms, expected = featx.open_stats("store")[layer].norms, token_norms(store, layer, ROWS)
        assert norms is not None
        assert expected is not None
        about = norms_summary(norms)
        assert about is not None
        assert about["grid"] == [8, 8]
        assert about["median"] == pytest.approx(expected.quantiles[2], rel=0.02)
        assert about["largest"] == pytest.approx(expected.quantiles[5], rel=1e-3)
        assert len(about["prefix"]) == prefix
        assert f"{about['largest']:.4g}" in out
    by_hand = np.linalg.norm(store["maps"][:].astype(np.float64), axis=1).reshape(10, -1)
    assert norms.positions.mean.numpy() == pytest.approx(by_hand.mean(0), rel=1e-3)


def test_runs_with_other_batches_have_the_same_numbers() -> None:
    images(10)
    take(out="whole")
    take(out="again", batch_size=3)
    with h5py.File("whole/stats.h5") as file, h5py.File("again/stats.h5") as other:
        group, same = file["layers/tokens/norms"], other["layers/tokens/norms"]
        assert set(group) == {"mean", "scatter", "smallest", "largest", "histogram"}
        assert all(np.array_equal(group[name][()], same[name][()]) for name in group)
        assert group.attrs["prefix_tokens"] == same.attrs["prefix_tokens"] == 2
        assert group["histogram"][()].sum() == 10 * 64


def test_tokens_of_unknown_places_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    images(4)
    model = {**PATCHES, "factory": "zoo:PatchColoursWithoutPrefix"}
    data = {"name": "folder", "root": "photos"}
    keys = {**KEYS, "model": model, "layers": ["tokens", "maps"], "data": data}
    given = {"reduce": {"name": "none"}, "stats": {"covariance": "diagonal"}}
    assert run_job("stats", **keys, **given) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= WIDTH for line in out.splitlines())
    words = " ".join(out.split())
    assert (
        "tokens: no norms of tokens, as it is unknown which of its 66 tokens are patches" in words
    )
    assert words.count("no norms of tokens") == 1  # maps need no prefix tokens
    layers = job_result("stats", **keys, **given)["layers"]
    assert layers["tokens"]["token_norms"] is None
    assert "num_prefix_tokens" in layers["tokens"]["no_token_norms"]
    assert layers["maps"]["no_token_norms"] is None


def test_pooled_tokens_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    images(6)
    assert take(out="pooled", reduce="avg")["tokens"].norms is None
    assert "no norms" not in capsys.readouterr().out
    with h5py.File("pooled/stats.h5") as file:
        assert "norms" not in file["layers/tokens"]


def store_of(shape: tuple[int, ...], values: np.ndarray) -> featx.FeatureStore:
    run = make_run(len(values), 8, {"x": shape}, failed=[2])
    made = replace(run, features={"x": values.astype(np.float32)}, tokens={"x": PLACES})
    return featx.open(made.copied(Path("store")))


def test_prefix_and_patch_tokens_apart() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(12, 23, 6))
    values[:, 0] *= 20  # the class token
    values[4:8, 3 + 7] *= 40  # the patch in the second row and third column, in four images
    values[5, 3 + 19] *= 40
    store = store_of((23, 6), values)
    rows = np.flatnonzero(store.ok)
    found = token_norms(store, "x", rows)
    assert found is not None
    norms = np.linalg.norm(store["x"][rows].astype(np.float64), axis=2)
    expected = np.quantile(norms[:, 3:], [0, 0.25, 0.5, 0.75, 0.99, 1])
    assert found.quantiles == pytest.approx(tuple(expected))
    assert found.prefix == pytest.approx(np.median(norms[:, :3], axis=0).tolist())
    assert found.threshold == pytest.approx(expected[3] + 3 * (expected[3] - expected[1]))
    assert (found.num_images, found.grid, found.has_class_token) == (11, (4, 5), True)
    assert found.share == pytest.approx(5 / (11 * 20))
    assert found.images == pytest.approx(4 / 11)
    assert found.most_frequent == (2, 3)
    assert found.by_position[1, 2] == pytest.approx(4 / 11)
    assert found.by_position.sum() == pytest.approx(5 / 11)


@pytest.mark.parametrize("shape", [(6, 4, 5), (4, 5, 6)])
def test_maps_of_either_layout(shape: tuple[int, ...]) -> None:
    axis = 1 + shape.index(6)
    values = np.random.default_rng(0).normal(size=(9, *shape))
    store = store_of(shape, values)
    rows = np.flatnonzero(store.ok)
    found = token_norms(store, "x", rows)
    assert found is not None
    norms = np.linalg.norm(store["x"][rows].astype(np.float64), axis=axis)
    assert found.quantiles[2] == pytest.approx(np.median(norms))
    assert found.prefix == ()
    assert not found.has_class_token


def test_equal_norms_have_no_outliers() -> None:
    found = token_norms(store_of((23, 6), np.ones((5, 23, 6))), "x", np.array([0, 1, 3]))
    assert found is not None
    assert found.quantiles == pytest.approx((6**0.5,) * 6)
    assert (found.share, found.images) == (0, 0)


def test_without_all_tokens_there_are_no_norms() -> None:
    values = np.ones((5, 6))
    assert token_norms(store_of((6,), values), "x", np.array([0])) is None
