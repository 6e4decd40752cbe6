"""Options of job=probe."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from featx.config.checks import (
    Count,
    NonNegative,
    OneOrMore,
    OnlyWith,
    Positive,
    Share,
    names_tuple,
    options,
)
from featx.errors import ConfigError, gone

Method = Literal["linear", "knn", "ridge", "attentive"]


@options("probe")
class ProbeConfig:
    """Fit and test of the probe of job=probe."""

    method: OneOrMore[Method] = "linear"
    """Method of the probe: linear (logistic regression), knn, ridge, or attentive (logistic
    regression on tokens weighted by a learned query), or a list of them, of which the first chooses
    the best layer."""
    test_share: Share | None = None
    """Share of each class that is tested, 0.2 when no option says which rows are."""
    folds: Annotated[int, Ge(2), Le(1_000_000)] | None = None
    """Number of folds, each of which is tested once with the other rows for training; for
    job=mislabelled 5 when not given."""
    split: str | None = None
    """Column of the store (data.columns) with train, validation or test, or a file NAME.csv with
    the columns key and split."""
    label_column: str | None = None
    """Column of the store (data.columns) whose labels are predicted, or judged by job=mislabelled,
    instead of those of the store."""
    task: Literal["auto", "classification", "regression", "multilabel"] = "auto"
    """Kind of the labels in probe.label_column: classification (classes), regression (numbers), or
    multilabel (several labels a row, divided by probe.label_separator). auto takes fractional
    numbers as numbers, and everything else, whole numbers included, as classes."""
    label_separator: Annotated[str | None, OnlyWith("task", "multilabel")] = None
    """Text between the labels of a row with probe.task=multilabel; a semicolon when not given."""
    masks: str | None = None
    """Folder with a mask for each image, a PNG of class numbers with the key of the image and the
    ending .png. The linear probe then predicts the class of each pixel from the tokens or the map
    of a layer."""
    ignore: Annotated[Annotated[int, Ge(0), Le(65535)] | None, OnlyWith("masks")] = 255
    """Number of the pixels of probe.masks that count as unlabelled, or null for none."""
    mask_classes: Annotated[str | None, OnlyWith("masks")] = None
    """Text file with the names of the classes of probe.masks, one a line, the first of number 0."""
    group_column: str | None = None
    """Column of the store (data.columns), such as patient or slide, whose rows of equal value stay
    on one side of every split; boxes of an image and frames of a video always do."""
    test_store: str | None = None
    """Another store whose rows are tested, with classes matched by name. All labelled rows of the
    first store are then for training."""
    seeds: Annotated[
        Annotated[int, Ge(2), Le(10_000)] | None,
        "2 to 10000, as `seed` chooses the split of one, or null",
    ] = None
    """Number of random splits, made with `seed` and the seeds that follow it, over which means and
    standard deviations are given. Also the number of random choices of the rows of probe.shots,
    which is 5 without it."""
    bootstrap: Annotated[
        Annotated[int, Ge(100), Le(1_000_000)] | None,
        "100 to 1000000 resamples, as fewer do not give the ends of a 95 % interval, or null",
    ] = None
    """Number of resamples of the test rows, such as 1000, for intervals of all metrics of the best
    layer; rows of a group are drawn together."""
    l2: Annotated[NonNegative | None, OnlyWith("method", "linear", "ridge", "attentive")] = None
    """Strength of the L2 penalty of linear, ridge and attentive, relative to the mean loss; the
    best of several when not given."""
    calibration: Annotated[Literal["none", "temperature"], OnlyWith("method", "linear")] = "none"
    """Calibration of the probabilities of linear on the validation rows: none, or temperature,
    which divides all logits by the number with the smallest loss."""
    k: Annotated[Count | None, OnlyWith("method", "knn")] = None
    """Number of neighbours of knn; the best of several when not given."""
    shots: Annotated[OneOrMore[Count] | None, "rows a class, such as 5 or [1,5,10]"] = None
    """Numbers of training rows per class to train with as well, such as [1,5,10]."""
    memory_gib: NonNegative = 4.0
    """Memory in GiB for the rows of a layer and their standardised copy; a larger layer is
    streamed."""
    epochs: Count | None = None
    """Number of passes over the training rows of a layer that is streamed, and of attentive; when
    not given 20, and for attentive more up to 1000 steps."""
    learning_rate: Positive | None = None
    """Learning rate of AdamW at the first step, which falls to 0 along a cosine; 0.001 for a layer
    that is streamed and 0.01 for attentive when not given."""

    def __post_init__(self) -> None:
        if self.task in ("regression", "multilabel") and self.label_column is None:
            raise ConfigError(
                f"probe.task={self.task} needs probe.label_column=NAME, a column of the store; the "
                "labels of a store are classes."
            )
        if self.label_separator == "":
            raise ConfigError("probe.label_separator is empty: expected a text such as ';'.")

        # Which rows are tested is said once.
        if sentence := gone(f"probe.split={self.split}"):
            raise ConfigError(sentence)
        names = ("test_share", "folds", "split", "test_store")
        given = [f"probe.{name}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each say which rows are tested; give one.")
        if self.seeds is not None and (self.test_store or self.split):
            raise ConfigError(
                f"probe.seeds={self.seeds}: {given[0]} says which rows are tested, so that further "
                "seeds would test the same rows. Use probe.test_share or probe.folds."
            )

        if self.masks is None:
            return
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
        for key in ("label_column", "test_store", "seeds", "bootstrap", "shots"):
            if getattr(self, key) is not None:
                raise ConfigError(f"probe.{key} has no effect with probe.masks; leave it out.")

    @property
    def methods(self) -> tuple[str, ...]:
        """The option `method` as a tuple."""
        return names_tuple(self.method)

    @property
    def all_shots(self) -> tuple[int, ...]:
        """The option `shots` as a tuple; empty when not given."""
        return (self.shots,) if isinstance(self.shots, int) else tuple(self.shots or ())
