"""Paired comparison of two classifiers on the same test rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from featx.analysis.probe.row_predictions import RowPredictions


def compare(a: RowPredictions, b: RowPredictions) -> dict[str, Any]:
    """Test whether two classifiers differ in accuracy, by those rows that only one predicts right.

    Rows of one group tend to be right or wrong together. With groups, the unit is therefore a
    group, which counts for the classifier with more right rows in it.

    Args:
        a: test rows with the predictions of the first classifier.
        b: the same rows in the same order, with the predictions of the second classifier.

    Returns:
        unit ('row' or 'group'); first_only and second_only, the number of units that count for one
        of the two; and p, as returned by `sign_test`.
    """
    difference = a.right.astype(np.int64) - b.right
    if a.groups is not None:
        _, group_of = np.unique(a.groups, return_inverse=True)
        difference = np.bincount(group_of, weights=difference).round().astype(np.int64)
    first, second = int((difference > 0).sum()), int((difference < 0).sum())
    return {
        "unit": "row" if a.groups is None else "group",
        "first_only": first,
        "second_only": second,
        "p": sign_test(first, second),
    }


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
