"""Options of job=probe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from featx.config.checks import NAMES, check_choice, check_effects, names_tuple, only_with
from featx.errors import ConfigError

PROBES = ("linear", "knn", "ridge", "attentive")
SPLITS = ("holdout", "kfold", "column")
CALIBRATIONS = ("none", "temperature")
TASKS = ("auto", "classification", "regression", "multilabel")


@dataclass
class ProbeConfig:
    """Fit and test of the probe of job=probe."""

    method: Annotated[Any, NAMES] = "linear"
    """Method of the probe: linear (logistic regression), knn, ridge, or attentive (logistic
    regression on tokens weighted by a learned query), or a list of them, of which the first chooses
    the best layer."""
    split: str = "holdout"
    """Split into training and test rows: holdout (a share of each class is tested), kfold (each row
    is tested once), or column (as probe.split_column or probe.split_file says)."""
    test_share: float | None = field(default=None, metadata=only_with("split", "holdout"))
    """Share of each class that split=holdout tests, 0.2 when not given."""
    folds: int | None = field(default=None, metadata=only_with("split", "kfold"))
    """Number of folds of split=kfold, 5 when not given."""
    split_file: str | None = field(default=None, metadata=only_with("split", "column"))
    """CSV file with the columns key and split (train, validation or test), for split=column."""
    split_column: str | None = field(default=None, metadata=only_with("split", "column"))
    """Column of the store (data.columns) with train, validation or test, for split=column."""
    label_column: str | None = None
    """Column of the store (data.columns) to predict instead of its labels."""
    task: str = "auto"
    """Kind of the labels in probe.label_column: classification (classes), regression (numbers), or
    multilabel (several labels a row, divided by probe.label_separator). auto takes fractional
    numbers as numbers, and everything else, whole numbers included, as classes."""
    label_separator: str | None = field(default=None, metadata=only_with("task", "multilabel"))
    """Text between the labels of a row with probe.task=multilabel; a semicolon when not given."""
    masks: str | None = None
    """Folder with a mask for each image, a PNG of class numbers with the key of the image and the
    ending .png. The linear probe then predicts the class of each pixel from the tokens or the map
    of a layer."""
    ignore: int | None = field(default=255, metadata=only_with("masks"))
    """Number of the pixels of probe.masks that count as unlabelled, or null for none."""
    mask_classes: str | None = field(default=None, metadata=only_with("masks"))
    """Text file with the names of the classes of probe.masks, one a line, the first of number 0."""
    group_column: str | None = None
    """Column of the store (data.columns), such as patient or slide, whose rows of equal value stay
    on one side of every split; boxes of an image and frames of a video always do."""
    test_store: str | None = None
    """Another store whose rows are tested, with classes matched by name. All labelled rows of the
    first store are then for training."""
    seeds: int | None = None
    """Number of random splits, made with `seed` and the seeds that follow it, over which means and
    standard deviations are given; for split=holdout and kfold."""
    bootstrap: int | None = None
    """Number of resamples of the test rows, such as 1000, for intervals of all metrics of the best
    layer; rows of a group are drawn together."""
    compare_store: str | None = None
    """Another probed store, whose best layer is compared with that of this one on the test rows
    that both have."""
    validation_share: float = 0.2
    """Share of the training rows of each class on which probe.l2 and probe.k are chosen."""
    l2: float | None = field(
        default=None, metadata=only_with("method", "linear", "ridge", "attentive")
    )
    """Strength of the L2 penalty of linear, ridge and attentive, relative to the mean loss; the
    best of several when not given."""
    calibration: str = field(default="none", metadata=only_with("method", "linear"))
    """Calibration of the probabilities of linear on the validation rows: none, or temperature,
    which divides all logits by the number with the smallest loss."""
    k: int | None = field(default=None, metadata=only_with("method", "knn"))
    """Number of neighbours of knn; the best of several when not given."""
    temperature: float | None = field(default=None, metadata=only_with("method", "knn"))
    """Temperature of knn, which weighs a neighbour by exp(cosine / temperature); 0.07 when not
    given."""
    shots: Annotated[Any, "a list of whole numbers, or null"] = None
    """Numbers of training rows per class to train with as well, such as [1,5,10]."""
    draws: int | None = field(default=None, metadata=only_with("shots"))
    """Number of random choices of the rows of probe.shots, 5 when not given."""
    memory_gib: float = 4.0
    """Memory in GiB for the rows of a layer and their standardised copy; a larger layer is
    streamed."""
    epochs: int | None = None
    """Number of passes over the training rows of a layer that is streamed, and of attentive; when
    not given 20, and for attentive more up to 1000 steps."""
    learning_rate: float | None = None
    """Learning rate of AdamW at the first step, which falls to 0 along a cosine; 0.001 for a layer
    that is streamed and 0.01 for attentive when not given."""
    clip_norm: float = 1.0
    """Largest norm of the gradients of a step for a layer that is streamed and for attentive."""

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("probe.method", method, PROBES)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"probe.method={self.method}: expected some of {', '.join(PROBES)}.")
        check_choice("probe.split", self.split, SPLITS)
        check_choice("probe.task", self.task, TASKS)
        check_choice("probe.calibration", self.calibration, CALIBRATIONS)
        if self.task in ("regression", "multilabel") and self.label_column is None:
            raise ConfigError(
                f"probe.task={self.task} needs probe.label_column=NAME, a column of the store; the "
                "labels of a store are classes."
            )
        if self.label_separator == "":
            raise ConfigError("probe.label_separator is empty: expected a text such as ';'.")
        check_effects("probe", self)
        self._check_split()
        self._check_masks()
        self._check_ranges()
        self._check_shots()

    def _check_ranges(self) -> None:
        """Refuse numbers outside of their ranges."""
        for key in ("test_share", "validation_share"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"probe.{key}={value}: expected a share between 0 and 1.")
        if self.folds is not None and self.folds < 2:
            raise ConfigError(f"probe.folds={self.folds}: expected at least 2.")
        if self.l2 is not None and not 0 <= self.l2 < math.inf:
            raise ConfigError(f"probe.l2={self.l2}: expected a number of at least 0.")
        if self.seeds is not None and self.seeds < 2:
            raise ConfigError(
                f"probe.seeds={self.seeds}: expected at least 2; `seed` chooses the split of one."
            )
        if self.bootstrap is not None and self.bootstrap < 100:
            raise ConfigError(
                f"probe.bootstrap={self.bootstrap}: expected at least 100 resamples; fewer do not "
                "give the ends of a 95 % interval."
            )
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

    def _check_split(self) -> None:
        """Refuse options of the split that do not go together."""
        if self.test_store and self.split != "holdout":
            raise ConfigError(
                f"probe.test_store says which rows are tested, and so does probe.split="
                f"{self.split}; give one."
            )
        if self.test_store and self.test_share is not None:
            raise ConfigError(
                "probe.test_share has no effect with probe.test_store, which says which rows are "
                "tested."
            )
        if self.seeds is not None and (self.test_store or self.split == "column"):
            raise ConfigError(
                f"probe.seeds={self.seeds}: the test rows are given, so that further seeds would "
                "test the same rows. Use probe.split=holdout or kfold."
            )
        if self.split == "column" and bool(self.split_file) == bool(self.split_column):
            raise ConfigError(
                "probe.split=column needs probe.split_file=FILE.csv with the columns key and split "
                "or probe.split_column=NAME, a column of the store; one of the two."
            )

    def _check_masks(self) -> None:
        """Refuse options that do not go together with masks."""
        if self.masks is None:
            return
        if self.ignore is not None and not 0 <= self.ignore < 1 << 16:
            raise ConfigError(
                f"probe.ignore={self.ignore}: expected a number from 0 to 65535, or null."
            )
        if self.task != "auto":
            raise ConfigError(
                f"probe.task={self.task}: with probe.masks the classes of pixels are predicted; "
                "leave probe.task out."
            )
        if self.methods != ("linear",):
            raise ConfigError("probe.masks has an effect with probe.method=linear alone.")
        if self.calibration != "none":
            raise ConfigError(
                "probe.calibration has an effect on classes of images only, not with probe.masks."
            )
        for key in ("label_column", "test_store", "seeds", "bootstrap", "compare_store", "shots"):
            if getattr(self, key) is not None:
                raise ConfigError(f"probe.{key} has no effect with probe.masks; leave it out.")

    def _check_shots(self) -> None:
        shots = self.all_shots
        are_counts = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in shots)
        if not are_counts or len(set(shots)) < len(shots):
            raise ConfigError(
                f"probe.shots={self.shots}: expected rows a class, such as 5 or [1,5,10]."
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """The option `method` as a tuple."""
        return names_tuple(self.method)

    @property
    def all_shots(self) -> tuple[Any, ...]:
        """The option `shots` as a tuple; empty when not given."""
        if self.shots is None:
            return ()
        return tuple(self.shots) if isinstance(self.shots, list | tuple) else (self.shots,)
