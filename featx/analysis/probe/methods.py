"""Probes behind one interface: choose a setting, then fit on all training rows.

Each of them is for classes, numbers or several labels of a row: logistic or ridge regression
(linear), votes or weighted means of neighbours (knn), least squares onto classes (ridge), and
logistic regression on tokens (attentive).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from featx.analysis.layer_vectors import LayerVectors
from featx.analysis.probe import knn, logistic_regression, ridge
from featx.analysis.probe import minibatch_regression as minibatch
from featx.analysis.probe.heads import (
    Head,
    Scaler,
    fit_scaler,
    fit_temperature,
    limit_notes,
    scores_of,
)
from featx.analysis.probe.layer_rows import Problem
from featx.analysis.probe.logistic_regression import Fit
from featx.analysis.probe.metrics import (
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    Ints,
    Matrix,
    mean_and_spread,
)
from featx.analysis.probe.records import Choice, Draw
from featx.analysis.probe.splits import Split, few_shot_places
from featx.errors import ConfigError
from featx.types import Array, Json

NO_VOTE = 1e-30
"""Probability in the loss of a class that has none, so that its logarithm is finite."""

_FEW_SHOT = "1 / rows, as scikit-learn's C=1"
"""Text in probe.json for the penalty of few-shot fits."""

SMALL_BYTES = 64 << 20
"""Size up to which rows of a streamed layer, mostly few-shot ones, are read into memory."""


@dataclass(frozen=True)
class FittedProbe:
    """A fitted probe; `scores` is a function places -> (n, C) scores, of which the largest is the
    prediction, or (n, T) predicted values.
    """

    scores: Callable[[Ints], Matrix]
    choice: Choice
    head: Head | None = None


def fit(problem: Problem, method: str, split: Split) -> FittedProbe:
    """Choose a setting on `split.validation`, then fit on `split.train`.

    The setting with the smallest loss is chosen: the accuracy of a few validation rows takes few
    values, and penalties that make all probabilities nearly equal often have the highest one. With
    classes, kNN and ridge choose by accuracy, because their scores are no fitted probabilities.
    Validation rows of a class without a row in `split.fit` do not count: its logit falls without
    end, so that their loss says how soon a fit ended.
    """
    options, name, solver = problem.options, name_of_choice(method), _solver(problem, method)
    train = split.train
    if problem.task == CLASSIFICATION:
        validation = split.validation
        is_fitted = np.isin(problem.y[validation], problem.y[split.fit])
        split = replace(split, validation=validation[is_fitted])
    grid: Sequence[float]
    if method == "knn":
        grid = knn.candidates(len(split.fit), options.k)
    elif options.l2 is not None:
        grid = (options.l2,)
    else:
        grid = ridge.STRENGTHS if solver == "ridge" else logistic_regression.L2_GRID
    fits: list[Fit] = []
    if solver == "logistic":
        trials, fits, logits = _sweep_logistic(problem, split, grid)
    else:
        y = problem.y[split.validation]
        trials = [
            {name: setting, **_quality(problem, method, y, scores)}
            for setting, scores in _scores(problem, method, split.fit, split.validation, grid)
        ]
    if problem.task == CLASSIFICATION and method in ("knn", "ridge"):
        best = max(trials, key=lambda trial: (trial["accuracy"], -trial["loss"]))
    else:
        best = min(trials, key=lambda trial: trial["loss"])
    chosen, notes = best[name], list[str]()
    if method != "knn":
        notes += logistic_regression.note_grid_end(chosen, grid)
    start = fits[trials.index(best)] if fits else None
    fitted = fit_with_setting(problem, method, train, chosen, start)
    if method == "linear" and options.calibration == "temperature" and start is not None:
        temperature = fit_temperature(logits(start), problem.y[split.validation])
        notes += limit_notes(temperature)
        fitted = calibrate(problem, fitted, temperature)
    choice = Choice(
        chosen,
        {f"validation_{key}": best[key] for key in ("accuracy", "loss") if key in best},
        trials,
        notes + fitted.choice.notes,
        fitted.choice.details,
    )
    return replace(fitted, choice=choice)


def fit_with_setting(
    problem: Problem, method: str, places: Ints, chosen: float, start: Fit | None = None
) -> FittedProbe:
    """Fit on some places with a known penalty or number of neighbours.

    A few rows (few-shot) are read into memory even if the layer is streamed; all rows of a streamed
    layer are streamed again.
    """
    if method == "knn":
        k = int(chosen)
        return FittedProbe(lambda queries: knn.vote(problem, places, queries, (k,))[k], Choice(k))
    if _solver(problem, method) == "logistic":
        return _fit_logistic(problem, places, chosen, start)
    features, (head,), details = _heads(problem, method, places, (chosen,))
    return FittedProbe(partial(scores_of, head, features), Choice(chosen, details=details), head)


def fit_few_shot(problem: Problem, method: str, splits: Sequence[Split]) -> tuple[Json, list[Draw]]:
    """Fit with few rows per class over several draws, with fixed settings. Return the entry
    `few_shot` of probe.json, by number of rows, and all draws.
    """
    options, entry, draws = problem.options, {}, list[Draw]()
    option = options.k if method == "knn" else options.l2
    for shots in options.all_shots:
        accuracies, rows, rows_of_classes = [], [], list[int]()
        for number in range(options.seeds or 5):
            fold = number % len(splits)
            split = splits[fold]
            places = few_shot_places(problem.y, split.train, shots, number, problem.seed)
            chosen = option if option is not None else shots if method == "knn" else 1 / len(places)
            fitted = fit_with_setting(problem, method, places, chosen)
            predicted = fitted.scores(split.test).argmax(1)
            accuracies.append(float((predicted == problem.y[split.test]).mean()))
            rows.append(len(places))
            rows_of_classes += np.unique(problem.y[places], return_counts=True)[1].tolist()
            draws.append(Draw(shots, number, fold, places, split.test, predicted))
            if len(places) == len(split.train) and len(splits) == 1:
                break  # further draws would have the same rows, and no spread
        chosen_as = option if option is not None else "shots" if method == "knn" else _FEW_SHOT
        entry[str(shots)] = {
            **mean_and_spread(accuracies),
            "rows": rows,
            "rows_per_class": [min(rows_of_classes), max(rows_of_classes)],
            name_of_choice(method): chosen_as,
        }
    return entry, draws


def name_of_choice(method: str) -> str:
    """Return the name of the chosen setting: 'l2' or 'k'."""
    return "k" if method == "knn" else "l2"


def calibrate(problem: Problem, fitted: FittedProbe, temperature: float) -> FittedProbe:
    """Return a fitted linear probe with its logits divided by a temperature."""
    head = fitted.head
    assert head is not None
    head = replace(head, weight=head.weight / temperature, bias=head.bias / temperature)
    details = {**fitted.choice.details, "calibration_temperature": temperature}
    choice = replace(fitted.choice, details=details)
    return FittedProbe(partial(scores_of, head, problem.features), choice, head)


def _solver(problem: Problem, method: str) -> str:
    """Return 'logistic', 'ridge', 'knn' or 'attentive'. The method `linear` is logistic regression
    for classes and labels, and ridge regression for numbers.
    """
    if method != "linear":
        return method
    return "ridge" if problem.task == REGRESSION else "logistic"


def _scores(
    problem: Problem, method: str, places: Ints, queries: Ints, settings: Sequence[float]
) -> Iterator[tuple[float, Matrix]]:
    """Fit on some places with several settings, and yield the scores of others with each."""
    if method == "knn":
        # Validation rows query the other training rows, as in the other methods. Among all training
        # rows they would find rows of their own group.
        ks = [int(k) for k in settings]
        yield from knn.vote(problem, places, queries, ks).items()
        return
    features, heads, _ = _heads(problem, method, places, settings)
    for setting, head in zip(settings, heads, strict=True):
        yield setting, scores_of(head, features, queries)


def _quality(problem: Problem, method: str, y: Array, scores: Matrix) -> Json:
    """Return the loss of scores on validation rows, and with classes the accuracy.

    The loss is the squared error, or of classes by other methods than ridge the cross-entropy.
    """
    if problem.task != CLASSIFICATION:
        return {"loss": _squared_error(y, scores)}
    if method == "ridge":
        one_hot = np.zeros_like(scores)
        one_hot[np.arange(len(y)), y] = 1
        loss = _squared_error(one_hot, scores)
        return {"accuracy": float((scores.argmax(1) == y).mean()), "loss": loss}
    log_p = np.log(np.maximum(scores, NO_VOTE))
    accuracy, loss = logistic_regression.accuracy_and_loss(y, log_p)
    return {"accuracy": accuracy, "loss": loss}


def _squared_error(truth: Matrix, predicted: Matrix) -> float:
    return float(np.square(predicted - truth).sum(1).mean())


def _heads(
    problem: Problem, method: str, places: Ints, settings: Sequence[float]
) -> tuple[LayerVectors, Sequence[Head], dict[str, Any]]:
    """Fit least squares, or logistic regression on tokens, with several penalties. Return what the
    heads read, a head for each penalty, and details about the fits.
    """
    if _solver(problem, method) == "ridge":
        head_of = ridge.solve(problem, places)
        return problem.features, [replace(head_of(l2), task=problem.task) for l2 in settings], {}
    tokens = problem.tokens
    assert tokens is not None, "the probe checks the layers of an attentive probe"
    heads, num_steps = minibatch.fit_attentive(
        problem, places, fit_scaler(tokens, places), settings
    )
    details = {
        "solver": "adamw",
        "iterations": num_steps,
        "tokens": tokens.layout.count,
        "tokens_streamed": tokens.features.whole is None,
    }
    return tokens.features, heads, details


def _sweep_logistic(
    problem: Problem, split: Split, grid: Sequence[float]
) -> tuple[list[dict[str, Any]], list[Fit], Callable[[Fit], Matrix]]:
    """Try the penalties of logistic regression. Return the trials, their fits, and a function fit
    -> logits of the validation rows.
    """
    features, y = problem.features, problem.y[split.validation]
    is_multilabel = problem.task == MULTILABEL
    if is_multilabel and features.whole is None:
        raise ConfigError(
            "probe.task=multilabel fits layers in memory only: raise probe.memory_gib above "
            f"{8 * len(features) * features.width / (1 << 30):.1f}, or use probe.method=knn."
        )
    scaler = fit_scaler(features, split.fit)

    def logits(fit: Fit) -> Matrix:
        head = Head(scaler, fit.weight, fit.bias, probabilities=False)
        return scores_of(head, features, split.validation)

    def judge(fit: Fit) -> tuple[float, float]:
        """Return accuracy and loss of a fit on the validation rows."""
        if is_multilabel:
            scores = scores_of(_logistic_head(problem, scaler, fit), features, split.validation)
            # The logit of a label that no row of the fit has, or all have, moves without end.
            is_learnt = np.ptp(problem.y[split.fit], axis=0) > 0
            p, truth = torch.from_numpy(scores[:, is_learnt]), torch.from_numpy(y[:, is_learnt])
            losses = torch.nn.functional.binary_cross_entropy(p, truth, reduction="sum")
            return float("nan"), float(losses) / len(y)
        log_p = torch.from_numpy(logits(fit)).log_softmax(1).numpy()
        return logistic_regression.accuracy_and_loss(y, log_p)

    if features.whole is not None:
        x, targets = scaler.standardise(features.take(split.fit)), _targets(problem, split.fit)
        trials = logistic_regression.sweep(
            x, targets, problem.num_outputs, grid, judge, _logistic_loss(problem)
        )
        del x
    else:
        fits = minibatch.fit_streamed(problem, split.fit, scaler, grid)
        trials = [
            logistic_regression.Trial(l2, *judge(fit), fit)
            for l2, fit in zip(grid, fits, strict=True)
        ]
    entries = [
        {"l2": trial.l2, "loss": trial.loss} if is_multilabel else trial.as_dict()
        for trial in trials
    ]
    return entries, [trial.fit for trial in trials], logits


def _fit_logistic(problem: Problem, places: Ints, l2: float, start: Fit | None) -> FittedProbe:
    features, solver = problem.features, "lbfgs"
    scaler = fit_scaler(features, places)
    if features.whole is not None or len(places) * 4 * features.width <= SMALL_BYTES:
        x, targets = scaler.standardise(features.take(places)), _targets(problem, places)
        fit = logistic_regression.fit_logistic(
            x, targets, problem.num_outputs, l2, start, True, _logistic_loss(problem)
        )
        del x
    else:
        (fit,), solver = minibatch.fit_streamed(problem, places, scaler, (l2,)), "adamw"
    details = {
        "solver": solver,
        "iterations": fit.iterations,
        "gradient": fit.max_abs_gradient,
        "converged": fit.converged,
    }
    head = _logistic_head(problem, scaler, fit)
    choice = Choice(l2, notes=fit.notes(l2), details=details)
    return FittedProbe(partial(scores_of, head, features), choice, head)


def _logistic_head(problem: Problem, scaler: Scaler, fit: Fit) -> Head:
    return Head(scaler, fit.weight, fit.bias, probabilities=True, task=problem.task)


def _logistic_loss(problem: Problem) -> logistic_regression.Loss:
    is_multilabel = problem.task == MULTILABEL
    return logistic_regression.label_loss if is_multilabel else logistic_regression.class_loss


def _targets(problem: Problem, places: Ints) -> torch.Tensor:
    """Return the classes of some places, (n,) int64, or their labels, (n, T) float32."""
    targets = torch.from_numpy(problem.y[places])
    targets = targets.float() if problem.task == MULTILABEL else targets
    return targets.to(problem.features.device)
