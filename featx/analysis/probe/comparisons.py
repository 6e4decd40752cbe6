"""Paired comparison of classifiers: on the same test rows, also of two stores, or over splits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.metrics import Ints, ProbePredictions, mean_and_spread
from featx.analysis.probe.splits import Split
from featx.errors import DataError, StoreMismatchError
from featx.store import layout
from featx.types import Array, Json, count_different_images

_RESAMPLES = 10_000
"""Number of bootstrap resamples of the interval of a difference."""

_ROUNDING = 1e-9
"""Difference up to which differences of metrics count as equal."""

ALPHA = 0.05
"""Probability of telling apart equally good classifiers, over all comparisons together."""


def compare_with_best(
    best: ProbePredictions, others: Mapping[str, ProbePredictions]
) -> dict[str, dict[str, Any]]:
    """Compare a classifier with each of several others. Return name -> entries of `compare`, with
    told_apart by the two that follow; p_holm, p corrected for the number of others; and
    interval_holm, as wide as this correction asks: with confidence 1 - ALPHA / (m - i) for the i-th
    smallest of m p-values, counted from 0, and for equal ones the first of them.
    """
    tests = {name: compare(best, other) for name, other in others.items()}
    p_values = [test["p"] for test in tests.values()]
    ranks = np.searchsorted(np.sort(p_values), p_values)
    levels = (ALPHA / (len(tests) - ranks)).tolist()
    for (name, test), p, level in zip(tests.items(), holm(p_values), levels, strict=True):
        interval = bootstrapped_difference(*_gains(best, others[name]), level)
        test["p_holm"], test["interval_holm"] = p, interval
        lead = test["first_only"] - test["second_only"]
        test["told_apart"] = _are_told_apart(p, interval, lead)
    return tests


def compare(a: ProbePredictions, b: ProbePredictions) -> dict[str, Any]:
    """Test whether two classifiers differ in accuracy, by those rows that only one predicts right.

    Rows of one group tend to be right or wrong together. With groups, the unit is therefore a
    group, which counts for the classifier with more right rows in it. Return unit ('row' or
    'group') and units, their number; difference, the accuracy of the first minus that of the second
    classifier, and interval (95 %), as returned by `bootstrapped_difference`; first_only and
    second_only, the number of units that count for one of the two; p, two-sided and exact, of the
    sign test; and told_apart, as returned by `_are_told_apart`.

    The sign test is McNemar's exact test: of equally good classifiers, each of the first_only +
    second_only units is for either with probability 1/2. Q. McNemar, Note on the Sampling Error of
    the Difference between Correlated Proportions or Percentages, Psychometrika 12 (1947).
    """
    from scipy.stats import binomtest

    gains, sizes = _gains(a, b)
    first, second = int((gains > 0).sum()), int((gains < 0).sum())
    p = float(binomtest(first, first + second).pvalue) if first + second else 1.0
    interval = bootstrapped_difference(gains, sizes)
    return {
        "unit": "row" if a.groups is None else "group",
        "units": len(gains),
        "difference": int(gains.sum()) / len(a.y),
        "interval": interval,
        "first_only": first,
        "second_only": second,
        "p": p,
        "told_apart": _are_told_apart(p, interval, first - second),
    }


def _are_told_apart(p: float, interval: tuple[float, float] | None, lead: int) -> bool:
    """Return whether two classifiers differ, by both the exact test and the bootstrap, and both for
    the same one; `lead` is the number of units for the first minus that for the second.

    The interval alone is not enough: it is too narrow for a few rows. If 3 of 6 rows are for the
    first classifier and none for the second, the bootstrap gives 0.17 to 0.83, and p is 0.25. Many
    small groups may be for one classifier, and most rows, in a few large groups, for the other.
    """
    if p >= ALPHA or interval is None:
        return p < ALPHA
    low, high = interval
    return low > 0 if lead > 0 else high < 0


def _gains(a: ProbePredictions, b: ProbePredictions) -> tuple[Ints, Ints]:
    """Return for each unit the right rows of `a` minus those of `b`, and its number of rows."""
    gains = a.right.astype(np.int64) - b.right
    if a.groups is None:
        return gains, np.ones_like(gains)
    _, group_of = np.unique(a.groups, return_inverse=True)
    group_gains = np.bincount(group_of, weights=gains).round().astype(np.int64)
    return group_gains, np.bincount(group_of)


def bootstrapped_difference(
    gains: Ints, sizes: Ints, alpha: float = ALPHA
) -> tuple[float, float] | None:
    """Compute the percentile interval of a difference of accuracies by the paired bootstrap.

    Units are drawn with replacement, _RESAMPLES times, each with both predictions of all its rows
    (B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). Units with
    equal numbers are interchangeable, so the number of units of each kind is drawn instead, which
    has the same distribution. The differences are those in favour of the classifier that is ahead,
    so that exchanged classifiers have the same interval with the other sign; if none is ahead, the
    ends are means of both. Return low and high, in [-1, 1]; None if all resamples have the same
    difference, such as those of a single unit, or of units that no classifier wins. They tell
    nothing about its error.
    """
    lead = gains.sum()
    interval = _drawn_interval(gains if lead >= 0 else -gains, sizes, alpha)
    if interval is None:
        return None
    low, high = interval
    if lead == 0 and (exchanged := _drawn_interval(-gains, sizes, alpha)) is not None:
        low, high = (low - exchanged[1]) / 2, (high - exchanged[0]) / 2
    return (low, high) if lead >= 0 else (0.0 - high, 0.0 - low)  # not -0.0


def _drawn_interval(gains: Ints, sizes: Ints, alpha: float) -> tuple[float, float] | None:
    kinds, counts = np.unique(np.stack([gains, sizes], axis=1), axis=0, return_counts=True)
    rng = np.random.default_rng(0)  # the same numbers for the same predictions
    drawn = rng.multinomial(len(gains), counts / len(gains), size=_RESAMPLES)
    total, rows = (drawn @ kinds).T
    differences = total / rows
    if differences.min() == differences.max():
        return None
    low, high = np.quantile(differences, [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for the number of tests by Holm's step-down method.

    The i-th smallest of m p-values, counted from 0, becomes the largest of (m - j) p_j for j <= i,
    and 1 at most. S. Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian
    Journal of Statistics 6 (1979).
    """
    order, corrected = np.argsort(p_values, kind="stable"), np.empty(len(p_values))
    factors = len(p_values) - np.arange(len(p_values))
    raised = np.minimum(1, factors * np.asarray(p_values, np.float64)[order])
    corrected[order] = np.maximum.accumulate(raised)
    return corrected.tolist()


