"""Ridge regression onto one-hot labels; a single eigendecomposition serves all penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.heads import Head, Scaler
from featx.analysis.probe.layer_rows import Features
from featx.base import float64_device
from featx.errors import ConfigError

STRENGTHS = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Penalties to try."""

MAX_DIM = 16384
"""Maximum of the smaller of rows and features: larger matrices take minutes and gigabytes."""


@dataclass(frozen=True)
class RidgeSolution:
    """Eigendecomposition of X^T X / n, or of X X^T / n if there are fewer rows than features.

    Attributes:
        scaler: standardisation of the features.
        values: (m,) eigenvalues; those that are negative by rounding are 0.
        left: (D, m), with weight = right^T diag(1 / (values + l2)) left^T.
        right: (m, C).
        mean: (D,) mean of the standardised features, which is the rounding error of the float32
            scaler.
        target_mean: (C,) share of each class, the bias for features of mean 0.
    """

    scaler: Scaler
    values: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    mean: torch.Tensor
    target_mean: torch.Tensor

    def head(self, l2: float) -> Head:
        """Return argmin of mean |x weight^T + bias - onehot|^2 + l2 |weight|^2."""
        # Without a penalty, directions without variance are left out instead of being amplified.
        inverse = 1 / (self.values + l2)
        if l2 == 0:
            floor = self.values.max() * 1e-12
            inverse = torch.where(self.values > floor, inverse, 0.0)
        weight = ((self.left * inverse) @ self.right).T
        device = self.scaler.mean.device
        return Head(
            self.scaler,
            weight.float().contiguous().to(device),
            (self.target_mean - weight @ self.mean).float().to(device),
            probabilities=False,
        )


def solve(
    features: Features,
    places: npt.NDArray[np.int64],
    y: npt.NDArray[np.int64],
    num_classes: int,
    scaler: Scaler,
) -> RidgeSolution:
    """Decompose the normal equations of some places in float64."""
    shares = np.bincount(y[places], minlength=num_classes) / len(places)
    mean = torch.from_numpy(shares).to(float64_device(features.device))
    return _solve(features, places, lambda span: _targets(y[span], mean), mean, scaler)


def solve_values(
    features: Features,
    places: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    scaler: Scaler,
) -> RidgeSolution:
    """Decompose the normal equations for targets that are numbers."""
    device = float64_device(features.device)
    mean = torch.from_numpy(values[places].mean(0)).to(device)
    return _solve(
        features,
        places,
        lambda span: torch.from_numpy(values[span]).to(device) - mean,
        mean,
        scaler,
    )


def _solve(
    features: Features,
    places: npt.NDArray[np.int64],
    targets: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    target_mean: torch.Tensor,
    scaler: Scaler,
) -> RidgeSolution:
    """Decompose the normal equations; `targets` gives (n, T) targets minus their mean, (T,)."""
    count, width = len(places), features.width
    if min(count, width) > MAX_DIM:
        raise ConfigError(
            f"least squares needs a square matrix of the smaller one of {count} rows and "
            f"{width} features; at most {MAX_DIM} are supported. Classes can be predicted with "
            "probe.method=linear."
        )
    device = float64_device(features.device)
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    for _, block in features.blocks(places):
        mean += scaler(block).to(device).double().sum(dim=0) / count
    if width <= count:
        gram = torch.zeros((width, width), dtype=torch.float64, device=device)
        towards = torch.zeros((width, len(target_mean)), dtype=torch.float64, device=device)
        for span, block in features.blocks(places):
            x = scaler(block).to(device).double() - mean
            gram += x.T @ x
            towards += x.T @ targets(span)
        values, vectors = torch.linalg.eigh(gram / count)
        right = vectors.T @ (towards / count)
        return RidgeSolution(scaler, values.clamp(min=0), vectors, right, mean, target_mean)
    x = scaler(features.take(places)).to(device).double() - mean
    values, vectors = torch.linalg.eigh(x @ x.T / count)
    right = vectors.T @ (targets(places) / count)
    return RidgeSolution(scaler, values.clamp(min=0), x.T @ vectors, right, mean, target_mean)


def _targets(y: npt.NDArray[np.int64], mean: torch.Tensor) -> torch.Tensor:
    """Return one-hot labels minus the share of each class, (n, C) float64."""
    targets = -mean.expand(len(y), -1).clone()
    targets[torch.arange(len(y)), torch.from_numpy(y)] += 1
    return targets
