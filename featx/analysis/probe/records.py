"""Results of a probe: one record for each seed, layer, method and split, and groups of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from featx.analysis.probe.comparisons import differences, metric_spreads
from featx.analysis.probe.metrics import Metric
from featx.analysis.probe.splits import Split
from featx.types import Json

Tested = TypeVar("Tested")
"""Results on the test rows: predictions of rows, or counts of pixels."""


@dataclass(frozen=True)
class Choice:
    """Setting of a method, and how it was chosen.

    Attributes:
        validation: metrics of the choice on the validation rows, without which it was fitted, by
            their names in probe.json; empty if nothing was compared.
        sweep: every setting that was tried, as JSON types.
    """

    setting: float
    validation: dict[str, float] = field(default_factory=dict)
    sweep: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record(Generic[Tested]):
    """Result of one method on one layer with one split; `fold` is the index of the split among
    those of its seed.
    """

    seed: int
    layer: str
    method: str
    fold: int
    split: Split
    choice: Choice
    tested: Tested


class Results(ABC, Generic[Tested]):
    """Records of the probes of a task, which inherits from it, and what is grouped from them.

    Attributes:
        folds: (seed, layer, method) -> record of each split.
        entries: (seed, layer, method) -> entry of probe.json.
        layers: layer -> its entry in probe.json, with the methods of the first seed.
    """

    def __init__(self, seeds: Sequence[int], methods: Sequence[str]) -> None:
        self.seeds = seeds
        self.methods = methods
        self.folds: dict[tuple[int, str, str], list[Record[Tested]]] = {}
        self.entries: dict[tuple[int, str, str], dict[str, Any]] = {}
        self.layers: dict[str, dict[str, Any]] = {}

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the task; the first one is that of the answer."""

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

    def add(self, records: list[Record[Tested]], entry: dict[str, Any]) -> None:
        """Add the records of all splits of one seed, layer and method, and their entry."""
        first = records[0]
        key = (first.seed, first.layer, first.method)
        self.folds[key], self.entries[key] = records, entry
        if first.seed == self.seeds[0]:
            self.layers[first.layer][first.method] = entry

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

    def tested(self, seed: int) -> list[Tested]:
        """Return the results of `chosen` on the test rows."""
        return [record.tested for record in self.chosen(seed)]

    def answer(self, seed: int) -> Json:
        """Return the entries of probe.json about the best layer of a seed with the first method.

        With several folds and layers the metrics are those of the layers that the folds chose
        (nested validation), which `layer_of_folds` names.
        """
        best, chosen = self._best_layer([seed], lambda merit: merit), self.chosen(seed)
        about = self.entries[seed, best, self.methods[0]]
        if len(chosen) > 1 and len(self.layers) > 1:
            metrics = self.judge(self.tested(seed))
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
        best = self._best_layer(self.seeds, lambda merit: merit[:1])
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

    def _best_layer(
        self, seeds: Sequence[int], key: Callable[[tuple[float, ...]], tuple[float, ...]]
    ) -> str:
        """Return the layer that is best by the mean validation metrics of some seeds."""

        def merit(layer: str) -> tuple[float, ...]:
            entries = [self.entries[seed, layer, self.methods[0]] for seed in seeds]
            names = self.folds[seeds[0], layer, self.methods[0]][0].choice.validation
            means = {name: float(np.mean([entry[name] for entry in entries])) for name in names}
            return key(self.merit(means))

        return max(self.layers, key=merit)

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
