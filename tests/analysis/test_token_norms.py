"""Norms of tokens, against numpy and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_store import MadeRun, make_run

import featx
from featx.analysis.statistics import token_norms
from featx.types import TokenGeometry

pytestmark = pytest.mark.usefixtures("in_tmp_path")

PLACES = TokenGeometry(3, True, (4, 5), (64, 80))


def store_of(
    shape: tuple[int, ...], values: np.ndarray, places: TokenGeometry | None = PLACES
) -> featx.FeatureStore:
    run: MadeRun = make_run(len(values), 8, {"x": shape}, failed=[2])
    tokens = {} if places is None else {"x": places}
    made = replace(run, features={"x": values.astype(np.float32)}, tokens=tokens)
    return featx.open(made.write(Path("store")))


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
