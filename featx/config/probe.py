"""Options of job=probe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from featx.config.checks import NAMES, check_choice
from featx.errors import ConfigError

PROBES = ("linear", "knn", "ridge")
SPLITS = ("holdout", "kfold", "column")


@dataclass
class ProbeConfig:
    """How job=probe fits and judges a probe."""

    method: Annotated[Any, NAMES] = "linear"
    """linear (logistic regression), knn, ridge, or some of them as a list; the first one chooses
    the best layer."""
    split: str = "holdout"
    """Which rows are tested: holdout (a share of each class), kfold (each row once), or column (as
    probe.split_column or probe.split_file says)."""
    test_share: float | None = None
    """Share of each class that holdout tests, 0.2 when not given."""
    folds: int | None = None
    """Folds of kfold, 5 when not given."""
    split_file: str | None = None
    """A CSV file with the columns key and split (train, validation or test), for column."""
    split_column: str | None = None
    """A column of the store (data.columns) that says train, validation or test, for column."""
    label_column: str | None = None
    """A column of the store (data.columns) that is probed for instead of its labels: text, whole
    numbers or booleans."""
    group_column: str | None = None
    """A column of the store (data.columns) whose rows of one value, such as a patient or a slide,
    stay on one side of every split; boxes of an image and frames of a video always do."""
    test_store: str | None = None
    """Another store whose rows are tested, classes matched by name; all labelled rows of this one
    are then for training."""
    validation_share: float = 0.2
    """Share of each class of the training rows on which strengths and k are chosen."""
    l2: float | None = None
    """Strength of linear's and ridge's penalty, of the mean loss; swept when not given."""
    k: int | None = None
    """Neighbours that knn asks; swept when not given."""
    temperature: float | None = None
    """knn weighs a neighbour by exp(cosine / temperature), 0.07 when not given."""
    shots: Any = None
    """Also train on so few rows a class, such as [1,5,10]."""
    draws: int | None = None
    """Random choices of these rows, 5 when not given."""
    memory_gib: float = 4.0
    """What a layer's rows and their standardised copy may take; a larger layer is streamed."""
    epochs: int = 20
    """Passes over the training rows where they are streamed."""
    learning_rate: float = 1e-3
    """Of AdamW at the first step, where rows are streamed; it falls to 0 along a cosine."""
    clip_norm: float = 1.0
    """Largest norm of a step's gradients, where rows are streamed."""

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("probe.method", method, PROBES)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"probe.method={self.method}: expected some of {', '.join(PROBES)}.")
        check_choice("probe.split", self.split, SPLITS)
        self._check_owners()
        for key in ("test_share", "validation_share"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"probe.{key}={value}: expected a share between 0 and 1.")
        if self.folds is not None and self.folds < 2:
            raise ConfigError(f"probe.folds={self.folds}: expected at least 2.")
        if self.l2 is not None and not 0 <= self.l2 < math.inf:
            raise ConfigError(f"probe.l2={self.l2}: expected a number of at least 0.")
        for key in ("k", "draws", "epochs"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"probe.{key}={value}: expected at least 1.")
        for key in ("temperature", "learning_rate", "clip_norm"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"probe.{key}={value}: expected a number above 0.")
        if not self.memory_gib >= 0:
            raise ConfigError(f"probe.memory_gib={self.memory_gib}: expected 0 or more.")
        self._check_shots()

    def _check_owners(self) -> None:
        """Keys that belong to one kind of split, or to one method."""
        kind = "test_store" if self.test_store else self.split
        if self.test_store and self.split != "holdout":
            raise ConfigError(
                f"probe.test_store says which rows are tested, and so does probe.split="
                f"{self.split}; give one."
            )
        for key, owner in (
            ("test_share", "holdout"),
            ("folds", "kfold"),
            ("split_file", "column"),
            ("split_column", "column"),
        ):
            if getattr(self, key) is not None and kind != owner:
                raise ConfigError(f"probe.{key} has an effect with probe.split={owner} only.")
        if kind == "column" and bool(self.split_file) == bool(self.split_column):
            raise ConfigError(
                "probe.split=column needs probe.split_file=FILE.csv with the columns key and split "
                "or probe.split_column=NAME, a column of the store; one of the two."
            )
        for key, owners in (
            ("l2", ("linear", "ridge")),
            ("k", ("knn",)),
            ("temperature", ("knn",)),
        ):
            if getattr(self, key) is not None and not set(owners) & set(self.methods):
                raise ConfigError(
                    f"probe.{key} has an effect with probe.method={' or '.join(owners)} only."
                )

    def _check_shots(self) -> None:
        whole = [isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in self.all_shots]
        if not all(whole) or len(set(self.all_shots)) < len(whole):
            raise ConfigError(
                f"probe.shots={self.shots}: expected rows a class, such as 5 or [1,5,10]."
            )
        if self.draws is not None and not self.all_shots:
            raise ConfigError("probe.draws has an effect with probe.shots only.")

    @property
    def methods(self) -> tuple[str, ...]:
        """The key `method` as a tuple."""
        return (self.method,) if isinstance(self.method, str) else tuple(self.method or ())

    @property
    def all_shots(self) -> tuple[Any, ...]:
        """The key `shots` as a tuple; empty when not given."""
        if self.shots is None:
            return ()
        return tuple(self.shots) if isinstance(self.shots, list | tuple) else (self.shots,)
