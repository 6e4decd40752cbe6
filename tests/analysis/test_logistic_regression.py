"""Logistic regression: scikit-learn's minimum, and the streamed one near it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from conftest import run_python
from probe_problem import blobs, features_of, problem_of
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_info

from featx.analysis.probe import logistic_regression, methods, minibatch_regression
from featx.analysis.probe.heads import Scaler, fit_scaler, scaler_of
from featx.analysis.probe.logistic_regression import Fit, fit_logistic, sweep
from featx.analysis.probe.splits import Split, holdout
from featx.base import machine
from featx.config import ProbeConfig
from featx.errors import ConfigError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(StandardScaler().fit_transform(x).astype(np.float32))


@pytest.mark.slow
def test_a_fit_imports_no_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from featx.analysis.probe.logistic_regression import fit_logistic\n"
        "rows, labels = torch.eye(6), torch.arange(6) % 3\n"
        "assert fit_logistic(rows, labels, 3, 0.1, last=True).converged\n"
        "assert 'torch._dynamo' not in sys.modules and 'sklearn' not in sys.modules"
    )
    run_python("-c", code)


def test_fits_in_two_threads_leave_the_threads_of_blas_as_they_were() -> None:
    """Unless it waits, the second fit begins while the first one runs, and ends after it."""
    first_runs, second_runs = Event(), Event()
    rows, labels = torch.eye(6), torch.arange(6) % 3
    seen: list[int] = []

    def num_threads() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    def first_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not first_runs.is_set():
            first_runs.set()
            second_runs.wait(1)
        return logistic_regression.class_loss(logits, targets)

    def second_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        second_runs.set()
        first.result(60)
        seen.extend(num_threads())
        return logistic_regression.class_loss(logits, targets)

    fit_logistic(rows, labels, 3, 0.1)  # imports scipy, which has its own BLAS
    before = num_threads()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(fit_logistic, rows, labels, 3, 0.1, loss=first_loss)
        assert first_runs.wait(60)
        threads.submit(fit_logistic, rows, labels, 3, 0.1, loss=second_loss).result(60)
    assert set(seen) == {1}
    assert num_threads() == before


@pytest.mark.filterwarnings("ignore:.*[Ll]ine [Ss]earch")  # scikit-learn has no digits left
@pytest.mark.parametrize("width", [20, 200])
@pytest.mark.parametrize("l2", [1.0, 1e-3, 1e-6])
def test_the_last_fit_ends_at_the_minimum_whatever_the_penalty(width: int, l2: float) -> None:
    """With a weak penalty a small gradient is far from the minimum: errors go as gradient / l2."""
    x, y = blobs(150, width=width, num_classes=5)
    x, new = scaled(x[:100]), scaled(x[100:])
    y = y[:100]
    fit = fit_logistic(x, torch.from_numpy(y), 5, l2, last=True)
    oracle = LogisticRegression(
        C=1 / (l2 * len(y)), solver="newton-cg", tol=1e-12, max_iter=10_000
    ).fit(x.double().numpy(), y)
    found = (new @ fit.weight.T + fit.bias).softmax(1).numpy()
    expected = oracle.predict_proba(new.double().numpy())
    assert np.abs(found - expected).max() < 1e-4
    assert (found.argmax(1) == expected.argmax(1)).all()
    # Wherever the search began.
    start = fit_logistic(x, torch.from_numpy(y), 5, 10 * l2)
    again = fit_logistic(x, torch.from_numpy(y), 5, l2, start=start, last=True)
    assert torch.allclose(again.weight, fit.weight, rtol=1e-3, atol=1e-4)


def test_two_classes_and_float32_are_enough() -> None:
    x, y = blobs(num_classes=2)
    x, labels = scaled(x), torch.from_numpy(y)
    fit = fit_logistic(x, labels, 2, 1e-2)
    # Softmax over two rows of opposite sign with l2 on both: the binary problem at half the l2.
    oracle = LogisticRegression(C=2 / (1e-2 * len(y)), tol=1e-8, max_iter=5000).fit(x, y)
    assert np.allclose((fit.weight[1] - fit.weight[0]).numpy(), oracle.coef_[0], atol=2e-2)
    assert fit.max_abs_gradient <= logistic_regression.TOLERANCE


def test_a_start_at_the_end_takes_no_step_and_too_few_steps_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = blobs()
    x, labels = scaled(x), torch.from_numpy(y)
    fit = fit_logistic(x, labels, 3, 1e-2)
    again = fit_logistic(x, labels, 3, 1e-2, start=fit)
    assert again.iterations <= 1
    monkeypatch.setattr(logistic_regression, "MAX_ITERATIONS", 2)
    short = fit_logistic(x, labels, 3, 1e-4)
    assert short.converged is False
    assert short.max_abs_gradient > logistic_regression.TOLERANCE


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    x, y = blobs(30)
    fit_logistic(scaled(x), torch.from_numpy(y), 3, 1.0)
    assert torch.get_num_threads() == before


def test_a_sweep_stops_where_the_loss_has_risen_twice() -> None:
    x, y = blobs(60)
    losses = iter([3.0, 1.0, 2.0, 1.5, 1.6, 1.7, 0.0])
    seen: list[float] = []

    def judge(fit: Fit) -> tuple[float, float]:
        seen.append(float(fit.weight.norm()))
        return 0.5, next(losses)

    strengths = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
    trials = sweep(scaled(x), torch.from_numpy(y), 3, strengths, judge)
    assert [trial.l2 for trial in trials] == list(strengths[:6])
    assert seen == sorted(seen)  # weaker penalties, larger weights
    assert min(trials, key=lambda trial: trial.loss).l2 == 1.0


@pytest.mark.parametrize("method", ["linear", "ridge"])
@pytest.mark.parametrize(("l2", "output"), [(None, 1), (1.0, 0)])
def test_a_choice_at_the_end_of_the_grid_is_noted(
    tmp_path: Path, method: str, l2: float | None, output: int
) -> None:
    """Noise wants the strongest penalty, and copies of the labels the weakest one; a strength that
    was asked for is no end.
    """
    x, y = blobs(90)
    noise = np.random.default_rng(1).normal(size=x.shape)
    x = (noise if method == "linear" else np.eye(3)[y]).astype(np.float32)
    problem = problem_of(tmp_path, x, y, ProbeConfig(l2=l2))
    notes = methods.fit(problem, method, holdout(y, 0.3, seed=0)).choice.notes
    assert sum("is the last one of the grid on that side" in note for note in notes) == output


@pytest.mark.slow
def test_streamed_rows_end_near_the_same_minimum(tmp_path: Path) -> None:
    x, y = blobs(600, signal=0.3)
    split = holdout(y, 0.3, seed=0)
    options = ProbeConfig(l2=1e-2, learning_rate=0.03, epochs=100)
    exact = methods.fit(problem_of(tmp_path, x, y, options), "linear", split)
    problem = problem_of(tmp_path, x, y, options, memory_bytes=0)
    methods_small, methods.SMALL_BYTES = methods.SMALL_BYTES, 0
    try:
        streamed = methods.fit(problem, "linear", split)
    finally:
        methods.SMALL_BYTES = methods_small
    assert (streamed.choice.details["solver"], streamed.choice.details["converged"]) == (
        "adamw",
        None,
    )
    assert exact.head is not None
    assert streamed.head is not None
    assert torch.allclose(streamed.head.weight, exact.head.weight, atol=0.08)
    a, b = (fitted.scores(split.test) for fitted in (exact, streamed))
    assert np.abs(a - b).max() < 0.05


def test_streaming_many_strengths_is_streaming_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of each strength is clipped by itself."""
    monkeypatch.setattr(minibatch_regression, "CLIP_NORM", 0.05)
    x, y = blobs(200)
    options = ProbeConfig(epochs=20, learning_rate=1e-2)
    problem, places = problem_of(tmp_path, x, y, options, memory_bytes=0), np.arange(150)
    scaler = fit_scaler(problem.features, places)

    def fits(*strengths: float) -> list[Fit]:
        return minibatch_regression.fit_streamed(problem, places, scaler, strengths)

    together = fits(1.0, 1e-3)
    for fit, l2 in zip(together, (1.0, 1e-3), strict=True):
        assert torch.allclose(fit.weight, fits(l2)[0].weight, atol=1e-6)
    assert not torch.allclose(together[0].weight, together[1].weight, atol=1e-2)


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    x, y = blobs(60)
    problem = problem_of(tmp_path, x, y, ProbeConfig(epochs=1), memory_bytes=0)
    broken = Scaler(torch.zeros(20), torch.full((20,), 1e-44))
    with pytest.raises(RunError, match="gradient in step"):
        minibatch_regression.fit_streamed(problem, np.arange(60), broken, (0.1,))


