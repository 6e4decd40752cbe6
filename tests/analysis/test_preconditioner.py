"""Fits of correlated features and of many rows: the same minimum in far fewer passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import slow_except
from sklearn.linear_model import LogisticRegression

from featx.analysis.probe import preconditioner
from featx.analysis.probe.logistic_regression import TOLERANCE, Trial, fit_logistic, sweep
from featx.analysis.probe.minimisation import PreconditionedObjective, minimise
from featx.analysis.probe.preconditioner import InverseFactor, LeadingDirections, SecondMoments
from featx.analysis.probe.regression_targets import ClassTargets, CountTargets
from featx.analysis.probe.softmax_objective import SoftmaxObjective

C = 6


def correlated(num_rows: int = 3000, width: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised features whose second moments have a condition number above 10^4."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, C, num_rows)
    hidden = rng.normal(size=(num_rows, width)) * np.geomspace(1, 1e-2, width)
    hidden[:, :12] += 0.4 * rng.normal(size=(C, 12))[y]
    x = hidden @ np.linalg.qr(rng.normal(size=(width, width)))[0]
    x = (x - x.mean(0)) / x.std(0)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


@pytest.mark.parametrize("l2", slow_except([1e-4, 1e-5], 1e-4))
def test_the_minimum_is_scikit_learns_in_fewer_iterations(l2: float) -> None:
    x, y = correlated(2000, 64)
    fit = fit_logistic(x, y, C, l2)
    oracle = LogisticRegression(C=1 / (l2 * len(y)), tol=TOLERANCE, max_iter=5000)
    oracle.fit(x.numpy(), y.numpy())
    exact = LogisticRegression(C=1 / (l2 * len(y)), solver="newton-cg", tol=1e-10, max_iter=5000)
    exact.fit(x.double().numpy(), y.numpy())
    assert fit.converged
    assert 2 * fit.iterations < int(oracle.n_iter_.max())
    # At the same tolerance the preconditioned fit is the closer one.
    far = np.abs(oracle.coef_ - exact.coef_).max()
    assert np.abs(fit.weight.numpy() - exact.coef_).max() < max(far, 1e-2)


def test_counts_of_classes_have_the_same_minimum() -> None:
    x, y = correlated(800, 48)
    counts = torch.nn.functional.one_hot(y, C).float() * 4
    fit, of_counts = (fit_logistic(x, target, C, 1e-3, last=True) for target in (y, counts))
    assert torch.allclose(fit.weight, of_counts.weight, atol=1e-4)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("kind", ["inverse factor", "leading directions"])
def test_the_gradient_is_that_of_autograd(kind: str, counts: bool) -> None:
    width = 96
    x, y = correlated(300, width)
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn((C, width), dtype=torch.float64, generator=rng)
    bias = torch.randn(C, dtype=torch.float64, generator=rng)
    given = torch.randint(0, 5, (300, C), generator=rng).float()
    targets = CountTargets(given, torch.float64) if counts else ClassTargets(y)
    objective = SoftmaxObjective(x.double(), targets, 1e-2, weight.clone(), bias.clone())
    variables = (
        LeadingDirections(objective)
        if kind == "leading directions"
        else InverseFactor(objective, SecondMoments(x))
    )
    assert torch.allclose(variables.to_weight(variables.from_weight(weight)), weight)
    changed = PreconditionedObjective(objective, variables)
    v, c = (each.clone().requires_grad_() for each in changed.parameters)
    loss = changed()
    assert torch.allclose(objective.weight, weight)
    assert torch.allclose(objective.bias, bias)
    own_weight = variables.to_weight(v)
    logits = x.double() @ own_weight.T + c * variables.scale
    log_p = logits.log_softmax(1)
    share = given.double() / given.sum()
    cross = -(share * log_p).sum() if counts else torch.nn.functional.cross_entropy(logits, y)
    expected = cross + 1e-2 / 2 * own_weight.square().sum()
    expected.backward()
    assert torch.allclose(loss, expected.detach())
    assert torch.allclose(changed.parameters[0].grad, v.grad)
    assert torch.allclose(changed.parameters[1].grad, c.grad)


@pytest.mark.slow
def test_many_rows_are_passed_less_often_than_by_scikit_learn() -> None:
    """The search begins on a sample, goes on in leading directions, and is the same every time."""
    x, y = correlated(14_000, 1100)
    fits, evaluations = [], 0
    for _ in range(2):
        weight, bias = torch.zeros((C, 1100), dtype=torch.float64), torch.zeros(C).double()
        objective = SoftmaxObjective(x, ClassTargets(y), 1e-4, weight, bias)
        minimise(objective, SecondMoments(x), TOLERANCE)
        fits.append((weight, bias))
        evaluations = objective.evaluations
    assert torch.equal(fits[0][0], fits[1][0])
    assert torch.equal(fits[0][1], fits[1][1])
    p = (x.double() @ fits[0][0].T + fits[0][1]).softmax(1)
    p[torch.arange(len(y)), y] -= 1
    gradient = p.T @ x.double() / len(y) + 1e-4 * fits[0][0]
    assert max(gradient.abs().max(), p.mean(0).abs().max()) <= 1.01 * TOLERANCE
    oracle = LogisticRegression(C=1 / (1e-4 * len(y)), tol=TOLERANCE, max_iter=5000)
    oracle.fit(x.numpy(), y.numpy())
    assert 10 * evaluations < 7 * int(oracle.n_iter_.max())


def test_moments_of_a_sweep_are_computed_once_and_only_if_a_fit_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    original = preconditioner.product
    monkeypatch.setattr(
        preconditioner, "product", lambda a, b: made.append(a.shape) or original(a, b)
    )
    x, y = correlated()
    found: list[Trial] = sweep(x, y, C, (1e-1, 1e-2, 1e-3), lambda fit: (0.0, 0.0))
    assert all(trial.fit.converged for trial in found)
    assert made.count((96, 384)) == 1  # 4 rows for each feature
    easy = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32))
    made.clear()
    assert fit_logistic(easy, y[:500], C, 1.0).converged
    assert made == []


def test_costs_and_limits() -> None:
    moments = SecondMoments(torch.zeros((10_000, 2048)))
    assert moments.cost == 8192 * 2048**2 + 2048**3
    assert moments.cost_of_leading == 4 * 8192 * 2048 * 80
    assert moments.sampled_rows.unique().numel() == 8192
    wide = torch.randn((60, 4097), generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros((2, 4097), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    moments = SecondMoments(wide)
    objective = SoftmaxObjective(wide, ClassTargets(torch.arange(60) % 2), 1e-3, *zeros)
    minimise(objective, moments, TOLERANCE)
    assert objective.max_abs_gradient <= TOLERANCE
    assert not moments.is_known, "its matrix would have 128 MiB and more"


def test_fewer_rows_than_features_and_features_that_are_equal() -> None:
    """Second moments without full rank, and a penalty below the precision of float32."""
    x, y = correlated(40, 96)
    x = torch.cat([x, x[:, :30], torch.zeros((40, 4))], 1)
    fit = fit_logistic(x, y, C, 1e-7)
    assert fit.converged
    assert torch.equal((x @ fit.weight.T + fit.bias).argmax(1), y)
