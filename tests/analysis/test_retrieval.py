"""recall@k and mAP against sorting by hand, whole numbers, and scikit-learn's average precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from made_store import make_labelled
from probe_problem import blobs, write_store
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler

import featx
from featx.analysis.similarity import retrieval_metrics
from featx.analysis.similarity.nearest_neighbours import QUERIES

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


def expected(
    x: np.ndarray, y: np.ndarray, metric: str, images: np.ndarray | None = None
) -> tuple[dict[str, float], float]:
    """By one sort and one call for each row; rows of one image do not retrieve each other."""
    x, images = x.astype(np.float64), np.arange(len(x)) if images is None else images
    if metric == "cosine":
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        scores = unit @ unit.T
    else:
        scores = -np.linalg.norm(x[:, None] - x, axis=2)
    hits: dict[str, list[bool]] = {"1": [], "5": [], "10": []}
    precisions = []
    for i in range(len(x)):
        others = np.flatnonzero(images != images[i])
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
def test_every_row_retrieves_its_class(
    metric: str, standardise: bool, set_block_sizes: Callable[..., None]
) -> None:
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
    set_block_sizes(16 * QUERIES * 7)
    without = retrieval_metrics(store, "x", metric, "cpu", standardise, max_ranked=len(used) - 1)
    assert without is not None
    assert (without["recall"], without["map"]) == (found["recall"], None)


def test_ties_count_against_the_class() -> None:
    x = np.ones((4, 3), np.float32)
    x[3] = [0, 1, 2]
    write_store(Path("store"), np.array([0, 0, 1, 1]), x=x)
    found = retrieval_metrics(featx.open("store"), "x", "euclidean", "cpu", standardise=False)
    assert found is not None
    # Rows 0 and 1 have row 2 as near as their class, row 2 has two, row 3 has two: none is first.
    assert found["recall"] == {"1": 0.0}
    write_store(Path("zeros"), np.array([0, 0, 1, 1]), x=np.array([[0, 0], [0, 0], [1, 2], [2, 1]]))
    found = retrieval_metrics(featx.open("zeros"), "x", "cosine", "cpu", standardise=False)
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
    found = retrieval_metrics(featx.open("store"), "x", metric, "cpu", standardise=False)
    assert found is not None
    # Four of the nine copies of a row have its class and five have not.
    assert found["recall"] == {"1": 0.0, "5": 0.0, "10": 1.0}
    # Precision is 4 / 9 at the copies. Of the other 15 rows of the class five follow at a time, at
    # ranks that are the same for all rows.
    precisions = [4 / 9] * 4 + [9 / 19] * 5 + [14 / 29] * 5 + [19 / 39] * 5
    assert found["map"] == pytest.approx(np.mean(precisions), abs=1e-12)


def test_vectors_of_one_direction_are_ties() -> None:
    """Also where this direction is the centre; the lengths are rounded, and the values are not."""
    x = np.outer(np.arange(1, 41), [99, 101]).astype(np.float32)
    write_store(Path("store"), np.arange(40) % 2, x=x)
    found = retrieval_metrics(featx.open("store"), "x", "cosine", "cpu", standardise=False)
    assert found is not None
    assert found["recall"] == {"1": 0, "5": 0, "10": 0}
    assert found["map"] == pytest.approx(19 / 39, abs=1e-12)


def exact_nearness(x: np.ndarray, metric: str, standardise: bool) -> list[list[Fraction]]:
    """Numbers in the order of nearness, in whole numbers: two are equal if and only if they are."""
    n, width = x.shape
    columns = [[Fraction(int(value)) for value in column] for column in x.T]
    weights = [Fraction(1)] * width
    if standardise:
        columns = [[value - sum(column) / n for value in column] for column in columns]
        weights = [n / (sum(v * v for v in column) or Fraction(n)) for column in columns]

    def dot(a: list[Fraction], b: list[Fraction]) -> Fraction:
        return sum((w * s * t for w, s, t in zip(weights, a, b, strict=True)), Fraction(0))

    rows = [list(row) for row in zip(*columns, strict=True)]
    if metric == "euclidean":
        gaps = [[[s - t for s, t in zip(a, b, strict=True)] for b in rows] for a in rows]
        return [[-dot(gap, gap) for gap in line] for line in gaps]
    # The square of a cosine with its sign.
    return [[abs(dot(a, b)) * dot(a, b) / (dot(a, a) * dot(b, b)) for b in rows] for a in rows]


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_pairs_that_are_exactly_as_near_are_ties(metric: str, standardise: bool) -> None:
    """Whole numbers, of which many different pairs are as near; in any order of rows and values."""
    num_ties = 0
    for seed in range(2):
        rng = np.random.default_rng(seed)
        base = rng.integers(-1, 2, (3, 4))
        base[~base.any(1), 0] = 1  # no row of zeros
        # All columns have one mean and one deviation, neither of which is a finite binary fraction.
        x = np.concatenate([np.roll(base, shift, axis=1) for shift in range(4)])
        y = rng.permutation(12) % 3
        near = exact_nearness(x, metric, standardise)
        ranks, precisions = [], []
        for i in range(12):
            others = [j for j in range(12) if j != i]
            num_ties += len(others) - len({near[i][j] for j in others})
            same = [j for j in others if y[j] == y[i]]
            as_near = {j: [k for k in others if near[i][k] >= near[i][j]] for j in same}
            shares = [sum(y[k] == y[i] for k in found) / len(found) for found in as_near.values()]
            precisions.append(np.mean(shares))
            ranks.append(min(sum(y[k] != y[i] for k in found) for found in as_near.values()))
        for k, order in enumerate((np.arange(12), rng.permutation(12))):
            made = x[order][:, rng.permutation(4)].astype(np.float32)
            store = featx.open(write_store(Path(f"{seed}-{k}"), y[order], x=made))
            found = retrieval_metrics(store, "x", metric, "cpu", standardise)
            assert found is not None
            assert found["map"] == pytest.approx(np.mean(precisions), abs=1e-12)
            assert found["recall"] == {
                str(k): pytest.approx(np.mean(np.array(ranks) < k)) for k in (1, 5, 10)
            }
    assert num_ties > 50


def test_other_views_of_an_image_are_no_hits() -> None:
    """Views and boxes of one image are nearest to each other."""
    x, y = blobs(40, num_classes=4, signal=0.3)
    x, y, images = x.repeat(3, axis=0), y.repeat(3), np.arange(40).repeat(3)
    x[1::3] += 1e-4
    x[2::3] += 2e-4
    ends = (b"", b"#0,0,5,5", b"#hflip")
    keys = np.array([b"%02d.jpg%s" % (image, end) for image in range(40) for end in ends])
    run = make_labelled({"x": x}, y, ["a", "b", "c", "d"])
    listing = replace(run.listing, keys=keys)
    replace(run, listing=listing).write(Path("views"), packed=True)
    found = retrieval_metrics(featx.open("views"), "x", "euclidean", "cpu", standardise=False)
    assert found is not None
    recall, mean = expected(x, y, "euclidean", images)
    assert found["left_out"] == "image"
    assert found["recall"] == pytest.approx(recall)
    assert found["map"] == pytest.approx(mean, abs=1e-6)
    assert recall["1"] < 1  # as it would be with the other views
    # No class has another image.
    listing = replace(listing, labels=images, classes=tuple(map(str, range(40))))
    replace(run, listing=listing).write(Path("one"), packed=True)
    assert retrieval_metrics(featx.open("one"), "x", "euclidean", "cpu", standardise=False) is None


def test_a_row_that_is_nearer_by_little_is_nearer() -> None:
    x = np.full((4, 8), 0.1, np.float32)
    x[1, 0] += 1e-4
    x[2, 0] += 3e-4
    x[3, 1] = 5
    write_store(Path("store"), np.array([0, 0, 1, 1]), x=x)
    found = retrieval_metrics(featx.open("store"), "x", "euclidean", "cpu", standardise=False)
    assert found is not None
    # Rows 0 and 1 find each other; rows 2 and 3 have a row of the other class nearer.
    assert found["recall"] == {"1": 0.5}


def test_without_two_rows_of_a_class_there_is_nothing_to_retrieve() -> None:
    x, _ = blobs(5)
    write_store(Path("store"), np.arange(5), x=x)
    assert retrieval_metrics(featx.open("store"), "x", "cosine", "cpu", standardise=False) is None
