"""Methods that predict numbers or several labels: choose a setting, fit, and predict test rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe import knn, logistic_regression, ridge
from featx.analysis.probe.heads import (
    MULTILABEL,
    REGRESSION,
    Head,
    Scaler,
    fit_scaler,
    scores_of,
)
from featx.analysis.probe.layer_rows import Features
from featx.analysis.probe.logistic_regression import Fit
from featx.analysis.probe.splits import Places, Split
from featx.config import ProbeConfig
from featx.errors import ConfigError

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ValueProblem:
    """One layer and the targets to predict from it.

    Attributes:
        features: (N, D) vectors of all places.
        values: (N, T) targets.
        multilabel: whether the targets are labels, 1 or 0, and not numbers.
        options: option group `probe`.
    """

    features: Features
    values: Matrix
    multilabel: bool
    options: ProbeConfig


@dataclass(frozen=True)
class FittedValues:
    """Predictions for the test rows of a split by a fitted probe.

    Attributes:
        predicted: (n, T) numbers, or scores of labels in [0, 1].
        chosen: the chosen penalty or number of neighbours.
        validation_loss: loss of the choice on the validation rows, without which it was fitted.
        sweep: every setting that was tried, as JSON types.
        notes: notes for the user.
        head: the head, or None for kNN.
    """

    predicted: Matrix
    chosen: float
    validation_loss: float
    sweep: list[dict[str, Any]]
    notes: list[str]
    head: Head | None


def fit_values(problem: ValueProblem, method: str, split: Split) -> FittedValues:
    """Choose the setting with the smallest loss on validation rows, and fit on all training rows.

    The loss is the mean squared error; for linear with several labels the binary cross-entropy.
    """
    if method == "knn":
        return _knn(problem, split)
    return (_labels if problem.multilabel else _numbers)(problem, split)


def fit_head(problem: ValueProblem, places: Places, l2: float) -> tuple[Head, list[str]]:
    """Fit linear on some places with a known penalty.

    Returns:
        the head, and notes for the user.
    """
    if problem.multilabel:
        return _fit_labels(problem, places, l2)
    return _number_head(problem, places, l2), []


def _knn(problem: ValueProblem, split: Split) -> FittedValues:
    """Predict the weighted mean of the k nearest rows."""
    options, features = problem.options, problem.features
    temperature = options.temperature or knn.TEMPERATURE
    ks = knn.candidates(len(split.fit), options.k)

    def means(bank: Places, queries: Places, ks: tuple[int, ...]) -> dict[int, Matrix]:
        return knn.weighted_means(features, bank, problem.values, queries, ks, temperature)

    truth = problem.values[split.validation]
    predicted_of_k = means(split.fit, split.validation, ks)
    sweep = [
        {"k": k, "loss": _squared_error(truth, values)} for k, values in predicted_of_k.items()
    ]
    best = min(sweep, key=lambda trial: trial["loss"])
    k = int(best["k"])
    predicted = means(split.train, split.test, (k,))[k]
    return FittedValues(predicted, k, best["loss"], sweep, [], None)


def _numbers(problem: ValueProblem, split: Split) -> FittedValues:
    """Predict numbers by ridge regression."""
    features, options = problem.features, problem.options
    strengths = ridge.STRENGTHS if options.l2 is None else (options.l2,)
    solution, truth = _solve(problem, split.fit), problem.values[split.validation]
    sweep = [
        {
            "l2": l2,
            "loss": _squared_error(truth, scores_of(solution.head(l2), features, split.validation)),
        }
        for l2 in strengths
    ]
    best = min(sweep, key=lambda trial: trial["loss"])
    head = _number_head(problem, split.train, best["l2"])
    predicted = scores_of(head, features, split.test)
    notes = logistic_regression.note_grid_end(best["l2"], strengths)
    return FittedValues(predicted, best["l2"], best["loss"], sweep, notes, head)


def _solve(problem: ValueProblem, places: Places) -> ridge.RidgeSolution:
    """Decompose the normal equations of some places."""
    features = problem.features
    return ridge.solve_values(features, places, problem.values, fit_scaler(features, places))


def _number_head(problem: ValueProblem, places: Places, l2: float) -> Head:
    """Fit numbers with a known penalty."""
    return replace(_solve(problem, places).head(l2), task=REGRESSION)


def _labels(problem: ValueProblem, split: Split) -> FittedValues:
    """Predict the probability of each label by logistic regression."""
    features, options = problem.features, problem.options
    strengths = logistic_regression.L2_GRID if options.l2 is None else (options.l2,)
    scaler, x, targets = _labelled_matrix(problem, split.fit)
    truth = torch.from_numpy(problem.values[split.validation])

    def judge(fit: Fit) -> tuple[float, float]:
        p = torch.from_numpy(scores_of(_label_head(scaler, fit), features, split.validation))
        losses = torch.nn.functional.binary_cross_entropy(p, truth, reduction="sum")
        return float("nan"), float(losses) / len(p)

    num_labels, loss = truth.shape[1], logistic_regression.label_loss
    trials = logistic_regression.sweep(x, targets, num_labels, strengths, judge, loss)
    del x
    best = logistic_regression.best_trial(trials)
    head, notes = _fit_labels(problem, split.train, best.l2, best.fit)
    notes = [*logistic_regression.note_grid_end(best.l2, strengths), *notes]
    sweep = [{"l2": trial.l2, "loss": trial.loss} for trial in trials]
    predicted = scores_of(head, features, split.test)
    return FittedValues(predicted, best.l2, best.loss, sweep, notes, head)


def _fit_labels(
    problem: ValueProblem, places: Places, l2: float, start: Fit | None = None
) -> tuple[Head, list[str]]:
    """Fit labels with a known penalty; returns the head, and a note unless it converged."""
    scaler, x, targets = _labelled_matrix(problem, places)
    loss = logistic_regression.label_loss
    fit = logistic_regression.fit_logistic(x, targets, targets.shape[1], l2, start, True, loss)
    return _label_head(scaler, fit), fit.notes(l2)


def _labelled_matrix(
    problem: ValueProblem, places: Places
) -> tuple[Scaler, torch.Tensor, torch.Tensor]:
    """Return the standardisation of some places, their standardised rows, and their labels."""
    features = problem.features
    if features.whole is None:
        raise ConfigError(
            "probe.task=multilabel fits layers in memory only: raise probe.memory_gib above "
            f"{8 * len(features) * features.width / (1 << 30):.1f}, or use probe.method=knn."
        )
    scaler = fit_scaler(features, places)
    targets = torch.from_numpy(problem.values[places]).float().to(features.device)
    return scaler, scaler(features.take(places)), targets


def _label_head(scaler: Scaler, fit: Fit) -> Head:
    """Return the head of a fit."""
    return Head(scaler, fit.weight, fit.bias, probabilities=True, task=MULTILABEL)


def _squared_error(truth: Matrix, predicted: Matrix) -> float:
    """Return the mean over rows of the squared error, summed over targets."""
    return float(np.square(predicted - truth).sum(1).mean())
