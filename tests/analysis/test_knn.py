"""kNN: votes that one can add up by hand, and scikit-learn's neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from probe_problem import blobs, problem_of
from sklearn.neighbors import KNeighborsClassifier

from featx.analysis.probe.knn import vote
from featx.config import ProbeConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def test_votes_by_hand(tmp_path: Path) -> None:
    """Cosines to (1, 0): 1, 0.6, 0.6, -1, and a row of zeros has 0."""
    x = np.array([[2, 0], [3, 4], [3, -4], [-1, 0], [0, 0], [5, 0]], np.float32)
    y = np.array([0, 1, 1, 2, 2, 0])
    problem = problem_of(tmp_path, x, y, ProbeConfig(method="knn"))
    found = vote(problem, np.arange(5), np.array([5]), (1, 3, 5, 50))
    near, far = math.exp(0.6 / 0.07), math.exp(1 / 0.07)
    assert found[1].tolist() == [[1, 0, 0]]
    total = far + 2 * near
    assert found[3][0] == pytest.approx([far / total, 2 * near / total, 0], rel=1e-5)
    others = 1 + math.exp(-1 / 0.07)
    assert found[5][0] == pytest.approx(
        [far / (total + others), 2 * near / (total + others), others / (total + others)], rel=1e-5
    )
    assert (found[50] == found[5]).all()


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_all_is_scikit_learns_in_blocks_of_any_size(
    scale: float, tmp_path: Path, set_block_sizes: Callable[..., None]
) -> None:
    x, y = blobs(200)
    x = x * np.float32(scale)
    bank, queries = np.arange(0, 150), np.arange(150, 200)
    oracle = KNeighborsClassifier(
        7, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)
    ).fit(x[bank] / scale, y[bank])
    expected = oracle.predict_proba(x[queries] / scale)
    for numbers, memory_bytes in ((1 << 24, 1e9), (300, 1e9), (300, 0)):
        set_block_sizes(4 * numbers)
        problem = problem_of(tmp_path, x, y, memory_bytes=memory_bytes)
        found = vote(problem, bank, queries, (7,))[7]
        assert np.allclose(found, expected, atol=1e-4)
        assert np.allclose(found.sum(1), 1)


@pytest.mark.parametrize("long_row", [False, True])
def test_an_offset_takes_no_digits(long_row: bool, tmp_path: Path) -> None:
    """Cosines that differ by 1e-9, which float32 does not tell apart; one row may be elsewhere."""
    x, y = blobs(200)
    if long_row:
        x[3] *= 1e9
    x = np.round(10 * x) + np.float32(1e6)
    bank, queries = np.arange(0, 150), np.arange(150, 200)
    oracle = KNeighborsClassifier(7, metric="cosine", algorithm="brute")
    expected = oracle.fit(x[bank].astype(np.float64), y[bank]).predict_proba(
        x[queries].astype(np.float64)
    )
    found = vote(problem_of(tmp_path, x, y), bank, queries, (7,))[7]
    assert np.allclose(found, expected, atol=1e-4)


def test_equal_similarities_are_in_the_order_of_the_bank(
    tmp_path: Path, set_block_sizes: Callable[..., None]
) -> None:
    """Rows that are permutations of each other: equal cosines of different pairs, and copies."""
    num_ties = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        base = rng.integers(1, 4, (6, 5))
        x = np.concatenate([np.roll(base, shift, axis=1) for shift in range(5)] * 2)
        y = rng.permutation(len(x)) % 10
        bank, queries, ks = np.arange(40), np.arange(40, 60), (1, 3, 7, 20)
        expected = {k: np.zeros((20, 10)) for k in ks}
        for i, query in enumerate(x[queries].tolist()):
            # The squares of cosines, which are positive, times the length of the query.
            near = [Fraction(int(x[b] @ query) ** 2, int(x[b] @ x[b])) for b in bank]
            order = sorted(bank, key=lambda b: (-near[b], b))
            weights = [math.exp(math.sqrt(n / (x[40 + i] @ x[40 + i])) / 0.07) for n in near]
            for k in ks:
                num_ties += near[order[k - 1]] == near[order[k]]
                for b in order[:k]:
                    expected[k][i, y[b]] += weights[b]
        for size in (1 << 24, 700):
            set_block_sizes(size)
            root = tmp_path / f"{seed}-{size}"
            root.mkdir()
            made = x[:, rng.permutation(5)].astype(np.float32)
            found = vote(problem_of(root, made, y), bank, queries, ks)
            for k, votes in expected.items():
                shares = votes / votes.sum(1, keepdims=True)
                assert np.allclose(found[k], shares, atol=1e-9)
                # Scores that are equal have to be so in all bits: metrics compare them.
                same = np.isclose(shares[:, None], shares[:, :, None], rtol=1e-11)
                assert ((found[k][:, None] == found[k][:, :, None]) == same).all()
    assert num_ties > 100


def test_the_first_of_rows_of_one_direction_are_neighbours(tmp_path: Path) -> None:
    """Also where this direction is the centre; the lengths are rounded, and the values are not."""
    x = np.outer(np.arange(1, 42), [3, 7]).astype(np.float32)
    found = vote(problem_of(tmp_path, x, np.arange(41)), np.arange(40), np.array([40]), (1, 7))
    assert [np.flatnonzero(found[k][0]).tolist() for k in (1, 7)] == [[0], [*range(7)]]