def test_gradients_reach_the_optimizer_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = blobs(60)
    step = torch.optim.AdamW.step
    norms: list[float] = []

    def noted(self: torch.optim.AdamW, closure: object = None) -> object:
        total = torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])
        norms.append(float(total.norm()))
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    for clip_norm in (1e6, 0.01):
        monkeypatch.setattr(minibatch_regression, "CLIP_NORM", clip_norm)
        options = ProbeConfig(epochs=1)
        problem, places = problem_of(tmp_path, x, y, options, memory_bytes=0), np.arange(60)
        scaler = fit_scaler(problem.features, places)
        minibatch_regression.fit_streamed(problem, places, scaler, (0.1,))
    free, clipped = norms
    assert free > 0.1
    assert clipped == pytest.approx(0.01, rel=1e-4)


def test_the_loss_counts_how_sure_a_wrong_answer_was(tmp_path: Path) -> None:
    """One feature tells two classes apart, but for a row far on the wrong side: e^-500 is 0."""
    x = np.concatenate([np.tile([[-1.0], [1.0]], (50, 1)), [[-1e6]]]).astype(np.float32)
    y = np.concatenate([np.tile([0, 1], 50), [1]])
    split = Split(np.arange(80), np.array([*range(80, 90), 100]), np.arange(90, 100))
    fitted = methods.fit(problem_of(tmp_path, x, y, ProbeConfig(l2=1e-3)), "linear", split)
    (trial,) = fitted.choice.sweep
    assert trial["accuracy"] == pytest.approx(10 / 11)
    assert trial["loss"] > 1e5  # capped it was 69 / 11


def test_a_scaler_of_large_blocks_is_that_of_numpy() -> None:
    """Blocks of 16 MB and 3 rows, which are converted to float64 piece by piece."""
    x = torch.randn((2003, 2000), generator=torch.Generator().manual_seed(0)) * 3 + 1000
    x[:, 7] = 5
    scaler = scaler_of(x.split(2000))
    values = x.double().numpy()
    assert np.allclose(scaler.mean, values.mean(0), rtol=1e-7)
    deviations = values.std(0)
    deviations[7] = 1
    assert np.allclose(scaler.scale, deviations, rtol=1e-6)
    assert not scaler(x)[:, 7].any()


def test_vectors_that_do_not_fit_into_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the kernel would kill the process."""
    x, y = blobs(60)
    monkeypatch.setattr(machine, "free_memory", lambda: 2.0 * x.nbytes - 1)
    with pytest.raises(ConfigError, match=r"^The 60 vectors .* Lower probe\.memory_gib"):
        features_of(tmp_path, x, y)
    assert features_of(tmp_path, x, y, memory_bytes=0).whole is None
