"""SVCCA, Procrustes distance and CKA from products of features, against numpy and scipy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial
from made_store import make_run, ok_vectors

import featx
from featx.analysis.similarity.cross_measures import (
    centred_rows,
    compare_products,
    cross_product,
    layer_products,
)
from featx.analysis.similarity.gram_measures import Rows
from featx.errors import ConfigError
from featx.similarity import layer_similarity, linear_cka, procrustes_distance, svcca

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def direct_svcca(x: np.ndarray, y: np.ndarray) -> float:
    """The mean cosine of the principal angles between the spaces of the first directions."""
    bases = []
    for z in (x - x.mean(0), y - y.mean(0)):
        u, s, _ = np.linalg.svd(z, full_matrices=False)
        count = int((np.cumsum(s**2) / np.sum(s**2) < 0.99).sum()) + 1
        bases.append(u[:, :count])
    return float(np.cos(scipy.linalg.subspace_angles(*bases)).mean())


def direct_procrustes(x: np.ndarray, y: np.ndarray) -> float:
    """From scipy's disparity 1 - s^2, in which a factor is fitted as well."""
    width = max(x.shape[1], y.shape[1])
    padded = [np.pad(z, ((0, 0), (0, width - z.shape[1]))) for z in (x, y)]
    return 2 - 2 * float(np.sqrt(1 - scipy.spatial.procrustes(*padded)[2]))


@pytest.fixture(params=[90, 12], ids=["wide", "narrow"])
def matrices(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """40 rows of 7 values, and of more values than rows or fewer."""
    rng = np.random.default_rng(3)
    x = 1 + rng.normal(size=(40, 7))
    noise = 0.3 * rng.normal(size=(40, request.param))
    return x, np.tanh(x @ rng.normal(size=(7, request.param))) + noise


def test_they_are_the_formulas(matrices: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = matrices
    assert svcca(x, y) == pytest.approx(direct_svcca(x, y), abs=1e-9)
    assert procrustes_distance(x, y) == pytest.approx(direct_procrustes(x, y), abs=1e-9)
    assert 0.1 < svcca(x, y) <= 1
    assert 0.1 < procrustes_distance(x, y) < 1.9
    # All directions of the wide matrix together reproduce any seven.
    assert (svcca(x, y) > 0.99) == (y.shape[1] > 40)


def test_both_forms_of_cka_agree(matrices: tuple[np.ndarray, np.ndarray]) -> None:
    one, other = (centred_rows(Rows.of_matrix(z)) for z in matrices)
    names = ("cka", "cka_debiased")
    own = [layer_products(rows, names) for rows in (one, other)]
    found = compare_products(*own, cross_product(one, other), names)
    assert found["cka"] == pytest.approx(linear_cka(*matrices), abs=1e-6)
    assert found["cka_debiased"] == pytest.approx(linear_cka(*matrices, debiased=True), abs=1e-6)


def test_by_hand() -> None:
    """Two points on an axis against two points on the diagonal between two others."""
    x = np.array([[1.0], [-1], [0], [0]])
    y = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    # X^T Y is (2, 0), |X|^2 is 2 and |Y|^2 is 4; one direction of X lies within those of Y.
    assert procrustes_distance(x, y) == pytest.approx(2 - 2 * 2 / np.sqrt(8))
    assert svcca(x, y) == pytest.approx(1)
    assert procrustes_distance(x, -3 * x) == pytest.approx(0, abs=1e-12)
    assert procrustes_distance(x, y[:, 1:]) == pytest.approx(2), "at right angles"
    assert svcca(x, y[:, 1:]) == pytest.approx(0, abs=1e-12)


def test_rotation_size_and_offset_change_nothing(
    matrices: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = matrices
    turned = 1e6 + 3 * x @ np.linalg.qr(np.random.default_rng(0).normal(size=(7, 7)))[0]
    for measure in (svcca, procrustes_distance):
        assert measure(turned, y) == pytest.approx(measure(x, y), abs=1e-8)
    assert procrustes_distance(x, turned) == pytest.approx(0, abs=1e-8)


def test_constant_features_are_like_none(matrices: tuple[np.ndarray, np.ndarray]) -> None:
    _, y = matrices
    for measure in (svcca, procrustes_distance):
        assert np.isnan(measure(np.full((40, 3), 0.1), y))
        assert np.isnan(measure(y, np.full((40, 3), 0.1)))


def test_layers_of_a_store_and_of_two() -> None:
    shapes = {"a": (5,), "b": (3, 2, 2), "c": (60,)}
    run = make_run(50, 16, shapes, failed=(3, 10))
    store = featx.open(run.write(Path("store")))
    names = ("svcca", "procrustes", "cka")
    found = layer_similarity(store, device="cpu", measures=names)
    assert tuple(found.measures) == names
    X = {name: ok_vectors(store, name).astype(np.float64) for name in store.layers}
    assert found.layers == tuple(X)
    for name, direct in (("svcca", direct_svcca), ("procrustes", direct_procrustes)):
        expected = [[direct(X[a], X[b]) for b in X] for a in X]
        assert np.allclose(found.measures[name], expected, atol=1e-6), name
    # Rows 20 to 49 under the same keys, of another model.
    listing = replace(run.listing, keys=run.listing.keys[20:], labels=run.listing.labels[20:])
    other = replace(make_run(30, 8, {"z": (9,)}, failed=[1], seed=5), listing=listing)
    there = featx.open(other.write(Path("other")))
    across = layer_similarity(store, there, device="cpu", measures=names)
    rows = np.array([22 - 2, *range(22, 50)])  # row 21 failed there
    assert across.num_rows == 29
    for name, direct in (("svcca", direct_svcca), ("procrustes", direct_procrustes)):
        z = there["z"][rows - 20].astype(np.float64)
        expected = [[direct(store[a][rows].reshape(29, -1).astype(np.float64), z)] for a in X]
        assert np.allclose(across.measures[name], expected, atol=1e-6), name


def test_more_images_than_a_matrix_of_pairs_has_room_for() -> None:
    run = make_run(10_001, 2048, {"a": (5,), "b": (3, 2, 2)}, failed=[7])
    store = featx.open(run.write(Path("store")))
    names = ["cka", "cka_debiased"]
    found = layer_similarity(store, num_rows=10_001, device="cpu", measures=names)
    a, b = (ok_vectors(store, name).astype(np.float64) for name in ("a", "b"))
    a, b = a - a.mean(0), b - b.mean(0)
    expected = np.linalg.norm(a.T @ b) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
    assert found.num_rows == 10_000
    assert found.measures["cka"][0, 1] == pytest.approx(expected, rel=1e-5)
    assert found.measures["cka_debiased"][0, 1] == pytest.approx(0, abs=0.01)


def test_what_takes_too_much_memory_is_refused() -> None:
    run = make_run(10_002, 4096, {"a": (5,), "b": (2,)})
    store = featx.open(run.write(Path("store")))
    with pytest.raises(ConfigError, match=r"RSA of 10002 images.*cka\.measures=\[cka,cka_debiased"):
        layer_similarity(store, num_rows=20_000, device="cpu")
    with pytest.raises(ConfigError, match=r"cka\.measures=\[ckaa\].*cka"):
        layer_similarity(store, device="cpu", measures=["ckaa"])
