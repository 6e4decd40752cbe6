"""Attentive probe as a method: logistic regression on tokens weighted by a learned query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from featx.analysis.probe import attentive_regression, logistic_regression
from featx.analysis.probe.heads import fit_scaler, scores_of
from featx.analysis.probe.problem import NO_VOTE, FittedProbe, Problem
from featx.analysis.probe.splits import Places, Split
from featx.analysis.probe.tokens import Tokens


def fit(problem: Problem, split: Split) -> FittedProbe:
    """Choose the penalty on `split.validation`, then fit on `split.train`."""
    option = problem.options.l2
    strengths = logistic_regression.L2_GRID if option is None else (option,)
    training = _train(problem, split.fit, strengths)
    y = problem.y[split.validation]
    trials = []
    for l2, head in zip(strengths, training.heads, strict=True):
        scores = scores_of(head, _tokens(problem).features, split.validation)
        accuracy, loss = logistic_regression.accuracy_and_loss(
            y, np.log(np.maximum(scores, NO_VOTE))
        )
        trials.append({"l2": l2, "accuracy": accuracy, "loss": loss})
    best = min(trials, key=lambda trial: trial["loss"])
    fitted = fit_with_penalty(problem, split.train, best["l2"])
    notes = logistic_regression.note_grid_end(best["l2"], strengths)
    return FittedProbe(
        fitted.scores,
        best["l2"],
        fitted.head,
        (best["accuracy"], best["loss"]),
        trials,
        notes,
        fitted.details,
    )


def fit_with_penalty(problem: Problem, places: Places, l2: float) -> FittedProbe:
    """Fit on some places with a known penalty."""
    tokens = _tokens(problem)
    training = _train(problem, places, (l2,))
    (head,) = training.heads
    return FittedProbe(
        lambda queries: scores_of(head, tokens.features, queries),
        l2,
        head,
        details={
            "solver": "adamw",
            "iterations": training.num_steps,
            "tokens": tokens.layout.count,
            "tokens_streamed": tokens.features.whole is None,
        },
    )


def _train(
    problem: Problem, places: Places, strengths: Sequence[float]
) -> attentive_regression.Training:
    """Fit the attentive probe with several penalties."""
    tokens = _tokens(problem)
    rate = problem.options.learning_rate or attentive_regression.LEARNING_RATE
    schedule = replace(problem.schedule, learning_rate=rate)
    scaler = fit_scaler(tokens, places)
    return attentive_regression.fit_attentive(
        tokens, places, problem.y, problem.num_classes, scaler, strengths, schedule
    )


def _tokens(problem: Problem) -> Tokens:
    """Return the tokens of the layer."""
    assert problem.tokens is not None, "the probe checks the layers of an attentive probe"
    return problem.tokens
