"""Paired comparison of classifiers: exact p-values, with rows and with groups."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from featx.analysis.probe.comparisons import (
    bootstrapped_difference,
    compare,
    compare_with_best,
    holm,
    resampled_test,
)
from featx.analysis.probe.comparisons import differences as compare_splits
from featx.analysis.probe.metrics import ProbePredictions
from featx.analysis.probe.splits import Split
from featx.analysis.probe.texts import difference_text


def rows_with(right: list[bool], groups: list[int] | None = None) -> ProbePredictions:
    """Test rows of class 0, of which some are predicted right."""
    predicted = np.where(right, 0, 1)
    of_row = None if groups is None else np.array(groups)
    return ProbePredictions(np.zeros(len(right), np.int64), predicted, None, None, of_row)


@pytest.mark.parametrize(
    ("first", "second", "p"), [(0, 0, 1), (1, 0, 1), (3, 2, 1), (0, 4, 2 / 16), (5, 1, 14 / 64)]
)
def test_p_is_that_of_mcnemars_exact_test(first: int, second: int, p: float) -> None:
    a, b = ([True, *[is_a] * first, *[not is_a] * second] for is_a in (True, False))
    found = compare(rows_with(a), rows_with(b))
    assert (found["first_only"], found["second_only"]) == (first, second)
    assert found["p"] == pytest.approx(p, rel=1e-12)


def test_a_group_counts_once() -> None:
    groups = [0, 0, 0, 1, 1, 2]
    a = rows_with([True, True, True, True, False, False], groups)
    b = rows_with([False, False, False, False, True, False], groups)
    # Group 0 is for a; in group 1 each is right once; in group 2 neither is.
    found = compare(a, b)
    assert (found["unit"], found["units"]) == ("group", 3)
    assert (found["first_only"], found["second_only"], found["p"]) == (1, 0, 1.0)
    assert found["difference"] == pytest.approx(4 / 6 - 1 / 6)


def test_groups_and_rows_for_different_classifiers_tell_nothing() -> None:
    """30 groups of a row are for the first, and 8 groups of 20 rows for the second."""
    groups = [*range(30), *np.repeat(np.arange(30, 38), 20).tolist()]
    a, b = (rows_with([is_a] * 30 + [not is_a] * 160, groups) for is_a in (True, False))
    found = compare_with_best(a, {"b": b})["b"]
    assert found["p"] < 0.001
    assert found["interval_holm"][1] < 0
    assert not found["told_apart"]
    assert "they cannot be told apart: more groups are for the other one" in difference_text(
        "a", "b", found, "p"
    )


def test_the_bootstrap_draws_groups_like_scipys() -> None:
    """scipy draws groups with all their rows; here kinds of groups are drawn."""
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 9, 60)
    gains = rng.binomial(sizes, 0.4) - rng.binomial(sizes, 0.3)
    expected = stats.bootstrap(
        (gains, sizes),
        lambda gained, rows, axis: gained.sum(axis) / rows.sum(axis),
        paired=True, vectorized=True, n_resamples=20_000, method="percentile", rng=1,
    ).confidence_interval  # fmt: skip
    found = bootstrapped_difference(gains, sizes)
    assert found == pytest.approx(tuple(expected), abs=0.006)


@pytest.mark.parametrize("gains", [[1] * 10, [0] * 10, [-1]])
def test_a_difference_that_all_resamples_share_has_no_interval(gains: list[int]) -> None:
    assert bootstrapped_difference(np.array(gains), np.ones(len(gains), np.int64)) is None
    # Groups of different sizes that one classifier wins completely.
    assert bootstrapped_difference(np.array([2, 3]), np.array([2, 3])) is None


def test_holm_gives_the_numbers_of_r() -> None:
    # p.adjust(p, "holm") of R 4.3
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert holm([0.5, 0.001, 0.02]) == pytest.approx([0.5, 0.003, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_layers_are_told_apart_by_corrected_intervals() -> None:
    """The interval of the i-th smallest p-value has the level that Holm compares it with."""
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.8
    others = {}
    for name, flipped in (("far", 60), ("near", 14), ("same", 0)):
        worse = right.copy()
        worse[np.flatnonzero(right)[:flipped]] = False
        others[name] = rows_with(worse.tolist())
    found = compare_with_best(rows_with(right.tolist()), others)
    assert [found[name]["told_apart"] for name in others] == [True, True, False]
    gains = np.repeat([1, 0], [60, 340])
    expected = bootstrapped_difference(gains, np.ones(400, np.int64), 0.05 / 3)
    assert found["far"]["interval_holm"] == pytest.approx(expected)
    gains = np.repeat([1, 0], [14, 386])
    expected = bootstrapped_difference(gains, np.ones(400, np.int64), 0.05 / 2)
    assert found["near"]["interval_holm"] == pytest.approx(expected)
    wide, narrow = (found["far"][name] for name in ("interval_holm", "interval"))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_exchanged_classifiers_have_the_interval_with_the_other_sign() -> None:
    rng = np.random.default_rng(4)
    a, b = (rows_with((rng.random(60) < share).tolist()) for share in (0.6, 0.75))
    found, exchanged = compare(a, b), compare(b, a)
    assert found["difference"] == -exchanged["difference"] != 0
    assert found["interval"] == tuple(-end for end in reversed(exchanged["interval"]))
    assert found["p"] == pytest.approx(exchanged["p"], rel=1e-12)
    sizes = np.array([1, 1, 2, 1, 3, 2, 1, 1])
    for gains in (np.array([1, 1, -2, 0, 3, -1, -1, -1]), np.repeat([1, -1], 4)):  # none is ahead
        low, high = bootstrapped_difference(gains, sizes) or (0, 0)
        assert bootstrapped_difference(-gains, sizes) == (-high, -low) != (0, 0)


def test_equal_layers_have_equal_entries() -> None:
    """Whichever comes first among layers of the same p-value."""
    right = np.arange(60) >= 0
    others = {name: rows_with((right & (np.arange(60) >= 9)).tolist()) for name in ("b", "c", "d")}
    found = compare_with_best(rows_with(right.tolist()), others)
    assert found["b"] == found["c"] == found["d"]


def test_the_resampled_test_keeps_its_level_where_the_plain_one_does_not() -> None:
    """Means of overlapping halves of noise: the t-test of scipy finds too many differences."""
    rng, found, plain = np.random.default_rng(1), 0, 0
    for _ in range(300):
        noise = rng.normal(size=50)
        means = [noise[rng.permutation(50)[:25]].mean() for _ in range(20)]
        found += (resampled_test(means, 1.0)[1] or 0.0) < 0.05
        plain += stats.ttest_1samp(means, 0).pvalue < 0.05
    assert found <= 0.1 * 300 < plain


@pytest.mark.parametrize(
    ("differences", "p"),
    [([0.1, 0.1], None), ([0.0, 0.0], 1.0), ([23 / 24 - 22 / 24, 22 / 24 - 21 / 24], None)],
)
def test_equal_differences_over_splits_tell_nothing_about_their_error(
    differences: list[float], p: float | None
) -> None:
    assert resampled_test(differences, 0.25) == (None, p)
    splits = [Split(np.arange(60), np.arange(60, 80), np.arange(80, 100))] * 2
    values = {
        "best": differences,
        "flat": [0.0, 0.0],
        "far": [-0.5, -0.501],
    }
    found = compare_splits(values, values, "best", splits)
    assert found["flat"]["p"] == found["flat"]["p_holm"] == p
    assert found["flat"]["told_apart"] is (None if p is None else False)
    assert (found["flat"]["not_tested"] is None) == (p is not None)
    # The layer without a test counts in the correction.
    assert found["far"]["p_holm"] == pytest.approx(2 * found["far"]["p"])
    assert found["far"]["not_tested"] is None
