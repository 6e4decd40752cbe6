"""Probe of classes: metrics, near-duplicates, few-shot probes and comparisons."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from featx.analysis.probe.class_metrics import bootstrap_entry, prediction_metrics
from featx.analysis.probe.comparisons import compare_with_best, compared_store_entry
from featx.analysis.probe.knn import K_GRID
from featx.analysis.probe.labelled_rows import (
    TaskKind,
    labelled_rows,
    match_classes,
    open_other_store,
)
from featx.analysis.probe.layer_rows import ATTENTIVE, Problem, probe_rows, require_tokens
from featx.analysis.probe.leakage import NEAR_COSINE, NearDuplicates, near_duplicates, repeated_rows
from featx.analysis.probe.methods import FittedProbe, fit_few_shot
from featx.analysis.probe.metrics import ProbePredictions, join_predictions, mean_and_spread
from featx.analysis.probe.output_files import read_probe
from featx.analysis.probe.records import Choice, Record
from featx.analysis.probe.splits import RowSplits, Split, check_split, small_classes
from featx.analysis.probe.task import Entry, RowTask, one_or_all
from featx.base import check_memory
from featx.config import Config, listed_stores
from featx.errors import DataError, counted
from featx.store import FeatureStore, layout
from featx.types import Json

SCORE = "score:"
"""Beginning of the name of the column of a class or label, which its name follows."""

MAX_SCORES = 1 << 24
"""Number of scores up to which predictions.csv has a column per class, about 300 MB."""

_FEW_GROUPS = 20
"""Number of groups of test rows below which the intervals of the bootstrap are too narrow."""

PAIRS_LISTED = 50
"""Maximum number of pairs of near-duplicates that probe.json lists."""

_COLUMNS = ("true", "predicted", "p_true", "p_predicted", "near_duplicate")


class ClassTask(RowTask):
    """Task of predicting the class of each row; `max_scores` is that of `run_probe`."""

    chosen_by = "validation_accuracy"

    def __init__(
        self,
        config: Config,
        store: FeatureStore,
        kind: TaskKind,
        layers: Sequence[str],
        max_scores: int,
    ) -> None:
        options = config.probe
        if "attentive" in options.methods:
            require_tokens(store, layers, ATTENTIVE)
        # Read before the probe, so that a mistake is reported at once and store=[A,A] works.
        others = listed_stores(config.store or "")[1:]
        self._other = read_probe(others[0]) if others else None
        training, testing = labelled_rows(store, options.label_column), None
        if len(training.classes) < 2:
            raise DataError(
                f"{store.root} has rows of the class {training.classes[0]!r} only; a probe needs "
                "two classes or more. If data.limit took the first images: data.sample=N, with "
                "another out=DIR, takes some of each class."
            )
        if options.test_store is not None:
            other = open_other_store(store, options.test_store, layers)
            testing = match_classes(labelled_rows(other, options.label_column), training.classes)
        super().__init__(config, kind, training, testing)
        self._max_scores = max_scores
        num_tested = sum(len(rows.test_places) for rows in self.splits.values())
        # Those of one layer and of the chosen layers are kept until the layer ends.
        num_kept = num_tested * (len(options.methods) + (len(layers) > 1))
        # kNN keeps the votes of the validation rows for every k that it tries.
        num_tried = len(K_GRID) if "knn" in options.methods and options.k is None else 1
        most_judged = max(len(split.validation) for split in self.first_splits.splits)
        num_judged = (num_tried + 1) * most_judged
        check_memory(
            8 * (num_kept + num_judged) * len(training.classes),
            f"The probabilities of {len(training.classes)} classes",
            "Test fewer rows (a smaller probe.test_share, without probe.folds), or give fewer "
            "methods or seeds.",
        )
        num_scores = num_tested * len(training.classes) * len(layers) * len(options.methods)
        self._keeps_scores = num_scores <= max_scores
        names = [f"{SCORE}{name}" for name in training.classes] if self._keeps_scores else []
        self.columns = [*_COLUMNS, *names]
        self._widest = max(
            layers, key=lambda layer: probe_rows(training.store, layer, training.rows).width
        )
        self._near: dict[int, NearDuplicates] = {}

    def check_splits(self, rows: RowSplits) -> None:
        if self.testing is None and self.config.probe.split is None:
            folds = rows.settings.get("folds", 2)
            rows.notes.extend(small_classes(self.training, rows, folds))
        grouped = rows.grouped
        unit = "row" if rows.groups is None or grouped is None else f"group ({grouped.by})"
        has_share = "test_share" in rows.settings
        for split in rows.splits:
            check_split(split, self.targets, self.training.classes, unit, has_share)

    def describe_layer(self, layer: str, opened: Problem) -> dict[str, object]:
        features = opened.features
        if layer == self._widest:
            for seed, rows in self.splits.items():
                self._near[seed] = near_duplicates(features, layer, rows.splits)
        repeated = repeated_rows(features, self.first_splits.splits)
        return {**super().describe_layer(layer, opened), "repeated_rows": repeated}

    def test(
        self, opened: Problem, seed: int, split: Split, method: str, fitted: FittedProbe
    ) -> ProbePredictions:
        return ProbePredictions.of_scores(
            opened.y[split.test],
            fitted.scores(split.test),
            method != "ridge",
            self.groups_of(seed, split),
            int(fitted.choice.setting) if method == "knn" else None,
        )

    def judge(self, folds: Sequence[ProbePredictions]) -> dict[str, object]:
        """Compute the metrics of all rows together; several folds add an entry `folds`."""
        metrics = prediction_metrics(join_predictions(folds))
        if len(folds) > 1:
            metrics["folds"] = mean_and_spread([each.accuracy for each in folds])
        return metrics

    @staticmethod
    def merit(validation: Mapping[str, float]) -> tuple[float, ...]:
        """Return the accuracy; among equal ones the smallest loss decides.

        Both are rounded because means over folds may differ in their last bits.
        """
        accuracy, loss = validation["validation_accuracy"], validation["validation_loss"]
        return round(accuracy, 12), -round(loss, 12)

    def first_metric(self, tested: ProbePredictions) -> float | None:
        return tested.accuracy

    def choice_entries(self, name: str, choices: Sequence[Choice]) -> Entry:
        chosen: Entry = {name: choices[0].setting}
        notes = choices[0].notes
        if len(choices) > 1:
            settings = [choice.setting for choice in choices]
            chosen = {name: float(statistics.median_low(settings)), f"{name}_of_folds": settings}
            notes = [
                f"fold {number} of {len(choices)}: {note}"
                for number, choice in enumerate(choices, 1)
                for note in choice.notes
            ]
        return {
            **chosen,
            "sweep": one_or_all([choice.sweep for choice in choices]),
            **choices[0].details,
            "notes": list(dict.fromkeys(notes)),
        }

    def finish_method(
        self, opened: Problem, layer: str, method: str, fits: Sequence[FittedProbe], entry: Entry
    ) -> None:
        super().finish_method(opened, layer, method, fits, entry)
        if self.config.probe.all_shots:
            splits = self.first_splits.splits
            entry["few_shot"], self.draws[layer, method] = fit_few_shot(opened, method, splits)

    def finish_layer(self) -> None:
        """Drop the scores that neither predictions.csv nor the best layer needs."""
        if self._keeps_scores:
            return
        chosen = {id(record) for seed in self.splits for record in self.chosen(seed)}
        for key, records in self.folds.items():
            self.folds[key] = [
                record
                if id(record) in chosen
                else replace(record, tested=replace(record.tested, scores=None))
                for record in records
            ]

    def result_entries(self, layer: str, tested: Sequence[ProbePredictions]) -> Json:
        options, classes = self.config.probe, list(self.training.classes)
        joined = join_predictions(tested)
        of_layers = {
            name: join_predictions([replace(record.tested, scores=None) for record in records])
            for (seed, name, method), records in self.folds.items()
            if (seed, method) == (self.seeds[0], self.methods[0])
        }
        near, best = self._near_entry(joined), of_layers.pop(layer)
        entries: dict[str, Any] = {
            "classes": classes,
            "near_duplicates": near,
            "paired_tests": compare_with_best(best, of_layers),
            "bootstrap": None,
            "compared_store": None,
            "layer_selection": self._selection_entry(),
        }
        if options.bootstrap is not None:
            entries["bootstrap"] = bootstrap_entry(joined, options.bootstrap)
        if self._other is not None:
            places = self.first_splits.test_places
            checksums = [each.store.image_checksums[each.rows] for each in self.stores]
            entries["compared_store"] = compared_store_entry(
                self._other, joined, self.keys[places], np.concatenate(checksums)[places], classes
            )
        return {**entries, "notes_on_rows": [*self.notes_on_rows(), *self._test_notes(layer, near)]}

    def _test_notes(self, layer: str, near: Json) -> list[str]:
        """Return notes about the test rows and what is not written about them."""
        rows, notes = self.first_splits, list[str]()
        if rows.groups is not None:
            num_groups = len(np.unique(rows.groups[rows.test_places]))
            if num_groups < _FEW_GROUPS:
                notes.append(
                    f"the test rows are of {counted(num_groups, 'group')}; with fewer than "
                    f"{_FEW_GROUPS} the intervals are too narrow"
                )
        if count := self.layers[layer]["repeated_rows"]:
            notes.append(
                f"{counted(count, 'test row has', 'test rows have')} the same vector as a training "
                f"row in {layer}; these may be the same images"
            )
        if near["rows"]:
            notes.append(
                f"{counted(near['rows'], 'test row has', 'test rows have')} a near-duplicate among "
                f"the training rows (cosine of {near['cosine']} or more of the standardised "
                f"{near['layer']}): the accuracy may be too high; probe.group_column keeps rows "
                "that belong together on one side"
            )
        if not self._keeps_scores:
            notes.append(
                f"{layout.PROBE_PREDICTIONS} has no column per class: it would have more than "
                f"{self._max_scores} scores; AUROC and top-5 cannot be recomputed from it"
            )
        return notes

    def untested_lines(self, seed: int) -> Iterator[list[object]]:
        """Yield lines without a layer, so that the file names the split of every row.

        Validation rows of a fold are test rows of another one, so with several folds the role of a
        row that is never tested is 'train'.
        """
        rows = self.splits[seed]
        used = np.unique(np.concatenate([split.train for split in rows.splits]))
        places = np.setdiff1d(used, rows.test_places)
        is_validation = np.isin(places, rows.splits[0].validation) & (not rows.has_folds)
        for place, role in zip(places.tolist(), is_validation.tolist(), strict=True):
            start = self.line_start(seed, "", "", 0, "validation" if role else "train", place)
            name = self.training.classes[self.targets[place]]
            start[3] = ""  # no fold
            yield [*start, name, *[""] * (len(self.columns) - 1)]

    def test_columns(self, record: Record[ProbePredictions], row: int) -> Iterator[list[object]]:
        tested, classes = record.tested, self.training.classes
        near = self._near[record.seed].training_of.get(int(record.split.test[row]))
        yield [
            classes[tested.y[row]],
            classes[tested.predicted[row]],
            "" if tested.p_true is None else float(tested.p_true[row]),
            "" if tested.p_predicted is None else float(tested.p_predicted[row]),
            "" if near is None else self.keys[near],
            *(tested.class_scores[row].tolist() if self._keeps_scores else ()),
        ]

    def _near_entry(self, tested: ProbePredictions) -> Json:
        near, keys = self._near[self.config.seed], self.keys
        checked = near.not_checked is None
        is_without = ~np.isin(self.first_splits.test_places, near.test)
        pairs = zip(near.test.tolist(), near.training.tolist(), near.cosines.tolist(), strict=True)
        return {
            "layer": near.layer,
            "cosine": NEAR_COSINE,
            "rows": len(near.test) if checked else None,
            "not_checked": near.not_checked,
            "without": tested.accuracy_of(is_without) if checked else None,
            "pairs": [
                {"test": str(keys[a]), "training": str(keys[b]), "cosine": round(cosine, 4)}
                for a, b, cosine in list(pairs)[:PAIRS_LISTED]
            ],
        }

    def _selection_entry(self) -> Json | None:
        """Return the entry `layer_selection` of probe.json; None with a single layer.

        The highest of several test accuracies is too high on average, because the test rows chose
        it. Each fold of each seed therefore chooses its layer on its own validation rows, and only
        the chosen layer is tested (nested selection: G. Cawley and N. Talbot, On Over-fitting in
        Model Selection and Subsequent Selection Bias in Performance Evaluation, JMLR 11, 2010).
        """
        if len(self.layers) == 1:
            return None
        chosen: list[dict[str, Any]] = [
            {
                "seed": seed,
                "fold": record.fold + 1 if self.splits[seed].has_folds else None,
                "layer": record.layer,
                "validation_accuracy": self.merit(record.choice.validation)[0],
                "accuracy": record.tested.accuracy,
            }
            for seed in self.seeds
            for record in self.chosen(seed)
        ]
        means = {
            layer: np.mean(np.array(self.split_values(layer), np.float64)) for layer in self.layers
        }
        highest = max(means, key=lambda layer: means[layer])
        return {
            "splits": chosen,
            "counts": dict(Counter(split["layer"] for split in chosen).most_common()),
            "accuracy": mean_and_spread([split["accuracy"] for split in chosen]),
            "highest_on_test": {"layer": highest, "accuracy": float(means[highest])},
        }
