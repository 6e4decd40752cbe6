"""Result of a probe: one record for each seed, layer, method and split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from featx.analysis.probe.metrics import Ints
from featx.analysis.probe.splits import Split

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


@dataclass(frozen=True)
class Draw:
    """Few-shot probe: fit on one random choice of a few training rows of each class.

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
