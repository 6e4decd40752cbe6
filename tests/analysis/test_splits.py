"""Splits of rows and of groups: nothing on two sides, every class on both, the same for a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold

from featx.analysis.probe.groups import fold_of_groups, share_of_groups
from featx.analysis.probe.splits import (
    few_shot_places,
    holdout,
    kfold,
    read_split_file,
    with_validation,
)
from featx.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")

UNEVEN = np.repeat([0, 1, 2, 3], [50, 20, 2, 1])


def counts(y: np.ndarray, places: np.ndarray) -> list[int]:
    return np.bincount(y[places], minlength=4).tolist()


def test_holdout_takes_a_share_of_each_class_and_leaves_a_single_row_to_train() -> None:
    split = holdout(UNEVEN, 0.2, seed=0)
    assert counts(UNEVEN, split.test) == [10, 4, 1, 0]
    assert counts(UNEVEN, split.validation) == [8, 3, 0, 0]
    assert counts(UNEVEN, split.fit) == [32, 13, 1, 1]
    together = np.sort(np.concatenate([split.fit, split.validation, split.test]))
    assert together.tolist() == list(range(73))
    assert split.train.tolist() == sorted([*split.fit.tolist(), *split.validation.tolist()])


def test_kfold_tests_each_row_once_and_spreads_the_classes() -> None:
    folds = kfold(UNEVEN, 5, seed=0)
    tested = np.concatenate([split.test for split in folds])
    assert sorted(tested.tolist()) == list(range(72))  # the single row of class 3 never is
    for split in folds:
        assert not set(split.test) & set(split.train)
        assert not set(split.fit) & set(split.validation)
        assert len(split.test) in (14, 15)
        assert counts(UNEVEN, split.test)[:2] == [10, 4]
        assert 72 in split.fit
        # Also the class with two rows, each tested in another fold, is trained on in every fold.
        assert counts(UNEVEN, split.train)[2] >= 1


def test_more_folds_than_rows_are_refused() -> None:
    with pytest.raises(DataError, match="fold 5 is empty"):
        kfold(np.array([0, 0, 1, 1]), 5, seed=0)


def test_few_takes_what_there_is_and_each_draw_another() -> None:
    train = np.arange(73)
    places = few_shot_places(UNEVEN, train, 5, draw=0, seed=0)
    assert counts(UNEVEN, places) == [5, 5, 2, 1]
    assert (places == few_shot_places(UNEVEN, train, 5, draw=0, seed=0)).all()
    assert (places != few_shot_places(UNEVEN, train, 5, draw=1, seed=0)).any()
    assert set(few_shot_places(UNEVEN, np.arange(10), 3, 0, 0)) <= set(range(10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,split\na,train\n", "no column key"),
        ("key,split\na,trian\n", "line 2: split is 'trian'"),
        ("key,split\na\n", "line 2: split is ''"),
        ("key,split\na,train\na,test\n", "names 'a' for two splits"),
    ],
)
def test_a_wrong_split_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "splits.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_split_file(path, ["a"])
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        read_split_file(tmp_path / "nowhere.csv", ["a"])


def made_groups(
    num_groups: int, num_classes: int, seed: int, pure: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Classes and groups of rows; groups have 1 to 12 rows, of one class (pure) or of several."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 13, num_groups)
    groups = np.repeat(np.arange(num_groups), sizes)
    if pure:
        return np.repeat(rng.integers(0, num_classes, num_groups), sizes), groups
    return rng.integers(0, num_classes, len(groups)), groups


def sides(groups: np.ndarray, some: np.ndarray, others: np.ndarray) -> set[int]:
    return set(groups[some].tolist()) & set(groups[others].tolist())


@pytest.mark.parametrize("pure", [True, False])
def test_holdout_divides_no_group_and_meets_the_shares(pure: bool) -> None:
    y, groups = made_groups(300, 4, seed=1, pure=pure)
    order = np.random.default_rng(0).permutation(len(y))  # groups need not lie together
    y, groups = y[order], groups[order]
    split = holdout(y, 0.2, seed=3, groups=groups)
    assert not sides(groups, split.test, split.train)
    assert not sides(groups, split.validation, split.fit)
    together = np.concatenate([split.fit, split.validation, split.test])
    assert np.sort(together).tolist() == list(range(len(y)))
    for label in range(4):
        rows = (y == label).sum()
        assert (y[split.test] == label).sum() / rows == pytest.approx(0.2, abs=0.03)
        assert (y[split.validation] == label).sum() / rows == pytest.approx(0.16, abs=0.03)
    again = holdout(y, 0.2, seed=3, groups=groups)
    assert (again.test == split.test).all()
    assert len(np.setdiff1d(holdout(y, 0.2, seed=4, groups=groups).test, split.test))


@pytest.mark.parametrize("pure", [True, False])
def test_kfold_spreads_classes_as_well_as_scikit_learn(pure: bool) -> None:
    y, groups = made_groups(120, 5, seed=2, pure=pure)
    folds = kfold(y, 5, seed=0, groups=groups)
    assert np.sort(np.concatenate([split.test for split in folds])).tolist() == list(range(len(y)))
    for split in folds:
        assert not sides(groups, split.test, split.train)
        assert not sides(groups, split.validation, split.fit)

    def unevenness(tests: list[np.ndarray]) -> float:
        shares = [np.bincount(y[test], minlength=5) / np.bincount(y) for test in tests]
        return float(np.std(shares, axis=0).max())

    theirs = StratifiedGroupKFold(5, shuffle=True, random_state=0).split(y, y, groups)
    ours = unevenness([split.test for split in folds])
    assert ours <= 1.2 * unevenness([test for _, test in theirs]) + 0.01


def test_a_class_in_one_group_is_trained_on_and_one_in_two_is_tested() -> None:
    y = np.array([0] * 6 + [1] * 6 + [2] * 3)
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5])
    for seed in range(20):
        split = holdout(y, 0.2, seed=seed, groups=groups)
        assert set(y[split.test]) == {0, 1}
        assert len(np.unique(groups[split.test])) == 2
        assert {0, 1, 2} == set(y[split.train])
        folds = kfold(y, 2, seed=seed, groups=groups)
        for fold in folds:
            assert set(y[fold.test]) == {0, 1}
            assert set(y[fold.train]) == {0, 1, 2}


def test_drawn_validation_rows_of_a_given_split_divide_no_group() -> None:
    y, groups = made_groups(60, 3, seed=5)
    train, test = np.flatnonzero(groups < 40), np.flatnonzero(groups >= 40)
    split = with_validation(y, train, test, 0, groups)
    assert not sides(groups, split.validation, split.fit)
    assert len(split.validation) == pytest.approx(0.2 * len(train), abs=12)


@settings(max_examples=50, deadline=None)
@examples(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=4, max_size=60),
    folds=st.integers(2, 5),
    seed=st.integers(0, 3),
)
def test_no_group_is_divided_and_no_class_is_lost(
    rows: list[tuple[int, int]], folds: int, seed: int
) -> None:
    y, groups = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    rng = np.random.default_rng(seed)
    chosen = share_of_groups(y, groups, 0.2, rng)
    assert not sides(groups, chosen, ~chosen)
    assert set(y) == set(y[~chosen])  # every class is left to train on
    fold_of = fold_of_groups(y, groups, folds, rng)
    for group in np.unique(groups):
        assert len(set(fold_of[groups == group])) == 1
    single = [label for label in set(y) if len(set(groups[y == label])) == 1]
    assert (fold_of[np.isin(groups, groups[np.isin(y, single)])] == -1).all()
