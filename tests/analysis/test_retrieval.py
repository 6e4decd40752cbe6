"""recall@k and mAP against sorting by hand and scikit-learn's average precision of each row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from probe_problem import blobs, write_store
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler

import featx
from featx.analysis.similarity import retrieval_metrics

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


def expected(x: np.ndarray, y: np.ndarray, metric: str) -> tuple[dict[str, float], float]:
    """By one sort and one call for each row."""
    x = x.astype(np.float64)
    if metric == "cosine":
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        scores = unit @ unit.T
    else:
        scores = -np.linalg.norm(x[:, None] - x, axis=2)
    hits: dict[str, list[bool]] = {"1": [], "5": [], "10": []}
    precisions = []
    for i in range(len(x)):
        others = np.delete(np.arange(len(x)), i)
        same = y[others] == y[i]
        if not same.any():
            continue
        ranked = same[np.argsort(-scores[i, others], kind="stable")]
        for k, found in hits.items():
            found.append(bool(ranked[: int(k)].any()))
        precisions.append(average_precision_score(same, scores[i, others]))
    return {k: float(np.mean(found)) for k, found in hits.items()}, float(np.mean(precisions))


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_every_row_retrieves_its_class(metric: str, standardise: bool) -> None:
    x, y = blobs(120, num_classes=5, signal=0.3)
    y[7] = 5  # the only row of its class
    y[[3, 11]] = -1
    x[3] *= 100
    failed = [20, 21]
    write_store(Path("store"), y, failed=failed, x=x)
    store = featx.open("store")
    found = retrieval_metrics(store, "x", metric, "cpu", standardise)
    assert found is not None
    if standardise:  # over all rows, as the neighbours are
        x = StandardScaler().fit(np.delete(x, failed, 0)).transform(x)
    used = np.setdiff1d(np.flatnonzero(y >= 0), failed)
    recall, mean = expected(x[used], y[used], metric)
    assert found["recall"] == pytest.approx(recall)
    assert found["map"] == pytest.approx(mean, abs=1e-6)
    assert (found["queries"], found["queries_left_out"]) == (len(used) - 1, 1)


def test_ties_count_against_the_class() -> None:
    x = np.ones((4, 3), np.float32)
    x[3] = [0, 1, 2]
    write_store(Path("store"), np.array([0, 0, 1, 1]), x=x)
    found = retrieval_metrics(featx.open("store"), "x", "euclidean", "cpu")
    assert found is not None
    # Rows 0 and 1 have row 2 as near as their class, row 2 has two, row 3 has two: none is first.
    assert found["recall"] == {"1": 0.0}
    write_store(Path("zeros"), np.array([0, 0, 1, 1]), x=np.array([[0, 0], [0, 0], [1, 2], [2, 1]]))
    found = retrieval_metrics(featx.open("zeros"), "x", "cosine", "cpu")
    assert found is not None
    # A vector of zeros is as near to all others, copies too; they come last for other vectors.
    assert found["recall"] == {"1": 0.5}


@pytest.mark.parametrize(
    ("metric", "offset", "rows_of_block"),
    [("cosine", 0, 3), ("cosine", 1000, None), ("euclidean", 0, None), ("euclidean", 1000, 3)],
)
def test_copies_are_ties_whatever_their_values(
    metric: str, offset: float, rows_of_block: int | None, set_block_sizes: Callable[..., None]
) -> None:
    """Copies of one vector in two classes, with values that have no finite binary fraction."""
    if rows_of_block:
        set_block_sizes(rows_of_block * 301 * 4, keep_bytes=0)
    rng = np.random.default_rng(0)
    groups = (rng.normal(size=(4, 1, 301)) / 3 + offset).astype(np.float32)
    y = np.arange(40) % 2
    write_store(Path("store"), y, x=groups.repeat(10, axis=1).reshape(40, 301))
    found = retrieval_metrics(featx.open("store"), "x", metric, "cpu")
    assert found is not None
    # Four of the nine copies of a row have its class and five have not.
    assert found["recall"] == {"1": 0.0, "5": 0.0, "10": 1.0}
    # Precision is 4 / 9 at the copies. Of the other 15 rows of the class five follow at a time, at
    # ranks that are the same for all rows.
    precisions = [4 / 9] * 4 + [9 / 19] * 5 + [14 / 29] * 5 + [19 / 39] * 5
    assert found["map"] == pytest.approx(np.mean(precisions), abs=1e-12)


def test_a_row_that_is_nearer_by_little_is_nearer() -> None:
    x = np.full((4, 8), 0.1, np.float32)
    x[1, 0] += 1e-4
    x[2, 0] += 3e-4
    x[3, 1] = 5
    write_store(Path("store"), np.array([0, 0, 1, 1]), x=x)
    found = retrieval_metrics(featx.open("store"), "x", "euclidean", "cpu")
    assert found is not None
    # Rows 0 and 1 find each other; rows 2 and 3 have a row of the other class nearer.
    assert found["recall"] == {"1": 0.5}


def test_without_two_rows_of_a_class_there_is_nothing_to_retrieve() -> None:
    x, _ = blobs(5)
    write_store(Path("store"), np.arange(5), x=x)
    assert retrieval_metrics(featx.open("store"), "x", "cosine", "cpu") is None
