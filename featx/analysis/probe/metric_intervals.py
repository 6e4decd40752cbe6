"""Bootstrap intervals of all metrics, with whole groups drawn (probe.bootstrap).

A resample is a weight of each row, the number of times that it was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from featx.analysis.probe.class_metrics import prediction_metrics, weighted_metrics
from featx.analysis.probe.metrics import CLASS_METRICS, Ints, Matrix, Predictions

BLOCK_NUMBERS = 1 << 22
"""Largest number of weights that are held at a time: 32 MiB."""

INTERVAL_RESAMPLES = 1000
"""Number of resamples of the interval of the first metric, in probes without probe.bootstrap."""

_EQUAL = 1e-12
"""Difference of metrics, relative to the larger of the metric and 1, that counts as rounding."""


def bootstrap_entry(predictions: Predictions, resamples: int) -> dict[str, Any]:
    """Compute the 95 % percentile interval of every metric.

    In each resample as many units are drawn with replacement as there are, a unit being a row or a
    group with all its rows, and all metrics are computed anew (B. Efron and R. Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 13). Return resamples; unit ('row' or 'group');
    units, their number; intervals, metric -> (low, high), None if the metric is not available or
    equal in all resamples, as an accuracy of 1 is, which tells nothing about its error; and
    undefined, metric -> number of resamples that are left out because it is not defined in them,
    for metrics with such resamples.
    """
    blocks = [weighted_metrics(predictions, each) for each in _weights(predictions, resamples)]
    available, defined = prediction_metrics(predictions), {}
    for name in CLASS_METRICS:
        values = np.concatenate([each[name] for each in blocks])
        if available[name] is not None:
            defined[name] = values[~np.isnan(values)]
    groups = predictions.groups
    return {
        "resamples": resamples,
        "unit": "row" if groups is None else "group",
        "units": len(predictions.y) if groups is None else len(np.unique(groups)),
        "intervals": {
            name: np.quantile(defined[name], [0.025, 0.975]).tolist()
            if name in defined and _differ(defined[name])
            else None
            for name in CLASS_METRICS
        },
        "undefined": {
            name: resamples - len(values)
            for name, values in defined.items()
            if len(values) < resamples
        },
    }


def _weights(predictions: Predictions, resamples: int) -> Iterator[Matrix]:
    """Yield weights of resamples in blocks, (b, n) each."""
    unit_of_row = units_of_rows(predictions.groups, len(predictions.y))
    for drawn in drawn_units(unit_of_row, resamples, BLOCK_NUMBERS // len(unit_of_row)):
        drawn += drawn.shape[1] * np.arange(len(drawn))[:, None]
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        yield times[:, unit_of_row].astype(np.float64)


def units_of_rows(groups: Ints | None, num_rows: int) -> Ints:
    """Return the unit of each row, (n,): its group, or the row itself."""
    if groups is None:
        return np.arange(num_rows)
    units: Ints = np.unique(groups, return_inverse=True)[1]
    return units


def drawn_units(unit_of_row: Ints, resamples: int, block: int) -> Iterator[Ints]:
    """Yield the drawn units of some resamples at a time, (b, units).

    The same rows get the same resamples, whatever the number in a block.
    """
    rng, num_units = np.random.default_rng(0), int(unit_of_row.max()) + 1
    for start in range(0, resamples, max(1, block)):
        size = min(max(1, block), resamples - start)
        yield rng.integers(num_units, size=(size, num_units))


def interval_entry(values: Sequence[float | None], unit: str, num_units: int) -> dict[str, Any]:
    """Return the entries of probe.json about the interval of the metric of the answer.

    `interval` is None if the metric is undefined in a resample, or equal in all of them.
    """
    defined = [value for value in values if value is not None]
    has_interval = len(defined) == len(values) and len(set(defined)) > 1
    return {
        "interval": np.quantile(defined, [0.025, 0.975]).tolist() if has_interval else None,
        "resamples": len(values),
        "unit": unit,
        "units": num_units,
    }


def _differ(values: Matrix) -> bool:
    if not len(values):
        return False
    return float(np.ptp(values)) > _EQUAL * max(1.0, float(np.abs(values).max()))
