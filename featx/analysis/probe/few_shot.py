"""Probes with few training rows per class: accuracies over several draws, and the file of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from featx.analysis.probe import methods
from featx.analysis.probe.layer_rows import Problem
from featx.analysis.probe.metrics import Ints, mean_and_spread
from featx.analysis.probe.splits import Split, few_shot_places
from featx.analysis.probe.task import COLUMNS, AnyTask
from featx.base import csv_bytes
from featx.types import Json

FEW_SHOT = "1 / rows, as scikit-learn's C=1"
"""Text in probe.json for the penalty of few-shot fits."""


@dataclass(frozen=True)
class Draw:
    """Fit on one random choice of training rows.

    Attributes:
        number: number of the choice, from 0.
        fold: index of the split whose test rows are predicted.
        train: places that were trained on.
        test: (n,) places that are predicted.
        predicted: (n,) predicted classes.
    """

    shots: int
    number: int
    fold: int
    train: Ints
    test: Ints
    predicted: Ints


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
            fitted = methods.fit_with_setting(problem, method, places, chosen)
            predicted = fitted.scores(split.test).argmax(1)
            accuracies.append(float((predicted == problem.y[split.test]).mean()))
            rows.append(len(places))
            rows_of_classes += np.unique(problem.y[places], return_counts=True)[1].tolist()
            draws.append(Draw(shots, number, fold, places, split.test, predicted))
            if len(places) == len(split.train) and len(splits) == 1:
                break  # further draws would have the same rows, and no spread
        chosen_as = option if option is not None else "shots" if method == "knn" else FEW_SHOT
        entry[str(shots)] = {
            **mean_and_spread(accuracies),
            "rows": rows,
            "rows_per_class": [min(rows_of_classes), max(rows_of_classes)],
            methods.name_of_choice(method): chosen_as,
        }
    return entry, draws


def few_shot_csv(task: AnyTask, tested: Mapping[tuple[str, str], Sequence[Draw]]) -> bytes:
    """Return the file few_shot.csv.

    The training rows of a draw are the same for all layers and methods and have one line each,
    without a layer; each test row has a line for each layer and method.
    """
    classes, seed = task.training.classes, task.config.seed
    lines: list[Sequence[object]] = [[*COLUMNS, "true", "predicted", "shots", "draw"]]

    def add(layer: str, method: str, draw: Draw, role: str, place: int, predicted: str) -> None:
        start = task.line_start(seed, layer, method, draw.fold, role, place)
        true = classes[task.targets[place]]
        lines.append([*start, true, predicted, draw.shots, draw.number + 1])

    for draw in next(iter(tested.values())):
        for place in draw.train.tolist():
            add("", "", draw, "train", place, "")
    for (layer, method), draws in tested.items():
        for draw in draws:
            for place, label in zip(draw.test.tolist(), draw.predicted.tolist(), strict=True):
                add(layer, method, draw, "test", place, classes[label])
    return csv_bytes(lines)
