"""Problem that a method of a probe solves, and the result of a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe import minibatch_regression
from featx.analysis.probe.heads import Head
from featx.analysis.probe.layer_rows import Features
from featx.analysis.probe.splits import Places
from featx.analysis.probe.tokens import Tokens
from featx.config import ProbeConfig

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """One layer and the labels to predict from it.

    Attributes:
        features: (N, D) vectors of all places.
        y: (N,) class of each place.
        num_classes: C.
        options: option group `probe`.
        seed: seed of the order of mini-batches.
        tokens: tokens of all places for the attentive probe, or None without it.
    """

    features: Features
    y: npt.NDArray[np.int64]
    num_classes: int
    options: ProbeConfig
    seed: int
    tokens: Tokens | None = None

    @property
    def schedule(self) -> minibatch_regression.Schedule:
        """Length of trainings on mini-batches, and their learning rate for `linear`."""
        options = self.options
        rate = options.learning_rate or minibatch_regression.LEARNING_RATE
        return minibatch_regression.Schedule(options.epochs, rate, options.clip_norm, self.seed)

    def labels(self, places: Places) -> torch.Tensor:
        """Return the classes of some places, (n,) int64 on the device."""
        return torch.from_numpy(self.y[places]).to(self.features.device)


@dataclass(frozen=True)
class FittedProbe:
    """A fitted probe.

    Attributes:
        scores: function places -> (n, C) scores, of which the largest is the prediction.
        chosen: the chosen penalty or number of neighbours.
        head: the head, or None for kNN.
        validation: accuracy and mean loss of the choice on the validation rows, without which it
            was fitted; the loss is cross-entropy, for ridge the squared error. None if nothing was
            compared.
        sweep: every setting that was tried, as JSON types.
        notes: notes for the user.
        details: details of the last fit, as JSON types.
    """

    scores: Callable[[Places], Scores]
    chosen: float
    head: Head | None = None
    validation: tuple[float, float] | None = None
    sweep: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


NO_VOTE = 1e-30
"""Probability in the loss of a class that has none, so that its logarithm is finite."""
