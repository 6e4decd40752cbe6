"""Ridge regression onto one-hot labels or numbers; one eigendecomposition serves all penalties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from featx.analysis.probe.heads import Head, fit_scaler
from featx.analysis.probe.layer_rows import Problem
from featx.analysis.probe.metrics import Ints
from featx.base import check_memory, float64_device
from featx.errors import ConfigError

STRENGTHS = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Penalties to try."""

MAX_DIM = 16384
"""Maximum of the smaller of rows and features: larger matrices take minutes and gigabytes."""


def solve(problem: Problem, places: Ints) -> Callable[[float], Head]:
    """Decompose the normal equations of some places in float64. Return a function l2 -> head with
    argmin of mean |x weight^T + bias - target|^2 + l2 |weight|^2.

    The targets are one-hot labels of classes, or numbers. The decomposition is that
    of X^T X / n, or of X X^T / n if there are fewer rows than features: with its (m,) eigenvalues,
    weight = right^T diag(1 / (values + l2)) left^T, where left is (D, m) and right (m, C).
    """
    features, y, num_outputs = problem.features, problem.y, problem.num_outputs
    count, width = len(places), features.width
    if min(count, width) > MAX_DIM:
        raise ConfigError(
            f"least squares needs a square matrix of the smaller one of {count} rows and "
            f"{width} features; at most {MAX_DIM} are supported. Classes can be predicted with "
            "probe.method=linear."
        )
    device = float64_device(features.device)
    if device.type == "cpu":
        # The Gram matrix, its eigenvectors and the copy that LAPACK works on, or with fewer rows
        # than features two matrices of the rows beside one of these.
        numbers = 3 * width**2 if width <= count else 2 * count * width + count**2
        check_memory(
            8 * numbers,
            f"Least squares of {count} rows and {width} features",
            "Train on fewer rows, extract fewer features (such as reduce=avg), or predict classes "
            "with probe.method=linear or knn.",
        )
    scaler = fit_scaler(features, places)
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

    # The mean of the standardised features is the rounding error of the float32 scaler.
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
        values, left = torch.linalg.eigh(gram / count)
        right = left.T @ (towards / count)
    else:
        x = scaler(features.take(places)).to(device).double() - mean
        values, vectors = torch.linalg.eigh(x @ x.T / count)
        left, right = x.T @ vectors, vectors.T @ (targets(places) / count)
    values = values.clamp(min=0)  # negative by rounding

    def head(l2: float) -> Head:
        inverse = 1 / (values + l2)
        if l2 == 0:
            # Without a penalty, directions without variance are left out instead of being
            # amplified.
            inverse = torch.where(values > values.max() * 1e-12, inverse, 0.0)
        weight = ((left * inverse) @ right).T
        bias = target_mean - weight @ mean
        return Head(
            scaler,
            weight.float().contiguous().to(features.device),
            # float32 rounds the seconds of today to two minutes.
            bias.float().to(features.device) if is_one_hot else bias,
            probabilities=False,
        )

    return head
