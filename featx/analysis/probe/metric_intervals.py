"""Bootstrap intervals of all metrics, with whole groups drawn (probe.bootstrap)."""

from __future__ import annotations

from typing import Any

import numpy as np

from featx.analysis.probe.metrics import METRICS, Predictions, judged


def bootstrap_entry(predictions: Predictions, resamples: int) -> dict[str, Any]:
    """Compute the 95 % percentile interval of every metric.

    In each resample as many units are drawn with replacement as there are, a unit being a row or a
    group with all its rows, and all metrics are computed anew (B. Efron and R. Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 13).

    Args:
        predictions: predictions for the test rows.
        resamples: number of resamples.

    Returns:
        resamples; unit ('row' or 'group'); units, their number; intervals, metric -> (low, high),
        None if the metric is not available or equal in all resamples, as an accuracy of 1 is, which
        tells nothing about its error; and undefined, metric -> number of resamples that are left
        out because it is not defined in them, for metrics with such resamples.
    """
    groups = predictions.groups
    of_row = np.arange(len(predictions.y)) if groups is None else np.unique(groups, False, True)[1]
    order = np.argsort(of_row, kind="stable")
    units = np.split(order, np.cumsum(np.bincount(of_row))[:-1])
    rng = np.random.default_rng(0)  # the same numbers for the same predictions
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for _ in range(resamples):
        drawn = rng.integers(len(units), size=len(units))
        rows = np.concatenate([units[i] for i in drawn.tolist()])
        values = judged(
            Predictions(
                predictions.y[rows],
                predictions.scores[rows],
                predictions.probabilities,
                None,
                predictions.most_ranked,
            )
        )
        for name, kept in found.items():
            if values[name] is not None:
                kept.append(values[name])
    available = judged(predictions)
    return {
        "resamples": resamples,
        "unit": "row" if groups is None else "group",
        "units": len(units),
        "intervals": {
            name: np.quantile(kept, [0.025, 0.975]).tolist()
            if available[name] is not None and len(set(kept)) > 1
            else None
            for name, kept in found.items()
        },
        "undefined": {
            name: resamples - len(kept)
            for name, kept in found.items()
            if len(kept) < resamples and available[name] is not None
        },
    }
