"""KID and Fréchet distance of two stores, against sums over pairs, numpy and torchmetrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from made_store import MadeRun, make_run, ok_vectors

import featx
from featx.analysis.similarity.kid import squared_discrepancy
from featx.errors import ConfigError, LayerError, StoreMismatchError
from featx.similarity import data_set_distance

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def direct_kid(x: np.ndarray, y: np.ndarray) -> float:
    """The definition, pair by pair."""
    n, m, width = len(x), len(y), x.shape[1]

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return float((a @ b / width + 1) ** 3)

    one = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j)
    two = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j)
    across = sum(kernel(a, b) for a in x for b in y)
    return one / (n * (n - 1)) + two / (m * (m - 1)) - 2 * across / (n * m)


def write(run: MadeRun, name: str) -> featx.FeatureStore:
    return featx.open(run.write(Path(name)))


def shifted(run: MadeRun, seed: int, by: float) -> MadeRun:
    """Rows of another seed, moved, of the same model."""
    drawn = make_run(len(run.listing), run.part_rows, {"flat": (5,)}, seed=seed)
    return replace(run, features={"flat": drawn.features["flat"] + np.float32(by)})


def test_it_is_that_of_torchmetrics() -> None:
    """poly_mmd of torchmetrics 1.9.0 gave 1.3106272728271406 for these rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 12)), 0.5 + 1.5 * rng.normal(size=(40, 12))
    found = squared_discrepancy(torch.from_numpy(x), torch.from_numpy(y))
    assert found == pytest.approx(1.3106272728271406, rel=1e-12)
    assert found == pytest.approx(direct_kid(x, y), rel=1e-12)


def test_by_hand() -> None:
    """k is 8 within (1) and (1), 0 across (1) and (-1), and 8 within (-1) and (-1)."""
    one, other = torch.ones(2, 1).double(), -torch.ones(2, 1).double()
    assert squared_discrepancy(one, other) == 16
    assert squared_discrepancy(one, one) == 0


def test_all_rows_of_two_stores() -> None:
    run = make_run(30, 8, {"flat": (5,)}, failed=(3, 20))
    here, there = write(run, "here"), write(shifted(run, 7, 0.5), "there")
    found = data_set_distance(here, there, "flat", device="cpu")
    x, y = (ok_vectors(store, "flat").astype(np.float64) for store in (here, there))
    assert (found.rows, found.other_rows, found.subset_rows) == (28, 28, 28)
    assert found.kid == pytest.approx(direct_kid(x, y), rel=1e-6)
    assert found.kid_std == 0, "every subset has all rows"
    one, other = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = scipy.linalg.sqrtm(one @ other).real
    expected = np.square(x.mean(0) - y.mean(0)).sum() + np.trace(one + other - 2 * root)
    assert found.frechet == pytest.approx(expected, rel=1e-5)
    assert data_set_distance(here, here, "flat", device="cpu").frechet == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_subsets_are_random_and_seeded() -> None:
    run = make_run(300, 64, {"flat": (5,)})
    here, there = write(run, "here"), write(shifted(run, 7, 0.0), "there")
    found = data_set_distance(here, there, "flat", subset_rows=50, device="cpu")
    assert found == data_set_distance(here, there, "flat", subset_rows=50, device="cpu")
    other = data_set_distance(here, there, "flat", subset_rows=50, device="cpu", seed=1)
    assert found.kid != other.kid
    x, y = (ok_vectors(store, "flat").astype(np.float64) for store in (here, there))
    # The estimate is unbiased, so the mean of the subsets is that of all rows but for its error.
    whole = squared_discrepancy(torch.from_numpy(x), torch.from_numpy(y))
    assert abs(found.kid - whole) < 4 * found.kid_std / np.sqrt(100)
    assert abs(found.kid) < 3 * found.kid_std, "rows of one distribution"
    assert data_set_distance(here, write(shifted(run, 7, 1.0), "away"), "flat").kid > 1


def test_the_spread_of_large_values_is_a_number() -> None:
    run = make_run(30, 8, {"flat": (5,)})
    large = replace(run, features={"flat": np.float32(1e36) * run.features["flat"]})
    here, there = write(large, "here"), write(shifted(large, 7, 0.0), "there")
    found = data_set_distance(here, there, "flat", subset_rows=10, device="cpu")
    assert 0 < found.kid_std < np.inf


def test_wide_layers_have_no_frechet_distance() -> None:
    run = make_run(8, 8, {"map": (65, 8, 8)})
    store = write(run, "store")
    found = data_set_distance(store, store, "map", device="cpu")
    assert found.frechet is None
    assert found.not_available == "4160 features are more than 4096"


def test_what_cannot_be_compared_is_refused() -> None:
    run = make_run(9, 4, {"flat": (5,)})
    store = write(run, "store")
    other = replace(run, header=replace(run.header, weights_sha256="cd" * 32))
    with pytest.raises(StoreMismatchError, match=r"flat: these are different values(.|\n)*weights"):
        data_set_distance(store, write(other, "other"), "flat")
    with pytest.raises(LayerError, match="no layer 'flt'"):
        data_set_distance(store, store, "flt")
    packed = featx.open(run.write(Path("packed"), packed=True))
    assert data_set_distance(store, packed, "flat", device="cpu").rows == 9
    few = write(make_run(3, 4, {"flat": (5,)}, failed=[0, 1]), "few")
    with pytest.raises(ConfigError, match="two rows that are ok in each store"):
        data_set_distance(store, few, "flat", device="cpu")
