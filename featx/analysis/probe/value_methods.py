"""Methods that predict numbers or several labels: choose a setting, fit, and predict test rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe import knn, logistic_regression, ridge
from featx.analysis.probe.binary_regression import BinaryFit, fit_binary
from featx.analysis.probe.heads import Scaler, fit_scaler, scores_of
from featx.analysis.probe.labelled_rows import Features
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
    """

    predicted: Matrix
    chosen: float
    validation_loss: float
    sweep: list[dict[str, Any]]
    notes: list[str]


def fit_values(problem: ValueProblem, method: str, split: Split) -> FittedValues:
    """Choose the setting with the smallest loss on validation rows, and fit on all training rows.

    The loss is the mean squared error; for linear with several labels the binary cross-entropy.

    Args:
        problem: layer and targets.
        method: 'linear' or 'knn'.
        split: places.
    """
    if method == "knn":
        return _knn(problem, split)
    return (_labels if problem.multilabel else _numbers)(problem, split)


def _knn(problem: ValueProblem, split: Split) -> FittedValues:
    """Predict the weighted mean of the k nearest rows."""
    options, features = problem.options, problem.features
    temperature = options.temperature or knn.TEMPERATURE
    ks = knn.candidates(len(split.fit), options.k)

    def means(bank: Places, queries: Places, ks: tuple[int, ...]) -> dict[int, Matrix]:
        return knn.weighted_means(features, bank, problem.values, queries, ks, temperature)

    truth = problem.values[split.validation]
    found = means(split.fit, split.validation, ks)
    sweep = [{"k": k, "loss": _squared_error(truth, values)} for k, values in found.items()]
    best = min(sweep, key=lambda trial: trial["loss"])
    k = int(best["k"])
    return FittedValues(means(split.train, split.test, (k,))[k], k, best["loss"], sweep, [])


def _numbers(problem: ValueProblem, split: Split) -> FittedValues:
    """Predict numbers by ridge regression."""
    features, options = problem.features, problem.options
    strengths = ridge.STRENGTHS if options.l2 is None else (options.l2,)

    def solved(places: Places) -> ridge.Solved:
        return ridge.solve_values(features, places, problem.values, fit_scaler(features, places))

    on_fit, truth = solved(split.fit), problem.values[split.validation]
    sweep = [
        {
            "l2": l2,
            "loss": _squared_error(truth, scores_of(on_fit.head(l2), features, split.validation)),
        }
        for l2 in strengths
    ]
    best = min(sweep, key=lambda trial: trial["loss"])
    predicted = scores_of(solved(split.train).head(best["l2"]), features, split.test)
    notes = logistic_regression.at_the_end(best["l2"], strengths)
    return FittedValues(predicted, best["l2"], best["loss"], sweep, notes)


def _labels(problem: ValueProblem, split: Split) -> FittedValues:
    """Predict the probability of each label by logistic regression."""
    features, options = problem.features, problem.options
    if features.whole is None:
        raise ConfigError(
            "probe.task=multilabel fits layers in memory only: raise probe.memory_gib above "
            f"{8 * len(features) * features.width / (1 << 30):.1f}, or use probe.method=knn."
        )
    strengths = logistic_regression.L2_GRID if options.l2 is None else (options.l2,)
    scaler = fit_scaler(features, split.fit)
    x, targets = scaler(features.take(split.fit)), torch.from_numpy(problem.values[split.fit])
    truth = torch.from_numpy(problem.values[split.validation])
    trials: list[tuple[float, float, BinaryFit]] = []
    risen = 0
    for l2 in strengths:
        fit = fit_binary(x, targets, l2, trials[-1][2] if trials else None)
        p = torch.from_numpy(_probabilities(fit, features, scaler, split.validation))
        loss = float(torch.nn.functional.binary_cross_entropy(p, truth, reduction="sum")) / len(p)
        risen = risen + 1 if trials and loss > trials[-1][1] else 0
        trials.append((l2, loss, fit))
        if risen == logistic_regression.PATIENCE:
            break
    best, best_loss, start = min(trials, key=lambda trial: trial[1])
    scaler = fit_scaler(features, split.train)
    x, targets = scaler(features.take(split.train)), torch.from_numpy(problem.values[split.train])
    final = fit_binary(x, targets, best, start)
    notes = logistic_regression.at_the_end(best, strengths)
    if final.gradient > logistic_regression.TOLERANCE:
        notes.append(
            f"l2={best:g}: L-BFGS has not converged in {final.iterations} iterations (largest "
            f"entry of the gradient {final.gradient:.2g})"
        )
    sweep = [{"l2": l2, "loss": loss} for l2, loss, _ in trials]
    predicted = _probabilities(final, features, scaler, split.test)
    return FittedValues(predicted, best, best_loss, sweep, notes)


def _probabilities(fit: BinaryFit, features: Features, scaler: Scaler, places: Places) -> Matrix:
    """Compute the (n, T) probabilities of the labels at some places."""

    def blocks() -> Iterator[torch.Tensor]:
        for _, block in features.blocks(places):
            yield fit.probabilities(scaler(block)).cpu()

    found: Matrix = torch.cat(list(blocks())).numpy()
    return found


def _squared_error(truth: Matrix, predicted: Matrix) -> float:
    """Return the mean over rows of the squared error, summed over targets."""
    return float(np.square(predicted - truth).sum(1).mean())
