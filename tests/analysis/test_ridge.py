"""Ridge regression: a case by hand, scikit-learn's, and rows fewer than features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from probe_problem import blobs, problem_of
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from featx.analysis.probe import ridge
from featx.analysis.probe.heads import scores_of
from featx.analysis.probe.ridge import solve
from featx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_by_hand(tmp_path: Path) -> None:
    """One feature, -1 and 1 after scaling; targets (1, 0) and (0, 1), less their mean 1/2.

    X^T Y / n = -1/2 and 1/2, X^T X / n = 1: weight = -+ 1/2 / (1 + l2).
    """
    x, y = np.array([[4], [8]], np.float32), np.array([0, 1])
    problem, every = problem_of(tmp_path, x, y), np.arange(2)
    head_of = solve(problem, every)
    for l2, size in ((0.0, 0.5), (1.0, 0.25), (3.0, 0.125)):
        head = head_of(l2)
        assert head.weight.flatten().tolist() == pytest.approx([-size, size])
        assert head.bias.tolist() == [0.5, 0.5]
    assert scores_of(head_of(0.0), problem.features, every) == pytest.approx(np.eye(2))


@pytest.mark.parametrize("width", [20, 120])
def test_scikit_learns_solution_with_more_and_with_fewer_rows_than_features(
    tmp_path: Path, width: int
) -> None:
    x, y = blobs(90, width=width)
    problem, places = problem_of(tmp_path, x, y), np.arange(60)
    head_of = solve(problem, places)
    scaler = StandardScaler().fit(x[places].astype(np.float64))
    for l2 in (1.0, 1e-3):
        oracle = Ridge(alpha=l2 * len(places)).fit(
            scaler.transform(x[places].astype(np.float64)), np.eye(3)[y[places]]
        )
        found = scores_of(head_of(l2), problem.features, np.arange(90))
        expected = oracle.predict(scaler.transform(x.astype(np.float64)))
        assert np.allclose(found, expected, atol=1e-4)


def test_without_a_penalty_constant_features_have_no_say(tmp_path: Path) -> None:
    x, y = blobs(60)
    x[:, 3] = 7
    head = solve(problem_of(tmp_path, x, y), np.arange(60))(0.0)
    assert bool(torch.isfinite(head.weight).all())
    assert head.weight[:, 3].abs().max() < 1e-12


def test_too_large_a_matrix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ridge, "MAX_DIM", 10)
    x, y = blobs(60)
    with pytest.raises(ConfigError, match="60 rows and 20 features; at most 10"):
        solve(problem_of(tmp_path, x, y), np.arange(60))


@pytest.mark.parametrize(
    ("width", "num_bytes"), [(20, 8 * 3 * 20 * 20), (120, 8 * 60 * (240 + 60))]
)
def test_matrices_that_do_not_fit_into_memory_are_refused(
    tmp_path: Path, set_free_memory: Callable[..., None], width: int, num_bytes: int
) -> None:
    problem = problem_of(tmp_path, *blobs(60, width=width))
    set_free_memory(float(num_bytes))
    solve(problem, np.arange(60))
    set_free_memory(num_bytes - 1.0)
    with pytest.raises(ConfigError, match=f"squares of 60 rows and {width} features take .* free"):
        solve(problem, np.arange(60))


@pytest.mark.parametrize("width", [20, 120])
def test_an_offset_changes_no_score(tmp_path: Path, width: int) -> None:
    """A scaler in float32 leaves features of 10^6 with a mean of up to 0.03."""
    x, y = blobs(90, width=width)
    x = np.round(x * 8) / 8
    every, scores = np.arange(90), []
    for number, offset in enumerate((0, 1e6)):
        problem = problem_of(tmp_path / str(number), x + np.float32(offset), y)
        scores.append(scores_of(solve(problem, every)(0.1), problem.features, every))
    assert np.allclose(*scores, atol=2e-5)
