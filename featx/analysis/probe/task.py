"""What a probe predicts: the rows and their targets, the splits, how layers are judged, and what is
grouped from the results.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from featx.analysis.probe import methods
from featx.analysis.probe.comparisons import differences, metric_spreads
from featx.analysis.probe.heads import Head
from featx.analysis.probe.labelled_rows import LabelledRows, TaskKind
from featx.analysis.probe.layer_rows import Problem, layer_tokens, open_vectors, probe_rows
from featx.analysis.probe.methods import FittedProbe
from featx.analysis.probe.metrics import CLASSIFICATION, METRICS, Ints, ProbePredictions
from featx.analysis.probe.records import Choice, Draw, Record, Tested
from featx.analysis.probe.splits import RowSplits, Split, split_rows
from featx.config import Config
from featx.errors import counted
from featx.types import Json

Opened = TypeVar("Opened")
"""A layer as the methods read it."""

Fitted = TypeVar("Fitted")
"""A fitted probe, with its `choice`."""

Entry = dict[str, Any]
"""Entry of probe.json, to which a task adds what it finds."""

COLUMNS = ("layer", "method", "seed", "fold", "split", "key", "group")
"""First columns of predictions.csv and few_shot.csv."""


class Task(ABC, Generic[Opened, Fitted, Tested]):
    """Rows, targets and splits, which are the same for all layers, what differs between tasks, and
    the results of the probes.

    Attributes:
        store: the store that is probed.
        stores: rows of the store, then those of the other one, if any.
        keys: (N,) key of each place: of the training rows first.
        targets: (N,) classes or (N, T) values of all places.
        metrics: metrics of the task; the first one is that of the answer.
        splits: seed -> splits of the rows; `first_splits` are those of the first seed.
        columns: columns of predictions.csv after COLUMNS.
        draws: (layer, method) -> few-shot probes.
        heads: layer -> head for new images, of the first method that has one, and that method.
        folds: (seed, layer, method) -> record of each split.
        entries: (seed, layer, method) -> entry of probe.json.
        layers: layer -> its entry in probe.json, with the methods of the first seed.
    """

    chosen_by: ClassVar[str]
    """Name in probe.json of the validation metric that chooses the layer."""

    memory_remedy: ClassVar[str]
    """What to do if a layer does not fit into the memory of a GPU."""

    def __init__(
        self,
        config: Config,
        kind: TaskKind,
        training: LabelledRows,
        testing: LabelledRows | None = None,
    ) -> None:
        self.config, self.kind = config, kind
        self.training, self.testing, self.store = training, testing, training.store
        self.stores = [training] if testing is None else [training, testing]
        self.keys = np.concatenate([each.keys for each in self.stores])
        self.targets = np.concatenate([each.targets for each in self.stores])
        self.metrics = METRICS[kind.name]
        self.columns: Sequence[str] = ()
        self.draws: dict[tuple[str, str], list[Draw]] = {}
        self.heads: dict[str, tuple[Head, str]] = {}
        self.folds: dict[tuple[int, str, str], list[Record[Tested]]] = {}
        self.entries: dict[tuple[int, str, str], Entry] = {}
        self.layers: dict[str, Entry] = {}
        self.seeds = range(config.seed, config.seed + (config.probe.seeds or 1))
        self.methods = config.probe.methods
        self.splits: dict[int, RowSplits] = {}
        for seed in self.seeds:
            rows = split_rows(config.probe, seed, training, testing)
            self.check_splits(rows)
            self.splits[seed] = rows
        self.first_splits = self.splits[config.seed]

    @abstractmethod
    def check_splits(self, rows: RowSplits) -> None:
        """Check that the splits of a seed can be used; notes are added to them."""

    def groups_of(self, seed: int, split: Split) -> Ints | None:
        """Return the group of each test row of a split, or None without groups."""
        groups = self.splits[seed].groups
        return None if groups is None else groups[split.test]

    def line_start(
        self, seed: int, layer: str, method: str, fold: int, role: str, place: int
    ) -> list[object]:
        """Return the columns COLUMNS of a line of predictions.csv or few_shot.csv."""
        rows = self.splits[seed]
        number = fold + 1 if rows.has_folds else ""
        group = "" if rows.groups is None else int(rows.groups[place])
        return [layer, method, seed, number, role, str(self.keys[place]), group]

    @abstractmethod
    def open_layer(self, layer: str, device: torch.device) -> Opened:
        """Open the rows of a layer; those that fit into probe.memory_gib are read."""

    @abstractmethod
    def num_values(self, opened: Opened) -> int:
        """Return the number of values of all rows as the methods read them."""

    @abstractmethod
    def describe_layer(self, layer: str, opened: Opened) -> dict[str, object]:
        """Return the beginning of the layer's entry in probe.json."""

    @abstractmethod
    def fit(self, opened: Opened, seed: int, method: str, split: Split) -> Fitted:
        """Choose a setting on the validation rows, and fit on all training rows."""

    @abstractmethod
    def test(self, opened: Opened, seed: int, split: Split, method: str, fitted: Fitted) -> Tested:
        """Return the results of a fitted probe on the test rows."""

    @abstractmethod
    def judge(self, folds: Sequence[Tested]) -> dict[str, object]:
        """Compute the metrics of the test rows of all folds together, as JSON types."""

    @staticmethod
    @abstractmethod
    def merit(validation: Mapping[str, float]) -> tuple[float, ...]:
        """Return the sort key of layers, the largest of the best one."""

    @abstractmethod
    def first_metric(self, tested: Tested) -> float | None:
        """Compute the metric of the answer for one split; None if it is undefined."""

    def entry(self, records: Sequence[Record[Tested]]) -> Entry:
        """Return the entry of one method and layer in probe.json."""
        choices = [record.choice for record in records]
        return {
            **self.judge([record.tested for record in records]),
            **{
                name: float(np.mean([choice.validation[name] for choice in choices]))
                for name in choices[0].validation
            },
            **self.choice_entries(methods.name_of_choice(records[0].method), choices),
        }

    def choice_entries(self, name: str, choices: Sequence[Choice]) -> Entry:
        """Return the entries about the choices and fits of all folds: the chosen settings, with the
        name 'l2' or 'k', the sweep, details and notes.
        """
        return {
            name: one_or_all([choice.setting for choice in choices]),
            "sweep": one_or_all([choice.sweep for choice in choices]),
            "notes": list(dict.fromkeys(note for choice in choices for note in choice.notes)),
        }

    def finish_method(
        self, opened: Opened, layer: str, method: str, fits: Sequence[Fitted], entry: Entry
    ) -> None:
        """Add to the entry what only the first seed has."""

    def finish_layer(self) -> None:
        """Release what the records need no longer."""

    @abstractmethod
    def result_entries(self, layer: str, tested: Sequence[Tested]) -> Json:
        """Return the entries of probe.json that only this task has, and `notes_on_rows`.

        Args:
            layer: the best layer of the first seed.
            tested: results of its `chosen` on the test rows.
        """

    def notes_on_rows(self) -> list[str]:
        """Return sentences about rows that were left out or leak."""
        rows = self.first_splits
        notes = [*self.training.notes, *rows.notes]
        if rows.grouped is not None and (count := rows.grouped.num_missing):
            notes.append(
                f"{counted(count, 'row has', 'rows have')} no value of "
                f"{self.config.probe.group_column}: each is a group of its own"
            )
        return notes

    def untested_lines(self, seed: int) -> Iterator[list[object]]:
        """Yield the lines of predictions.csv about rows that no split of a seed tests."""
        return iter(())

    @abstractmethod
    def test_columns(self, record: Record[Tested], row: int) -> Iterator[list[object]]:
        """Yield the columns after COLUMNS of each line about a test row of a record."""

    def chosen(self, seed: int) -> list[Record[Tested]]:
        """Return the record that each fold chose among the layers, on its own validation rows.

        In k-fold cross-validation, the validation rows of one fold are test rows of another, so the
        accuracy of the layer that is best over all folds is optimistic. If each fold chooses its
        layer from its own training rows (nested cross-validation: M. Stone, Cross-Validatory Choice
        and Assessment of Statistical Predictions, JRSS B 36, 1974), test rows have no influence on
        the choice.
        """
        of_layers = [
            records
            for (record_seed, _, method), records in self.folds.items()
            if record_seed == seed and method == self.methods[0]
        ]
        return [
            max(records, key=lambda record: self.merit(record.choice.validation))
            for records in zip(*of_layers, strict=True)
        ]

    def answer(self, seed: int) -> Json:
        """Return the entries of probe.json about the best layer of a seed with the first method.

        With several folds and layers the metrics are those of the layers that the folds chose
        (nested validation), which `layer_of_folds` names.
        """
        best, chosen = self._best_layer([seed]), self.chosen(seed)
        about = self.entries[seed, best, self.methods[0]]
        if len(chosen) > 1 and len(self.layers) > 1:
            metrics = self.judge([record.tested for record in chosen])
            about = {**about, "layer_of_folds": [each.layer for each in chosen], **metrics}
        return {"layer": best, "method": self.methods[0], **about}

    def seeds_entry(self) -> dict[str, object]:
        """Return the entry `seeds` of probe.json: means and spreads over the splits of the seeds.
        Return seeds; layer_of_splits, the layer that each split chose on its validation rows, every
        fold of every seed, and chosen, the metrics with it; layers -> method -> metrics; layer, the
        best one by the mean over the validation rows of all seeds; and differences, other layer ->
        entry of `differences`, None if the first metric is not available in every split. A metric
        is given by `spread`.
        """
        names = [metric.key for metric in self.metrics]
        best = self._best_layer(self.seeds)
        return {
            "seeds": list(self.seeds),
            "layer_of_splits": [each.layer for seed in self.seeds for each in self.chosen(seed)],
            "chosen": metric_spreads(names, [self.answer(seed) for seed in self.seeds]),
            "layers": {
                layer: {
                    method: metric_spreads(names, self._of_seeds(layer, method))
                    for method in self.methods
                }
                for layer in self.layers
            },
            "layer": best,
            "differences": self._differences(best, names[0]),
        }

    def split_values(self, layer: str) -> list[float | None]:
        """Return the first metric of a layer with the first method, for each split of each seed."""
        return [
            self.first_metric(record.tested)
            for seed in self.seeds
            for record in self.folds[seed, layer, self.methods[0]]
        ]

    def _best_layer(self, seeds: Sequence[int]) -> str:
        """Return the layer that is best by the mean validation metrics of some seeds; of equally
        good ones over several seeds the first, whatever decides between them in one seed.
        """
        merits = {}
        for layer in self.layers:
            entries = [self.entries[seed, layer, self.methods[0]] for seed in seeds]
            names = self.folds[seeds[0], layer, self.methods[0]][0].choice.validation
            means = {name: float(np.mean([entry[name] for entry in entries])) for name in names}
            merits[layer] = self.merit(means) if len(seeds) == 1 else self.merit(means)[:1]
        return max(merits, key=lambda layer: merits[layer])

    def _of_seeds(self, layer: str, method: str) -> list[dict[str, object]]:
        return [self.entries[seed, layer, method] for seed in self.seeds]

    def _differences(self, best: str, name: str) -> dict[str, object] | None:
        method, by_seed, by_split = self.methods[0], dict[str, Any](), dict[str, Any]()
        for layer in self.layers:
            by_seed[layer] = [entry[name] for entry in self._of_seeds(layer, method)]
            by_split[layer] = self.split_values(layer)
            if None in (*by_seed[layer], *by_split[layer]):
                return None
        splits = [record.split for seed in self.seeds for record in self.folds[seed, best, method]]
        return differences(by_seed, by_split, best, splits)


