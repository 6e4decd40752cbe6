"""Splits: no row on two sides, every class on both, the same again for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
    split = holdout(UNEVEN, 0.2, 0.25, seed=0)
    assert counts(UNEVEN, split.test) == [10, 4, 1, 0]
    assert counts(UNEVEN, split.validation) == [10, 4, 0, 0]
    assert counts(UNEVEN, split.fit) == [30, 12, 1, 1]
    together = np.sort(np.concatenate([split.fit, split.validation, split.test]))
    assert together.tolist() == list(range(73))
    assert split.train.tolist() == sorted([*split.fit.tolist(), *split.validation.tolist()])


def test_kfold_tests_each_row_once_and_spreads_the_classes() -> None:
    folds = kfold(UNEVEN, 5, 0.2, seed=0)
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
        kfold(np.array([0, 0, 1, 1]), 5, 0.2, seed=0)


def test_few_takes_what_there_is_and_each_draw_another() -> None:
    train = np.arange(73)
    places = few_shot_places(UNEVEN, train, 5, draw=0, seed=0)
    assert counts(UNEVEN, places) == [5, 5, 2, 1]
    assert (places == few_shot_places(UNEVEN, train, 5, draw=0, seed=0)).all()
    assert (places != few_shot_places(UNEVEN, train, 5, draw=1, seed=0)).any()
    assert set(few_shot_places(UNEVEN, np.arange(10), 3, 0, 0)) <= set(range(10))


def test_validation_rows_are_drawn_from_the_training_rows() -> None:
    y = np.array([0, 1] * 10)
    train, test = np.arange(12), np.arange(14, 20)
    drawn = with_validation(y, train, test, 0.5, 0)
    assert len(drawn.validation) == 6
    assert drawn.train.tolist() == train.tolist()


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
