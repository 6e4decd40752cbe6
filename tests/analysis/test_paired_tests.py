"""Paired comparison of classifiers: exact p-values, with rows and with groups."""

from __future__ import annotations

import numpy as np
import pytest

from featx.analysis.probe.metrics import Predictions
from featx.analysis.probe.paired_tests import compare, sign_test
from featx.analysis.probe.row_predictions import RowPredictions, join_folds


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (1, 0), (3, 2), (17, 3), (0, 40), (1000, 1100), (4000, 2)]
)
def test_the_sign_test_is_the_binomial_test_of_scipy(first: int, second: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle; featx[demo] has it")
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected, rel=1e-9)


def rows_with(right: list[bool], groups: list[int] | None = None) -> RowPredictions:
    """Test rows of class 0, of which some are predicted right."""
    predicted = np.where(right, 0, 1)
    of_row = None if groups is None else np.array(groups)
    return RowPredictions(np.zeros(len(right), np.int64), predicted, None, None, of_row)


def test_only_rows_that_differ_count() -> None:
    a = rows_with([True, True, True, True, False, False])
    b = rows_with([True, False, False, False, True, False])
    found = compare(a, b)
    assert found == {"unit": "row", "first_only": 3, "second_only": 1, "p": 10 / 16}


def test_a_group_counts_once() -> None:
    groups = [0, 0, 0, 1, 1, 2]
    a = rows_with([True, True, True, True, False, False], groups)
    b = rows_with([False, False, False, False, True, False], groups)
    # Group 0 is for a; in group 1 each is right once; in group 2 neither is.
    assert compare(a, b) == {"unit": "group", "first_only": 1, "second_only": 0, "p": 1.0}


def test_accuracy_on_some_of_the_rows() -> None:
    rows = rows_with([True, True, False, True])
    found = rows.accuracy_of(np.array([True, False, True, True]))
    assert found is not None
    assert (found["rows"], found["correct"], found["accuracy"]) == (3, 2, 2 / 3)
    assert rows.accuracy_of(np.zeros(4, bool)) is None


def test_probabilities_are_those_of_the_true_and_the_predicted_class() -> None:
    scores = np.array([[0.7, 0.3], [0.6, 0.4]])
    found = join_folds([Predictions(np.array([0, 1]), scores, True)] * 2)
    assert found.predicted.tolist() == [0, 0, 0, 0]
    assert found.p_true is not None
    assert found.p_true.tolist() == [0.7, 0.4, 0.7, 0.4]
    assert found.p_predicted is not None
    assert found.p_predicted.tolist() == [0.7, 0.6, 0.7, 0.6]
    ridge = join_folds([Predictions(np.array([0, 1]), scores, False)])
    assert ridge.p_true is None