def resampled_test(
    differences: Sequence[float], test_share: float
) -> tuple[tuple[float, float] | None, float | None]:
    """Test whether the mean of differences over several random splits is 0.

    The training rows of the splits overlap, so that the variance v of J differences is too small
    for that of their mean. The corrected resampled t-test takes v (1 / J + test_share) in place of
    v / J, with J - 1 degrees of freedom (C. Nadeau and Y. Bengio, Inference for the Generalization
    Error, Machine Learning 52, 2003; for repeated folds R. Bouckaert and E. Frank, PAKDD 2004).
    Return the interval of the mean, and the two-sided p. Both are None if all differences are
    equal, because their variance of 0 tells nothing about the error of the mean; but p is 1 if all
    of them are 0.
    """
    from scipy.stats import t

    count, mean = len(differences), float(np.mean(differences))
    # 23/24 - 22/24 and 22/24 - 21/24 differ in their last bits.
    if np.ptp(differences) <= _ROUNDING * max(1.0, abs(mean)):
        return None, 1.0 if abs(mean) <= _ROUNDING else None
    error = float(np.std(differences, ddof=1)) * math.sqrt(1 / count + test_share)
    half = error * float(t.ppf(1 - ALPHA / 2, count - 1))
    return (mean - half, mean + half), 2 * float(t.sf(abs(mean) / error, count - 1))


_EQUAL = "the difference is the same in every split, which tells nothing about its error"
"""Reason why `resampled_test` gives no p-value."""


def spread(values: Sequence[float]) -> dict[str, object]:
    """Return mean, sample standard deviation, smallest and largest value, and the values."""
    return {**mean_and_spread(list(values)), "min": min(values), "max": max(values)}


def metric_spreads(
    names: Sequence[str], entries: Sequence[Json]
) -> dict[str, dict[str, object] | None]:
    """Return metric -> `spread` over the seeds, None if it is not available for every seed."""
    spreads: dict[str, dict[str, object] | None] = {}
    for name in names:
        values = [entry[name] for entry in entries]
        spreads[name] = None if None in values else spread(values)
    return spreads


