"""Time and memory grow as the rows, however many classes there are."""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_store import make_run

from featx.analysis.probe import read_prediction_lines
from featx.analysis.probe.mislabelled import confident_labels
from featx.analysis.probe.splits import few_shot_places, kfold
from featx.store import check_store, layout, merge_listing
from featx.types import Listing, rows_by_label


def made_listing(num_classes: int) -> Listing:
    """Ten rows of each class, in turn."""
    rows = np.arange(10 * num_classes)
    classes = tuple(f"{number:07d}" for number in range(num_classes))
    return Listing(np.array([b"%09d" % row for row in rows]), rows % num_classes, classes)


def new_class(num_classes: int) -> None:
    stored = made_listing(num_classes)
    listed = made_listing(num_classes + 1)
    both = np.searchsorted(listed.keys, stored.keys)
    labels = np.full(len(listed), num_classes)
    labels[both] = stored.labels
    merge_listing(Path("store"), stored, Listing(listed.keys, labels, listed.classes))


def judged(num_classes: int) -> None:
    labels = made_listing(num_classes).labels
    certain = np.ones((1, num_classes))
    confident_labels(labels, num_classes, lambda: [(np.array([0]), certain)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        lambda c: made_listing(4 * c).sample(20 * c),
        lambda c: few_shot_places(made_listing(c).labels, np.arange(10 * c), 1, 0, 0),
        lambda c: kfold(made_listing(c).labels, 5, 0),
        new_class,
        judged,
    ],
    ids=["sample", "few shot", "folds", "a new class", "judged labels"],
)
def test_eight_times_the_classes_and_rows_take_eight_times_as_long(
    work: Callable[[int], object],
) -> None:
    def seconds(num_classes: int) -> float:
        started_at = time.process_time()
        work(num_classes)
        return time.process_time() - started_at

    few = min(seconds(1000) for _ in range(3))
    many = min(seconds(8000) for _ in range(2))
    assert many < 24 * few, (few, many)  # 64 with a pass over all rows for each class


def test_rows_of_labels_are_those_of_a_comparison_with_each() -> None:
    labels = np.array([3, -1, 0, 3, 3, 0, 7])
    expected = [np.flatnonzero(labels == each).tolist() for each in np.unique(labels)]
    assert [rows.tolist() for rows in rows_by_label(labels)] == expected
    assert rows_by_label(labels[:0]) == []


def test_predictions_are_read_line_by_line(tmp_path: Path) -> None:
    """As dicts, the cells of all lines take ten times the file."""
    path = tmp_path / layout.PROBE_HEADS / layout.PROBE_PREDICTIONS
    path.parent.mkdir()
    names = ",".join(f"score:{number}" for number in range(200))
    data = f"seed,{names}\n".encode() + 500 * (b"0," + b",".join([b"0.125"] * 200) + b"\n")
    path.write_bytes(data)
    about = {
        "split": {"seed": 0},
        "predictions": {"sha256": hashlib.sha256(data).hexdigest()},
    }
    tracemalloc.start()
    lines = read_prediction_lines(tmp_path, about)
    assert lines is not None
    assert sum(float(line["score:199"]) for line in lines) == 62.5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(data)


def test_a_failed_row_takes_little_memory_where_a_store_is_verified(tmp_path: Path) -> None:
    """failures.csv is compared as bytes; its parsed lines take 1.5 times as much besides."""
    num_rows = 2000
    run = make_run(num_rows, 4096, {"flat": (2,)}, failed=range(num_rows))
    root = run.finish(tmp_path / "store", packed=True)
    tracemalloc.start()
    assert not check_store(root).damages
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1100 * num_rows, peak / num_rows