AnyTask = Task[Any, Any, Any]
"""Task of any kind of labels."""


def one_or_all(values: Sequence[object]) -> object:
    """Return the value of a single split, or the list of those of all folds."""
    return values[0] if len(values) == 1 else list(values)


class RowTask(Task[Problem, FittedProbe, ProbePredictions]):
    """Task of predicting classes, numbers or labels of whole rows."""

    memory_remedy = "Lower probe.memory_gib, so that it is streamed, or use device=cpu."

    def open_layer(self, layer: str, device: torch.device) -> Problem:
        options = self.config.probe
        memory_bytes = options.memory_gib * (1 << 30)
        parts = [probe_rows(each.store, layer, each.rows) for each in self.stores]
        features, tokens = open_vectors(parts, device, memory_bytes), None
        if "attentive" in options.methods:
            tokens = layer_tokens(self.stores, layer, device, memory_bytes)
        num_outputs, seed = len(self.training.classes), self.config.seed
        return Problem(features, self.targets, num_outputs, options, seed, tokens, self.kind.name)

    def num_values(self, opened: Problem) -> int:
        read = opened.features if opened.tokens is None else opened.tokens.features
        return len(read) * read.width

    def describe_layer(self, layer: str, opened: Problem) -> dict[str, object]:
        features = opened.features
        return {
            "features": features.width,
            "reduction": features.parts[0].as_dict(),
            "streamed": features.whole is None,
        }

    def fit(self, opened: Problem, seed: int, method: str, split: Split) -> FittedProbe:
        return methods.fit(replace(opened, seed=seed), method, split)

    def finish_method(
        self, opened: Problem, layer: str, method: str, fits: Sequence[FittedProbe], entry: Entry
    ) -> None:
        """Keep the head for new images: with several folds, one that is fitted on all of them."""
        head = fits[0].head
        if head is None:
            return
        entry["head_fitted_on"] = "train"
        if len(fits) > 1:
            setting = float(statistics.median_low([fit.choice.setting for fit in fits]))
            every = np.arange(len(self.training.rows))
            final = methods.fit_with_setting(opened, method, every, setting)
            of_folds = [fit.choice.details.get("calibration_temperature") for fit in fits]
            if temperatures := [each for each in of_folds if each is not None]:
                entry["calibration_temperature_of_folds"] = temperatures
                final = methods.calibrate(opened, final, statistics.median_low(temperatures))
            is_class = self.kind.name == CLASSIFICATION
            entry |= final.choice.details if is_class else {"head_l2": setting}
            entry["notes"] = list(dict.fromkeys([*entry["notes"], *final.choice.notes]))
            entry["head_fitted_on"] = "all labelled rows"
            assert final.head is not None
            head = final.head
        self.heads.setdefault(layer, (head, method))