def differences(
    by_seed: Mapping[str, Sequence[float]],
    by_split: Mapping[str, Sequence[float]],
    best: str,
    splits: Sequence[Split],
) -> dict[str, Any]:
    """Compare a layer with each other one by a metric on the test rows: `by_seed` has layer ->
    values over all splits of each seed, `by_split` those of each split. Return other layer ->
    spread over the seeds of the value of the best layer minus that of the other one; interval and p
    of the mean over all splits, as returned by `resampled_test`; p_holm, corrected for the number
    of layers; told_apart, whether it is below ALPHA; and not_tested, the reason if p is None, and
    with it the two entries before.
    """
    share = float(np.mean([len(split.test) / len(split.train) for split in splits]))
    entries: dict[str, Any] = {}
    for layer in (name for name in by_seed if name != best):
        of_seeds, of_splits = (
            [first - second for first, second in zip(values[best], values[layer], strict=True)]
            for values in (by_seed, by_split)
        )
        interval, p = resampled_test(of_splits, share)
        entries[layer] = {**spread(of_seeds), "interval": interval, "p": p}
    # A layer without a p-value counts as a test of the family that finds nothing.
    corrected = holm([1.0 if entry["p"] is None else entry["p"] for entry in entries.values()])
    for entry, p in zip(entries.values(), corrected, strict=True):
        is_tested = entry["p"] is not None
        entry["p_holm"], entry["told_apart"] = (p, p < ALPHA) if is_tested else (None, None)
        entry["not_tested"] = None if is_tested else _EQUAL
    return entries


@dataclass(frozen=True)
class OtherProbe:
    """Predictions of the best layer of another store: by key, the true and predicted class of each
    test row, and the checksum of its image.
    """

    store: str
    layer: str
    method: str
    tested: Mapping[str, tuple[str, str]]
    checksums: Mapping[str, int]


def compared_store_entry(
    other: OtherProbe,
    ours: ProbePredictions,
    keys: Array,
    checksums: npt.NDArray[np.uint64],
    classes: Sequence[str],
) -> Json:
    """Compare the predictions for the rows that both probes tested. Return store, layer and method
    of the other probe; rows, the number of rows that both tested; rows_left_out, the number of test
    rows of this store that the other did not test; rows_of_other_images, the number of compared
    rows whose images have other bytes there; the accuracies of both on these rows; and the entries
    of `paired_tests.compare`.
    """
    is_tested = np.array([str(key) in other.tested for key in keys.tolist()])
    if not is_tested.any():
        raise DataError(
            f"{other.store} has tested none of the {len(keys)} test rows of "
            "this probe. Probe both with the same rows, labels, seed and split; "
            f"probe.split={other.store}/{layout.PROBE_HEADS}/"
            f"{layout.PROBE_PREDICTIONS} takes the split of the other one."
        )
    rows = np.flatnonzero(is_tested)
    number = {name: i for i, name in enumerate(classes)}
    classes_there = [other.tested[str(key)] for key in keys[rows].tolist()]
    for row, (true, _) in zip(rows.tolist(), classes_there, strict=True):
        if true != classes[ours.y[row]]:
            raise StoreMismatchError(
                f"{keys[row]} is of the class {classes[ours.y[row]]} in this store and of {true} "
                f"in {other.store}; stores are compared on rows with the same labels."
            )
    there = np.array([other.checksums[str(key)] for key in keys[rows].tolist()], np.uint64)
    # A class that this store does not have is a wrong prediction.
    predicted = np.array([number.get(name, -1) for _, name in classes_there])
    groups = None if ours.groups is None else ours.groups[rows]
    a = ProbePredictions(ours.y[rows], ours.predicted[rows], None, None, groups)
    b = ProbePredictions(ours.y[rows], predicted, None, None, groups)
    return {
        "store": other.store,
        "layer": other.layer,
        "method": other.method,
        "rows": len(rows),
        "rows_left_out": len(keys) - len(rows),
        "rows_of_other_images": count_different_images(checksums[rows], there),
        "accuracies": [float(a.right.mean()), float(b.right.mean())],
        **compare(a, b),
    }
