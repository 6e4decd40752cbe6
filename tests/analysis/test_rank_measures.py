"""RankMe and participation ratio from statistics, against singular values by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featx.analysis.statistics import Moments
from featx.analysis.statistics.covariance import rank_me, spread


@pytest.mark.parametrize("shape", [(200, 12), (9, 30)])
def test_they_are_those_of_the_matrix(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = 2 + rng.normal(size=shape) * np.linspace(0.1, 3, shape[1])
    found = spread(Moments.of(torch.from_numpy(x)))
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum()
    assert found["rank_me"] == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)
    variances = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    expected = variances.sum() ** 2 / np.square(variances).sum()
    assert found["participation_ratio"] == pytest.approx(expected, rel=1e-9)


def test_by_hand() -> None:
    # Orthogonal rows of one length: all singular values are equal.
    assert rank_me(Moments.of(5 * torch.eye(4).double())) == pytest.approx(4)
    # The singular values are 3 and 1.
    two = Moments.of(torch.diag(torch.tensor([3.0, 1, 0])).double())
    assert rank_me(two) == pytest.approx(np.exp(0.75 * np.log(4 / 3) + 0.25 * np.log(4)))


def test_constant_features_have_one_direction() -> None:
    constant = Moments.of(torch.full((10, 6), 0.1).double())
    assert rank_me(constant) == pytest.approx(1, abs=1e-6)
    assert spread(constant)["participation_ratio"] is None
    assert rank_me(Moments.of(torch.zeros(10, 6).double())) is None
