"""Temperature scaling: one factor for all logits of a head, fitted on validation rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.heads import Head

LOWEST, HIGHEST = 0.1, 10.0
"""Limits of the temperature. If all validation rows are right, the loss falls with the temperature
without end, which would make all probabilities 1."""


def fit_temperature(logits: npt.NDArray[np.float64], y: npt.NDArray[np.int64]) -> float:
    """Return the temperature T in [LOWEST, HIGHEST] with the smallest cross-entropy.

    The loss of softmax(logits / T) is convex in 1 / T. C. Guo et al., On Calibration of Modern
    Neural Networks, ICML 2017.
    """
    from scipy.optimize import minimize_scalar

    z, true = torch.from_numpy(logits), torch.from_numpy(y)

    def loss(inverse: float) -> float:
        return float(torch.nn.functional.cross_entropy(z * inverse, true))

    limits = (1 / HIGHEST, 1 / LOWEST)
    found = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-9})
    return min(HIGHEST, max(LOWEST, 1 / float(found.x)))


def limit_notes(temperature: float) -> list[str]:
    """Return a note if a temperature is one of the limits."""
    if LOWEST * 1.001 < temperature < HIGHEST / 1.001:
        return []
    return [f"the calibration temperature, {temperature:g}, is at the limit of its range"]


def scale_logits(head: Head, temperature: float) -> Head:
    """Return a head whose logits are divided by a temperature."""
    return Head(
        head.scaler,
        head.weight / temperature,
        head.bias / temperature,
        head.probabilities,
        head.normalises,
    )
