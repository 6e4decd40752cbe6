"""Probes behind one interface: choose a setting, then fit on all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from featx.analysis.probe import (
    attentive_method,
    knn,
    logistic_regression,
    minibatch_regression,
    ridge,
    temperature_scaling,
)
from featx.analysis.probe.heads import Head, Scaler, fit_scaler, scores_of
from featx.analysis.probe.problem import NO_VOTE, FittedProbe, Problem, Scores
from featx.analysis.probe.splits import Places, Split


def fit(problem: Problem, method: str, split: Split) -> FittedProbe:
    """Choose a setting on `split.validation`, then fit on `split.train`."""
    fits = {"linear": _linear, "knn": _knn, "ridge": _ridge, "attentive": attentive_method.fit}
    return fits[method](problem, split)


def fit_with_setting(problem: Problem, method: str, places: Places, chosen: float) -> FittedProbe:
    """Fit on some places with a known penalty or number of neighbours.

    A few rows (few-shot) are read into memory even if the layer is streamed; all rows of a streamed
    layer are streamed again.
    """
    if method == "knn":
        return _fit_knn(problem, places, int(chosen))
    if method == "attentive":
        return attentive_method.fit_with_penalty(problem, places, chosen)
    scaler = fit_scaler(problem.features, places)
    if method == "ridge":
        solution = ridge.solve(problem.features, places, problem.y, problem.num_classes, scaler)
        return _head_probe(problem, solution.head(chosen), chosen)
    return _fit_linear(problem, places, scaler, chosen, None)


def name_of_choice(method: str) -> str:
    """Return the name of the chosen setting: 'l2' or 'k'."""
    return "k" if method == "knn" else "l2"


# ---------------------------------------------------------------------------- linear


def _linear(problem: Problem, split: Split) -> FittedProbe:
    """Logistic regression."""
    option = problem.options.l2
    strengths = logistic_regression.L2_GRID if option is None else (option,)
    scaler = fit_scaler(problem.features, split.fit)
    y = problem.y[split.validation]

    def logits(fit: logistic_regression.Fit) -> Scores:
        """Return the logits of the validation rows."""
        head = Head(scaler, fit.weight, fit.bias, probabilities=False)
        return scores_of(head, problem.features, split.validation)

    def judge(fit: logistic_regression.Fit) -> tuple[float, float]:
        """Return accuracy and loss of a fit on the validation rows."""
        log_p = torch.from_numpy(logits(fit)).log_softmax(1).numpy()
        return logistic_regression.accuracy_and_loss(y, log_p)

    notes: list[str] = []
    if problem.features.whole is not None:
        x = scaler(problem.features.take(split.fit))
        labels = problem.labels(split.fit)
        trials = logistic_regression.sweep(x, labels, problem.num_classes, strengths, judge)
        del x
    else:
        streamed = _fit_streamed(problem, split.fit, scaler, strengths)
        notes += streamed.alarms
        trials = [
            logistic_regression.Trial(l2, *judge(fit), fit)
            for l2, fit in zip(strengths, streamed.fits, strict=True)
        ]
    best = logistic_regression.best_trial(trials)
    notes += logistic_regression.note_grid_end(best.l2, strengths)
    scaler_of_all = fit_scaler(problem.features, split.train)
    fitted = _fit_linear(problem, split.train, scaler_of_all, best.l2, best.fit)
    if problem.options.calibration == "temperature":
        temperature = temperature_scaling.fit_temperature(logits(best.fit), y)
        notes += temperature_scaling.limit_notes(temperature)
        fitted = calibrate(problem, fitted, temperature)
    return FittedProbe(
        fitted.scores,
        best.l2,
        fitted.head,
        (best.accuracy, best.loss),
        [trial.as_dict() for trial in trials],
        notes + fitted.notes,
        fitted.details,
    )


def calibrate(problem: Problem, fitted: FittedProbe, temperature: float) -> FittedProbe:
    """Return a fitted linear probe with its logits divided by a temperature."""
    assert fitted.head is not None
    head = temperature_scaling.scale_logits(fitted.head, temperature)
    details = {**fitted.details, "calibration_temperature": temperature}
    return _head_probe(problem, head, fitted.chosen, fitted.notes, details)


def _fit_linear(
    problem: Problem,
    places: Places,
    scaler: Scaler,
    l2: float,
    start: logistic_regression.Fit | None,
) -> FittedProbe:
    """Fit logistic regression with a known penalty."""
    features, notes = problem.features, list[str]()
    in_memory = features.whole is not None or len(places) * 4 * features.width <= _SMALL_BYTES
    if in_memory:
        x = scaler(features.take(places))
        labels = problem.labels(places)
        fit = logistic_regression.fit_logistic(x, labels, problem.num_classes, l2, start, last=True)
        del x
        solver = "lbfgs"
    else:
        streamed = _fit_streamed(problem, places, scaler, (l2,))
        fit, notes, solver = streamed.fits[0], list(streamed.alarms), "adamw"
    notes += fit.notes(l2)
    head = Head(scaler, fit.weight, fit.bias, probabilities=True)
    details = {
        "solver": solver,
        "iterations": fit.iterations,
        "gradient": fit.max_abs_gradient,
        "converged": fit.converged,
    }
    return _head_probe(problem, head, l2, notes, details)


_SMALL_BYTES = 64 << 20
"""Size up to which rows of a streamed layer, mostly few-shot ones, are read into memory."""


def _fit_streamed(
    problem: Problem, places: Places, scaler: Scaler, strengths: Sequence[float]
) -> minibatch_regression.Streamed:
    """Fit logistic regression on mini-batches."""
    rows = problem.features.parts[0]  # training rows are in the first store
    y = problem.y[: len(rows.rows)]
    return minibatch_regression.fit_streamed(
        rows, places, y, problem.num_classes, scaler, strengths, problem.schedule
    )


def _head_probe(
    problem: Problem,
    head: Head,
    chosen: float,
    notes: Sequence[str] = (),
    details: dict[str, Any] | None = None,
) -> FittedProbe:
    """Return a fitted probe whose scores are those of a head."""
    return FittedProbe(
        lambda places: scores_of(head, problem.features, places),
        chosen,
        head,
        notes=list(notes),
        details=details or {},
    )


# ---------------------------------------------------------------------------- knn


def _knn(problem: Problem, split: Split) -> FittedProbe:
    """kNN probe.

    k is chosen with validation rows that query the other training rows, as in the other methods.
    Among all training rows they would find rows of their own group.
    """
    ks = knn.candidates(len(split.fit), problem.options.k)
    votes_of_k = _votes(problem, split.fit, split.validation, ks)
    y = problem.y[split.validation]
    trials = [
        {"k": k, "accuracy": accuracy, "loss": loss}
        for k, (accuracy, loss) in (
            (k, logistic_regression.accuracy_and_loss(y, np.log(np.maximum(scores, NO_VOTE))))
            for k, scores in votes_of_k.items()
        )
    ]
    best = max(trials, key=lambda trial: (trial["accuracy"], -trial["loss"]))
    fitted = _fit_knn(problem, split.train, int(best["k"]))
    return FittedProbe(fitted.scores, best["k"], None, (best["accuracy"], best["loss"]), trials)


def _fit_knn(problem: Problem, bank: Places, k: int) -> FittedProbe:
    """Return a fitted kNN probe with a bank of places."""
    return FittedProbe(lambda places: _votes(problem, bank, places, (k,))[k], k)


def _votes(problem: Problem, bank: Places, queries: Places, ks: Sequence[int]) -> dict[int, Scores]:
    """Return the shares of votes for several numbers of neighbours."""
    temperature = problem.options.temperature or knn.TEMPERATURE
    return knn.vote(
        problem.features, bank, problem.y, problem.num_classes, queries, ks, temperature
    )


# ---------------------------------------------------------------------------- ridge


def _ridge(problem: Problem, split: Split) -> FittedProbe:
    """Ridge regression."""
    option = problem.options.l2
    strengths = ridge.STRENGTHS if option is None else (option,)
    features, y = problem.features, problem.y[split.validation]

    def solve(places: Places) -> ridge.RidgeSolution:
        scaler = fit_scaler(features, places)
        return ridge.solve(features, places, problem.y, problem.num_classes, scaler)

    solution = solve(split.fit)
    trials = []
    for l2 in strengths:
        scores = scores_of(solution.head(l2), features, split.validation)
        error = float(np.square(scores - np.eye(problem.num_classes)[y]).sum(1).mean())
        accuracy = float((scores.argmax(1) == y).mean())
        trials.append({"l2": l2, "accuracy": accuracy, "loss": error})
    best = max(trials, key=lambda trial: (trial["accuracy"], -trial["loss"]))
    fitted = _head_probe(problem, solve(split.train).head(best["l2"]), best["l2"])
    notes = logistic_regression.note_grid_end(best["l2"], strengths)
    validation = best["accuracy"], best["loss"]
    return FittedProbe(fitted.scores, best["l2"], fitted.head, validation, trials, notes)
