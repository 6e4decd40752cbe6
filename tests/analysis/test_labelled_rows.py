"""What becomes of a layer's rows: which are used, flattened or averaged, in memory or in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import make_labelled, make_run
from probe_problem import blobs, features_of, write_store

from featx.analysis.probe import probe_rows
from featx.analysis.probe.heads import fit_scaler
from featx.analysis.probe.labelled_rows import labelled_rows, match_classes
from featx.errors import DataError, ReduceError, StoreError
from featx.store import FeatureStore

pytestmark = pytest.mark.usefixtures("one_thread")


def test_failed_and_unlabelled_rows_are_left_out_and_said(tmp_path: Path) -> None:
    x = np.arange(20.0).reshape(10, 2)
    labels = [0, 2, 0, 2, -1, 0, 2, 0, 2, 0]
    made = make_labelled({"x": x}, labels, ["a", "empty", "c"], failed=[1])
    found = labelled_rows(FeatureStore(made.write(tmp_path / "store")))
    assert found.rows.tolist() == [0, 2, 3, 5, 6, 7, 8, 9]
    assert found.classes == ("a", "c")
    assert found.y.tolist() == [0, 0, 1, 0, 1, 0, 1, 0]
    assert found.notes == (
        "1 failed row is left out",
        "1 row without a label is left out",
        "1 class without a row is left out",
    )


def test_whole_numbers_of_any_size_are_classes_of_their_own(tmp_path: Path) -> None:
    made = make_labelled({"x": np.ones((6, 2))}, [-1] * 6, [])
    values = np.array([1e19, 2e19, -1e19, np.nan, 7.0, np.inf])
    listing = replace(made.listing, columns={"code": values})
    found = labelled_rows(
        FeatureStore(replace(made, listing=listing).write(tmp_path / "s")), "code"
    )
    assert found.classes == (str(-(10**19)), "7", str(10**19), str(2 * 10**19), "inf")
    assert found.y.tolist() == [2, 3, 0, 1, 4]


def test_booleans_are_classes_with_the_names_of_tables(tmp_path: Path) -> None:
    made = make_labelled({"x": np.ones((3, 2))}, [-1] * 3, [])
    listing = replace(made.listing, columns={"good": np.array([True, False, True])})
    for packed in (False, True):
        root = replace(made, listing=listing).write(tmp_path / f"{packed}", packed=packed)
        found = labelled_rows(FeatureStore(root), "good")
        assert found.classes == ("false", "true")
        assert found.y.tolist() == [1, 0, 1]


def test_an_incomplete_store_and_one_without_labels_are_refused(tmp_path: Path) -> None:
    run = make_run(21)
    with pytest.raises(StoreError, match="not complete: 8 of 21 rows"):
        labelled_rows(FeatureStore(run.write(tmp_path / "part", parts=[0])))
    made = make_labelled({"x": np.ones((4, 2))}, [-1] * 4, [])
    with pytest.raises(
        DataError, match=r"has a label, .* another out=DIR: .* data\.label_column=NAME"
    ):
        labelled_rows(FeatureStore(made.write(tmp_path / "bare")))
    made = make_labelled({"x": np.ones((4, 2))}, [0, 1, 0, 1], ["a", "b"], failed=range(4))
    with pytest.raises(DataError, match=r"failed has no row that is ok; its failures\.csv says"):
        labelled_rows(FeatureStore(made.write(tmp_path / "failed")))


def test_a_store_without_labels_is_answered_with_its_columns(tmp_path: Path) -> None:
    made = make_labelled({"x": np.ones((4, 2))}, [-1] * 4, [])
    listing = replace(made.listing, columns={"site": np.array([b"a", b"b"] * 2)})
    store = FeatureStore(replace(made, listing=listing).write(tmp_path / "s"))
    with pytest.raises(DataError, match=r"probe\.label_column=NAME .* the store has site\.$"):
        labelled_rows(store)
    assert labelled_rows(store, "site").classes == ("a", "b")


def test_small_maps_are_flattened_and_large_ones_averaged_over_positions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {
        "vector": rng.normal(size=(4, 8200)),
        "small": rng.normal(size=(4, 512, 4, 4)),
        "map": rng.normal(size=(4, 513, 4, 4)),
        "last": rng.normal(size=(4, 4, 4, 513)),
        "tokens": rng.normal(size=(4, 9, 911)),
    }
    made = make_labelled(rows, [0, 1, 0, 1], ["a", "b"])
    labelled = labelled_rows(FeatureStore(made.write(tmp_path / "store", packed=True)))
    expected = {
        "vector": ("none", rows["vector"]),
        "small": ("flatten", rows["small"].reshape(4, 8192)),
        "map": ("avg", rows["map"].mean((2, 3))),
        "last": ("avg", rows["last"].mean((1, 2))),
        "tokens": ("avg", rows["tokens"].mean(1)),
    }
    for layer, (reduction, values) in expected.items():
        found = probe_rows(labelled.store, layer, labelled.rows)
        assert (found.as_dict()["then"], found.width) == (reduction, values.shape[1])
        read = found.read(np.array([2, 0]))
        assert read.dtype == torch.float32
        assert np.allclose(read.numpy(), values[[2, 0]], atol=1e-6)


def test_a_large_map_whose_channels_are_unknown_is_refused(tmp_path: Path) -> None:
    made = make_labelled(
        {"cube": np.ones((2, 21, 21, 21)), "four": np.ones((2, 10, 10, 10, 10))},
        [0, 1],
        ["a", "b"],
    )
    labelled = labelled_rows(FeatureStore(made.write(tmp_path / "store")))
    with pytest.raises(ReduceError, match="could be"):
        probe_rows(labelled.store, "cube", labelled.rows)
    with pytest.raises(ReduceError, match="too many for a probe"):
        probe_rows(labelled.store, "four", labelled.rows)


def test_the_scaler_is_numpys_mean_and_std_and_leaves_constants_at_zero(
    tmp_path: Path, set_block_sizes: Callable[..., None]
) -> None:
    set_block_sizes(4 * 20 * 7)
    x, y = blobs(60)
    x[:, 4] = 0.1  # which float32 does not hold, so sums of it round
    x[:, 5] += 1e4
    x[:, 6] = 0
    x[0, 6] = 1e-45  # the deviation is below the smallest float32
    features = features_of(tmp_path, x, y)
    places = np.arange(0, 60, 2)
    scaler = fit_scaler(features, places)
    exact = x[places].astype(np.float64)
    others = np.delete(np.arange(20), [4, 6])
    assert np.allclose(scaler.mean.numpy(), exact.mean(0), rtol=1e-6)
    assert np.allclose(scaler.scale.numpy()[others], exact.std(0)[others], rtol=1e-5)
    scaled = scaler(features.take(places)).numpy()
    assert (scaled[:, 4] == 0).all()
    assert np.isfinite(scaled).all()
    assert np.allclose(scaled[:, others].std(0), 1, rtol=2e-3)


def test_a_value_that_is_not_finite_in_an_ok_row_is_reported(tmp_path: Path) -> None:
    x, y = blobs(12)
    root = write_store(tmp_path / "store", y, x=x)
    rows = probe_rows(FeatureStore(root), "x", np.arange(12))
    with pytest.raises(StoreError, match=r"row 5 \(00005.jpg\) of x is marked ok"):
        rows.check(torch.tensor([[1.0], [float("inf")]]), np.array([4, 5]))


def test_classes_of_another_store_are_matched_by_name(tmp_path: Path) -> None:
    x = np.ones((6, 2))
    other = make_labelled({"x": x}, [0, 1, 2, 0, 1, 2], ["b", "new", "a"])
    found = match_classes(labelled_rows(FeatureStore(other.write(tmp_path / "other"))), ("a", "b"))
    assert found.rows.tolist() == [0, 2, 3, 5]
    assert found.y.tolist() == [1, 0, 1, 0]
    assert found.notes == ("probe.test_store: 2 rows of classes not trained on: left out",)
    with pytest.raises(DataError, match="matched by name"):
        match_classes(labelled_rows(FeatureStore(tmp_path / "other")), ("x", "y"))
