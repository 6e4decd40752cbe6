"""Paired comparison of two classifiers on the same test rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.row_predictions import RowPredictions

RESAMPLES = 10_000
"""Number of bootstrap resamples of an interval."""


def compare(a: RowPredictions, b: RowPredictions) -> dict[str, Any]:
    """Test whether two classifiers differ in accuracy, by those rows that only one predicts right.

    Rows of one group tend to be right or wrong together. With groups, the unit is therefore a
    group, which counts for the classifier with more right rows in it.

    Args:
        a: test rows with the predictions of the first classifier.
        b: the same rows in the same order, with the predictions of the second classifier.

    Returns:
        unit ('row' or 'group') and units, their number; difference, the accuracy of the first minus
        that of the second classifier, and interval (95 %), as returned by
        `bootstrapped_difference`; first_only and second_only, the number of units that count for
        one of the two; and p, as returned by `sign_test`.
    """
    gains = a.right.astype(np.int64) - b.right
    sizes = np.ones_like(gains)
    if a.groups is not None:
        _, group_of = np.unique(a.groups, return_inverse=True)
        sizes = np.bincount(group_of)
        gains = np.bincount(group_of, weights=gains).round().astype(np.int64)
    first, second = int((gains > 0).sum()), int((gains < 0).sum())
    return {
        "unit": "row" if a.groups is None else "group",
        "units": len(gains),
        "difference": int(gains.sum()) / len(a.y),
        "interval": list(bootstrapped_difference(gains, sizes)),
        "first_only": first,
        "second_only": second,
        "p": sign_test(first, second),
    }


def bootstrapped_difference(
    gains: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Compute the 95 % percentile interval of a difference of accuracies by the paired bootstrap.

    Units are drawn with replacement, RESAMPLES times, each with both predictions of all its rows
    (B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). Units with
    equal numbers are interchangeable, so the number of units of each kind is drawn instead, which
    has the same distribution.

    Args:
        gains: (m,) for each unit, right rows of the first minus those of the second classifier.
        sizes: (m,) number of rows of each unit.

    Returns:
        low and high, in [-1, 1].
    """
    kinds, counts = np.unique(np.stack([gains, sizes], axis=1), axis=0, return_counts=True)
    rng = np.random.default_rng(0)  # the same numbers for the same predictions
    drawn = rng.multinomial(len(gains), counts / len(gains), size=RESAMPLES)
    total, rows = (drawn @ kinds).T
    low, high = np.quantile(total / rows, [0.025, 0.975])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for the number of tests by Holm's step-down method.

    The i-th smallest of m p-values, counted from 0, becomes the largest of (m - j) p_j for j <= i,
    and 1 at most. S. Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian
    Journal of Statistics 6 (1979).

    Args:
        p_values: p-values of all tests of a family.

    Returns:
        the corrected p-values in the same order.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def sign_test(first: int, second: int) -> float:
    """Compute the two-sided exact p-value of the sign test, which is McNemar's exact test.

    If both classifiers are equally good, each of the n = first + second differences is for either
    of them with probability 1/2, so p = min(1, 2 sum_{i <= min(first, second)} C(n, i) / 2^n).
    Q. McNemar, Note on the Sampling Error of the Difference between Correlated Proportions or
    Percentages, Psychometrika 12 (1947).

    Args:
        first: number of differences for the first classifier.
        second: number of differences for the second classifier.
    """
    n = first + second
    # Whole numbers, because 2^n overflows a float from n = 1024.
    term, total = 1, 0
    for i in range(min(first, second) + 1):
        total += term
        term = term * (n - i) // (i + 1)
    return min(1.0, 2 * total / (1 << n))
