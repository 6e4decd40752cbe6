"""Labels that a probe contradicts: out-of-fold probabilities of the given labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe import methods
from featx.analysis.probe.groups import row_groups
from featx.analysis.probe.labelled_rows import SEPARATOR, LabelledRows, labelled_rows, task_kind
from featx.analysis.probe.layer_rows import Problem, open_vectors, probe_rows, threads_for
from featx.analysis.probe.metrics import Ints, Matrix, require_scikit_learn
from featx.analysis.probe.splits import RowSplits, check_split, small_classes, split_rows
from featx.base import check_memory, choose_device, exact_cuda, rows_of_block
from featx.config import ProbeConfig
from featx.errors import ConfigError, DataError, counted
from featx.store import FeatureStore, open_if_path
from featx.types import rows_by_label

_TOLERANCE = 1e-6
"""Amount by which a probability may be below the threshold of its class, as in cleanlab."""


@dataclass(frozen=True, eq=False)
class JudgedLabels:
    """Labels of rows, and what a probe says that was fitted without these rows.

    Attributes:
        rows: (n,) int64 judged rows of the store, increasing.
        labels: (n,) int64 given class of each, in [0, C).
        confidences: (n,) float64 probability of the given label, from the fold that did not train
            on the row; the smallest are the least credible labels.
        predicted: (n,) int64 most probable class.
        p_predicted: (n,) float64 probability of the most probable class.
        are_doubtful: (n,) bool, whether the given label is off the diagonal of the confident joint.
        classes: C names.
        notes: sentences about rows that were left out.
    """

    rows: Ints
    labels: Ints
    confidences: Matrix
    predicted: Ints
    p_predicted: Matrix
    are_doubtful: npt.NDArray[np.bool_]
    classes: tuple[str, ...]
    folds: int
    notes: tuple[str, ...]


def confident_labels(
    labels: Ints, num_classes: int, blocks: Callable[[], Iterable[tuple[Ints, Matrix]]]
) -> tuple[Matrix, Ints, Matrix, npt.NDArray[np.bool_]]:
    """Judge (n,) labels by probabilities, of which `blocks` gives some places and their (m, C)
    values at a time, the same each time. Return `confidences`, `predicted`, `p_predicted` and
    `are_doubtful` as in `JudgedLabels`.

    A class is confident in a row if its probability reaches the mean over the rows with that
    label. A label is doubtful if the most probable class is another one, and so is the confident
    one (C. Northcutt, L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in Dataset
    Labels, JAIR 70, 2021; cleanlab's filter_by='confident_learning').
    """
    confidences, p_predicted = np.empty(len(labels)), np.empty(len(labels))
    predicted, are_doubtful = np.zeros(len(labels), np.int64), np.zeros(len(labels), np.bool_)
    for places, probabilities in blocks():
        row = np.arange(len(places))
        confidences[places] = probabilities[row, labels[places]]
        predicted[places] = probabilities.argmax(1)
        p_predicted[places] = probabilities[row, predicted[places]]
    thresholds = np.full(num_classes, np.inf)
    for members in rows_by_label(labels):
        thresholds[labels[members[0]]] = confidences[members].mean()
    for places, probabilities in blocks():
        is_confident = probabilities >= thresholds - _TOLERANCE
        several = is_confident.sum(1) > 1
        confident = np.where(several, predicted[places], is_confident.argmax(1))
        is_other = is_confident.any(1) & (confident != labels[places])
        are_doubtful[places] = is_other & (predicted[places] != labels[places])
    return confidences, predicted, p_predicted, are_doubtful


def judge_labels(
    store: FeatureStore | str | os.PathLike[str],
    layer: str,
    folds: int = 5,
    *,
    label_column: str | None = None,
    seed: int = 0,
    device: str = "auto",
    on_progress: Callable[[int], None] | None = None,
) -> JudgedLabels:
    """Predict each labelled row by the linear probe of job=probe, fitted on the other folds.

    The folds, the choice of the penalty and the probabilities are those of job=probe with
    probe.folds.

    Args:
        store: open store or its path.
        label_column: column of the store with the labels; None takes the store's labels.
        on_progress: called with 1 after each fold.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        DataError: there are no labels or too few, or they are no classes.
        StoreError: rows of the store are missing.
        LayerError: the store has no such layer.
    """
    require_scikit_learn()
    store = open_if_path(store)
    options = ProbeConfig(folds=folds, label_column=label_column)
    labelled = _rows_with_one_class(store, options)
    chosen = choose_device(device)
    splits = _splits(labelled, options, seed)
    num_scores = 2 * len(labelled.classes) * max(len(each.validation) for each in splits.splits)
    check_memory(
        8 * num_scores,
        f"The probabilities of {len(labelled.classes)} classes",
        "Take labels with fewer classes (probe.label_column).",
    )
    parts = [probe_rows(store, layer, labelled.rows)]
    features = open_vectors(parts, chosen, options.memory_gib * (1 << 30))
    problem = Problem(features, labelled.y, len(labelled.classes), options, seed)
    num_classes = len(labelled.classes)
    fits: list[methods.FittedProbe] = []
    judged = np.sort(splits.test_places)
    labels = labelled.y[judged]

    def blocks() -> Iterator[tuple[Ints, Matrix]]:
        # The probabilities of all rows may not fit into memory.
        step = rows_of_block(8 * num_classes)
        for split, fitted in zip(splits.splits, fits, strict=True):
            for start in range(0, len(split.test), step):
                places = split.test[start : start + step]
                yield np.searchsorted(judged, places), fitted.scores(places)

    with threads_for(len(features) * features.width, chosen), torch.no_grad(), exact_cuda:
        for split in splits.splits:
            fits.append(methods.fit(problem, "linear", split))
            if on_progress is not None:
                on_progress(1)
        judgement = confident_labels(labels, num_classes, blocks)
    notes = (*labelled.notes, *splits.notes, *small_classes(labelled, splits, folds))
    return JudgedLabels(
        labelled.rows[judged], labels, *judgement, labelled.classes, folds=folds, notes=notes
    )


def _rows_with_one_class(store: FeatureStore, options: ProbeConfig) -> LabelledRows:
    """Return the labelled rows, or say why a label cannot be judged."""
    column = options.label_column
    name = "the label of a row" if column is None else f"probe.label_column={column}"
    if task_kind(store, options).name != "classification":
        raise DataError(
            f"{name} is a number with a fraction. job=mislabelled judges classes, of which one is "
            "right; job=probe probe.task=regression predicts numbers, and "
            "probe/predictions.csv has the true and the predicted one."
        )
    labelled = labelled_rows(store, column)
    # A class of the store, such as the name of a folder, is one class whatever its name.
    several = [each for each in labelled.classes if SEPARATOR in each]
    if several and column is not None:
        raise DataError(
            f"{name} is a list of several labels, such as {several[0]!r}. job=mislabelled judges "
            "one label a row; job=probe probe.task=multilabel predicts several, and "
            "probe/predictions.csv has the probability of each."
        )
    if len(labelled.classes) < 2:
        raise DataError(
            f"{store.root} has rows of the class {labelled.classes[0]!r} only; a label can be "
            "wrong where there are two classes or more."
        )
    return labelled


def _splits(labelled: LabelledRows, options: ProbeConfig, seed: int) -> RowSplits:
    """Divide the rows into folds that a probe can be fitted on."""
    try:
        splits = split_rows(options, seed, labelled)
        for split in splits.splits:
            check_split(split, labelled.y, labelled.classes, "row")
    except DataError as error:
        grouped = row_groups(labelled)
        groups = ""
        if grouped is not None:
            num_groups = counted(grouped.num_groups, "group")
            groups = f" in {num_groups} ({grouped.by}; a group stays whole)"
        raise ConfigError(
            f"probe.folds={options.folds}: {counted(len(labelled.rows), 'labelled row')} of "
            f"{len(labelled.classes)} classes{groups} cannot be divided into so many folds that "
            "each have rows to train on and to test. Give fewer folds, or more images of a class."
        ) from error
    return splits
