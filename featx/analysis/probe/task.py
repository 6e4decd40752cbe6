"""What a probe predicts: the rows and their targets, the splits, and how layers are judged."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe import methods
from featx.analysis.probe.groups import missing_group_notes
from featx.analysis.probe.heads import Head
from featx.analysis.probe.labelled_rows import LabelledRows, TaskKind
from featx.analysis.probe.layer_rows import Features, layer_tokens, layer_vectors
from featx.analysis.probe.methods import FittedProbe, Problem
from featx.analysis.probe.metrics import METRICS, Ints, Metric, Predictions
from featx.analysis.probe.records import Choice, Record, Results, Tested
from featx.analysis.probe.splits import RowSplits, Split, split_rows
from featx.config import Config
from featx.store import FeatureStore
from featx.types import Array, Json

Opened = TypeVar("Opened")
"""A layer as the methods read it."""

Fitted = TypeVar("Fitted")
"""A fitted probe, with its `choice`."""

COLUMNS = ("layer", "method", "seed", "fold", "split", "key", "group")
"""First columns of predictions.csv and few_shot.csv."""


class Task(Results[Tested], Generic[Opened, Fitted, Tested]):
    """Rows, targets and splits, which are the same for all layers, what differs between tasks, and
    the results of the probes.

    Attributes:
        columns: columns of predictions.csv after COLUMNS.
        heads: layer -> head for new images, of the first method that has one, and that method.
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
        self.training, self.testing = training, testing
        self.columns: Sequence[str] = ()
        self.heads: dict[str, tuple[Head, str]] = {}
        seeds = range(config.seed, config.seed + (config.probe.seeds or 1))
        super().__init__(seeds, config.probe.methods)
        self.splits = {seed: self.make_splits(seed) for seed in seeds}

    def make_splits(self, seed: int) -> RowSplits:
        """Split the rows by a seed."""
        return split_rows(self.config.probe, seed, self.training, self.testing)

    @property
    def first_splits(self) -> RowSplits:
        """Splits of the first seed."""
        return self.splits[self.config.seed]

    @property
    def store(self) -> FeatureStore:
        """The store that is probed."""
        return self.training.store

    @property
    def stores(self) -> list[LabelledRows]:
        """Rows of the store, then those of the other one, if any."""
        return [self.training] if self.testing is None else [self.training, self.testing]

    @cached_property
    def targets(self) -> Array:
        """(N,) classes or (N, T) values of all places, training rows first."""
        return np.concatenate([each.targets for each in self.stores])

    @cached_property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) key of each place."""
        return np.concatenate([each.keys for each in self.stores])

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return METRICS[self.kind.name]

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

    def entry(self, records: Sequence[Record[Tested]]) -> dict[str, Any]:
        """Return the entry of one method and layer in probe.json."""
        choices = [record.choice for record in records]
        return {
            **self.judge([record.tested for record in records]),
            **{
                name: float(np.mean([choice.validation[name] for choice in choices]))
                for name in choices[0].validation
            },
            **self.settings(methods.name_of_choice(records[0].method), choices),
            "sweep": one_or_all([choice.sweep for choice in choices]),
            **self.details(choices),
            "notes": list(dict.fromkeys(self.notes(choices))),
        }

    def settings(self, name: str, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the chosen settings as entries of probe.json."""
        return {name: one_or_all([choice.setting for choice in choices])}

    def details(self, choices: Sequence[Choice]) -> dict[str, object]:
        """Return further entries about the fits."""
        return {}

    def notes(self, choices: Sequence[Choice]) -> list[str]:
        """Return the notes of the fits."""
        return [note for choice in choices for note in choice.notes]

    def finish_method(
        self, opened: Opened, layer: str, method: str, fits: Sequence[Fitted], entry: dict[str, Any]
    ) -> None:
        """Add to the entry what only the first seed has."""

    def finish_layer(self) -> None:
        """Release what the records need no longer."""

    @abstractmethod
    def result_entries(self) -> Json:
        """Return the entries of probe.json that only this task has, and `notes_on_rows`."""

    def notes_on_rows(self) -> list[str]:
        """Return sentences about rows that were left out or leak."""
        rows, column = self.first_splits, self.config.probe.group_column
        return [*self.training.notes, *rows.notes, *missing_group_notes(rows.grouped, column)]

    def untested_lines(self, seed: int) -> Iterator[list[object]]:
        """Yield the lines of predictions.csv about rows that no split of a seed tests."""
        return iter(())

    def few_shot_csv(self) -> bytes | None:
        """Return the file few_shot.csv; None without few-shot probes."""
        return None

    @abstractmethod
    def test_columns(self, record: Record[Tested], row: int) -> Iterator[list[object]]:
        """Yield the columns after COLUMNS of each line about a test row of a record."""


AnyTask = Task[Any, Any, Any]
"""Task of any kind of labels."""


def one_or_all(values: Sequence[object]) -> object:
    """Return the value of a single split, or the list of those of all folds."""
    return values[0] if len(values) == 1 else list(values)


class RowTask(Task[Problem, FittedProbe, Predictions]):
    """Task of predicting classes, numbers or labels of whole rows."""

    memory_remedy = "Lower probe.memory_gib, so that it is streamed, or use device=cpu."

    def open_layer(self, layer: str, device: torch.device) -> Problem:
        options = self.config.probe
        memory_bytes = options.memory_gib * (1 << 30)
        stored = [layer_vectors(each, layer) for each in self.stores]
        features, tokens = Features(stored, device, memory_bytes), None
        if "attentive" in options.methods:
            tokens = layer_tokens(self.stores, layer, device, memory_bytes)
        return Problem(
            features,
            self.targets,
            len(self.training.classes),
            options,
            self.config.seed,
            tokens,
            self.kind.name,
        )

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
        self,
        opened: Problem,
        layer: str,
        method: str,
        fits: Sequence[FittedProbe],
        entry: dict[str, Any],
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
            head = self.finish_head(opened, fits, final, entry)
            entry["notes"] = list(dict.fromkeys([*entry["notes"], *final.choice.notes]))
            entry["head_fitted_on"] = "all labelled rows"
        self.heads.setdefault(layer, (head, method))

    def finish_head(
        self,
        problem: Problem,
        fits: Sequence[FittedProbe],
        final: FittedProbe,
        entry: dict[str, object],
    ) -> Head:
        """Return the head of the fit on all rows, and add its details to the entry."""
        entry["head_l2"] = final.choice.setting
        assert final.head is not None
        return final.head
