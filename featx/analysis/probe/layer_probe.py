"""Probe of one layer with all methods: fits, tests, metrics and the entry of probe.json."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from featx.analysis.probe import methods
from featx.analysis.probe.few_shot import Draw, fit_few_shot
from featx.analysis.probe.heads import Head
from featx.analysis.probe.layer_choice import LayerChoice
from featx.analysis.probe.layer_rows import Features, LayerRows, layer_vectors
from featx.analysis.probe.leakage import NearDuplicates, near_duplicates, repeated_rows
from featx.analysis.probe.metrics import ProbePredictions, metrics_of_folds
from featx.analysis.probe.problem import FittedProbe, Problem
from featx.analysis.probe.row_predictions import RowPredictions, join_folds
from featx.analysis.probe.task import ProbeTask
from featx.analysis.probe.threads import threads_for
from featx.analysis.probe.tokens import Tokens, layer_tokens
from featx.config import Config


@dataclass(frozen=True)
class LayerProbe:
    """Results of all methods on one layer.

    Attributes:
        about: the layer's entry in probe.json.
        head: head of the first method that has one, or None.
        head_method: that method, or None.
        tested: method -> predictions for the test rows.
        near: near-duplicates of test rows, or None if this layer was not used to find them.
        few_shot: method -> draws of its few-shot probes; empty without them.
    """

    about: dict[str, Any]
    head: Head | None
    head_method: str | None
    tested: dict[str, RowPredictions]
    near: NearDuplicates | None
    few_shot: dict[str, list[Draw]]


@dataclass(frozen=True)
class AdditionalResults:
    """Choice of the results that a probe of a layer computes in addition to its metrics.

    Attributes:
        near_duplicates: whether to find near-duplicates of test rows with the vectors of the layer.
        head: whether to fit a head for new images and the few-shot probes.
        scores: whether to keep the scores of all classes.
    """

    near_duplicates: bool
    head: bool
    scores: bool


@dataclass(frozen=True)
class LayerFeatures:
    """Rows of one layer, training rows first.

    Attributes:
        vectors: one vector for each row.
        tokens: its tokens, or None without the attentive probe.
    """

    vectors: Features
    tokens: Tokens | None

    @property
    def num_values(self) -> int:
        """Number of values of all rows as the methods read them."""
        read = self.vectors if self.tokens is None else self.tokens.features
        return len(read) * read.width


def layer_features(
    config: Config, task: ProbeTask, layer: str, device: torch.device
) -> LayerFeatures:
    """Open the rows of a layer; those that fit into probe.memory_gib are read."""
    labelled = [each for each in (task.training, task.testing) if each is not None]
    memory_bytes = config.probe.memory_gib * (1 << 30)
    vectors = Features([layer_vectors(each, layer) for each in labelled], device, memory_bytes)
    tokens = None
    if "attentive" in config.probe.methods:
        tokens = layer_tokens(labelled, layer, device, memory_bytes)
    return LayerFeatures(vectors, tokens)


def probe_layer(
    config: Config,
    task: ProbeTask,
    layer: str,
    features: LayerFeatures,
    choice: LayerChoice,
    extras: AdditionalResults,
) -> LayerProbe:
    """Probe one layer with all methods."""
    options, vectors = config.probe, features.vectors
    problem = Problem(
        vectors, task.y, len(task.training.classes), options, task.seed, features.tokens
    )
    about: dict[str, Any] = {
        "features": vectors.width,
        "reduction": reduction_entry(vectors.parts[0]),
        "streamed": vectors.whole is None,
        "repeated_rows": repeated_rows(vectors, task.splits) if extras.head else None,
    }
    head, head_method, near = None, None, None
    tested: dict[str, RowPredictions] = {}
    draws: dict[str, list[Draw]] = {}
    with threads_for(features.num_values, vectors.device):
        if extras.near_duplicates:
            near = near_duplicates(vectors, layer, task.splits)
        for method in options.methods:
            started_at = time.perf_counter()
            fits = [methods.fit(problem, method, split) for split in task.splits]
            folds = _test_predictions(problem, method, task, fits)
            if method == options.methods[0]:
                choice.offer(layer, [each.validation for each in fits if each.validation], folds)
            about[method], fitted, method_draws = _entry(problem, method, task, fits, folds, extras)
            if method_draws:
                draws[method] = method_draws
            about[method]["seconds"] = round(time.perf_counter() - started_at, 3)
            tested[method] = join_folds(folds, extras.scores)
            if head is None and fitted is not None:
                head, head_method = fitted, method
    return LayerProbe(about, head, head_method, tested, near, draws)


def reduction_entry(rows: LayerRows) -> dict[str, Any]:
    """Describe what the store holds of the layer, and how the probe makes vectors of it."""
    attrs = rows.store[rows.layer].attrs
    return {
        "layer": str(attrs.get("layer", "")),
        "capture": str(attrs.get("capture", "")),
        "stored": str(attrs.get("reduce", "")),
        "shape": list(rows.store[rows.layer].shape[1:]),
        "then": rows.reduction,
        "axes": list(rows.pooled or ()),
    }


def _test_predictions(
    problem: Problem, method: str, task: ProbeTask, fits: Sequence[FittedProbe]
) -> list[ProbePredictions]:
    """Return the predictions for the test rows of each split."""
    return [
        ProbePredictions(
            problem.y[split.test],
            fitted.scores(split.test),
            method != "ridge",
            None if task.groups is None else task.groups[split.test],
            int(fitted.chosen) if method == "knn" else None,
        )
        for split, fitted in zip(task.splits, fits, strict=True)
    ]


def _entry(
    problem: Problem,
    method: str,
    task: ProbeTask,
    fits: Sequence[FittedProbe],
    folds: Sequence[ProbePredictions],
    extras: AdditionalResults,
) -> tuple[dict[str, Any], Head | None, list[Draw]]:
    """Return the entry of one method in probe.json, the head or None, and the few-shot draws."""
    name = methods.name_of_choice(method)
    validation = [fitted.validation for fitted in fits if fitted.validation is not None]
    about = metrics_of_folds(folds)
    about |= {
        "validation_accuracy": float(np.mean([accuracy for accuracy, _ in validation])),
        "validation_loss": float(np.mean([loss for _, loss in validation])),
        name: fits[0].chosen,
        "sweep": fits[0].sweep,
        **fits[0].details,
    }
    notes = [
        note if len(fits) == 1 else f"fold {number} of {len(fits)}: {note}"
        for number, fitted in enumerate(fits, 1)
        for note in fitted.notes
    ]
    head, fitted_on = fits[0].head, "train"
    if len(fits) > 1:
        chosen = float(statistics.median_low([fitted.chosen for fitted in fits]))
        about |= {
            name: chosen,
            f"{name}_of_folds": [fitted.chosen for fitted in fits],
            "sweep": [fitted.sweep for fitted in fits],
        }
        if head is not None and extras.head:
            every = np.arange(len(task.training.rows))
            final = methods.fit_with_setting(problem, method, every, chosen)
            fold_temperatures = [fitted.details.get("calibration_temperature") for fitted in fits]
            if temperatures := [each for each in fold_temperatures if each is not None]:
                about["calibration_temperature_of_folds"] = temperatures
                final = methods.calibrate(problem, final, statistics.median_low(temperatures))
            head, fitted_on, notes = final.head, "all labelled rows", [*notes, *final.notes]
            about |= final.details
    if head is not None:
        about["head_fitted_on"] = fitted_on
    draws = list[Draw]()
    if problem.options.all_shots and extras.head:
        about["few_shot"], draws = fit_few_shot(problem, method, task)
    about["notes"] = list(dict.fromkeys(notes))
    return about, head, draws
