"""Ridge regression onto one-hot labels or numbers; one eigendecomposition serves all penalties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from featx.analysis.probe.heads import Head, Scaler
from featx.analysis.probe.layer_rows import Features
from featx.analysis.probe.metrics import Ints
from featx.base import float64_device
from featx.errors import ConfigError
from featx.types import Array

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
        target_mean: (C,) mean of the targets, the bias for features of mean 0.
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
    features: Features, places: Ints, y: Array, num_outputs: int, scaler: Scaler
) -> RidgeSolution:
    """Decompose the normal equations of some places in float64.

    The targets are one-hot labels of (N,) classes `y`, or (N, T) numbers.
    """
    count, width = len(places), features.width
    if min(count, width) > MAX_DIM:
        raise ConfigError(
            f"least squares needs a square matrix of the smaller one of {count} rows and "
            f"{width} features; at most {MAX_DIM} are supported. Classes can be predicted with "
            "probe.method=linear."
        )
    device = float64_device(features.device)
    is_one_hot = y.ndim == 1
    shares = (
        np.bincount(y[places], minlength=num_outputs) / count if is_one_hot else y[places].mean(0)
    )
    target_mean = torch.from_numpy(shares).to(device)

    def targets(span: Ints) -> torch.Tensor:
        """Return the targets minus their mean, (n, num_outputs)."""
        if not is_one_hot:
            return torch.from_numpy(y[span]).to(device) - target_mean
        one_hot = -target_mean.expand(len(span), -1).clone()
        one_hot[torch.arange(len(span)), torch.from_numpy(y[span])] += 1
        return one_hot

    mean = torch.zeros(width, dtype=torch.float64, device=device)
    for _, block in features.blocks(places):
        mean += scaler(block).to(device).double().sum(dim=0) / count
    if width <= count:
        gram = torch.zeros((width, width), dtype=torch.float64, device=device)
        towards = torch.zeros((width, len(target_mean)), dtype=torch.float64, device=device)
        for span, block in features.blocks(places, num_outputs):
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
