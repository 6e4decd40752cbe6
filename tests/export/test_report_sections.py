"""The numbers of a report: compared with what one can reckon by hand or with numpy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from made_store import make_labelled, make_run

import featx
from featx.export.report.embedding_maps import layer_map, principal_components
from featx.export.report.failures import reasons_of
from featx.export.report.layer_statistics import layer_statistics
from featx.export.report.nearest_neighbours import chosen_queries, nearest_strips
from featx.export.report.probe_results import probes_of
from featx.export.report.throughput import speed_of
from featx.store import layout

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def store_of(features: dict[str, np.ndarray], labels: list[int]) -> featx.FeatureStore:
    return featx.open(make_labelled(features, labels, ("a", "b")).write(Path("store")))


def test_statistics_of_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((4, 3, 8, 8), np.float32)
    values[:, 0] = 2.0
    values[2, 1, 5, 5] = -3.0  # the third channel is dead
    store = store_of({"map": values}, [0, 1, 0, 1])
    monkeypatch.setattr(
        "featx.export.report.layer_statistics.BLOCK_BYTES", 2 * 3 * 64 * 4
    )  # two blocks
    found = layer_statistics(store, "map", np.arange(4))
    assert (found.channels, found.dead, found.what) == (3, 1, "channels")
    assert found.zeros == pytest.approx((values == 0).mean())
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())
    assert (found.smallest, found.largest, found.nonfinite) == (-3, 2, 0)
    assert found.norms == pytest.approx((16, 16, 16, np.quantile([16, 16, 16, 265**0.5], 0.75),
                                         265**0.5))  # fmt: skip


def test_channels_that_cannot_be_told_are_numbers() -> None:
    values = np.zeros((3, 2, 3, 4), np.float32)
    values[:, 1] = 1
    found = layer_statistics(store_of({"odd": values}, [0, 0, 1]), "odd", np.arange(3))
    assert (found.channels, found.dead, found.what) == (24, 12, "numbers")


def test_values_that_are_not_finite_are_counted() -> None:
    values = np.ones((3, 4), np.float32)
    values[1, 2:] = np.inf
    found = layer_statistics(store_of({"flat": values}, [0, 0, 1]), "flat", np.arange(3))
    assert found.nonfinite == 2
    assert found.norms == (2, 2, 2, 2, 2)
    assert found.largest == found.mean == 1


@pytest.mark.parametrize("shape", [(40, 7), (12, 30)])
def test_principal_components_are_those_of_an_svd(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape) @ np.diag(np.arange(1, shape[1] + 1)) + 5
    scores, shares = principal_components(x, 5)
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    assert np.abs(scores) == pytest.approx(np.abs(u[:, :5] * s[:5]), abs=1e-8)
    assert shares == pytest.approx((s**2 / (s**2).sum())[:5])
    assert (scores[np.abs(scores).argmax(0), range(5)] > 0).all()


def test_a_map_of_two_groups_keeps_them_apart() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    x = rng.normal(size=(40, 6)).astype(np.float32) + 20 * labels[:, None]
    store = store_of({"flat": x}, labels.tolist())
    found = layer_map(store, "flat", np.arange(40), seed=3, tsne=True)
    assert found.pca is not None
    assert found.tsne is not None
    assert found.explained[0] > 0.9
    assert ((found.pca[:, 0] > 0) == labels).all() or ((found.pca[:, 0] < 0) == labels).all()
    middle = [found.tsne[labels == kind].mean(0) for kind in (0, 1)]
    nearer = np.linalg.norm(found.tsne[:, None] - np.array(middle), axis=2).argmin(1)
    assert (nearer == labels).all()
    again = layer_map(store, "flat", np.arange(40), seed=3, tsne=True)
    assert np.array_equal(again.tsne, found.tsne)


def test_large_maps_are_averaged_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(11, 9, 32, 32)).astype(np.float32)
    store = store_of({"map": values}, [0, 1] * 5 + [0])
    monkeypatch.setattr("featx.export.report.embedding_maps.BLOCK_BYTES", 4 * 4 * 9 * 32 * 32)
    found = layer_map(store, "map", np.arange(11), 0, tsne=False)
    expected, _ = principal_components(values.mean((2, 3)), 2)
    assert found.pooled
    assert found.width == 9
    assert found.pca == pytest.approx(expected, abs=1e-5)


def test_what_has_no_map_says_why() -> None:
    store = store_of({"flat": np.ones((9, 3), np.float32)}, [0] * 9)
    assert "the same vector" in layer_map(store, "flat", np.arange(9), 0, True).note
    assert "3 rows make no map" in layer_map(store, "flat", np.arange(3), 0, True).note


def test_nearest_rows_are_exact_and_know_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 5)).astype(np.float32)
    x[7] = 3 * x[4]
    labels = [i % 2 for i in range(30)]
    labels[12] = -1
    store = store_of({"flat": x}, labels)
    found = nearest_strips(store, "flat", np.arange(30), [4, 12], 0, "cpu")
    (row, nearest), (_, of_unlabelled) = found.strips
    assert (row, nearest[0].row, nearest[0].same) == (4, 7, False)
    assert nearest[0].cosine == pytest.approx(1)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    order = np.argsort(-(unit @ unit[12]))[1:7]
    assert [each.row for each in of_unlabelled] == order.tolist()
    assert all(each.same is None for each in of_unlabelled)
    assert (found.among, found.whole) == (30, True)
    monkeypatch.setattr("featx.export.report.nearest_neighbours.KEEP_BYTES", 10 * 5 * 4)
    part = nearest_strips(store, "flat", np.arange(30), [4, 12], 0, "cpu")
    assert 10 <= part.among <= 12
    assert not part.whole


def test_queries_take_the_classes_in_turn() -> None:
    labels = [0] * 30 + [1] * 2
    store = store_of({"flat": np.ones((32, 2), np.float32)}, labels)
    for seed in range(5):
        rows = chosen_queries(store, np.arange(32), seed)
        assert len(set(rows)) == 6
        assert [labels[row] for row in sorted(rows)] == [0, 0, 0, 0, 1, 1]
        assert {labels[row] for row in rows[:2]} == {0, 1}


def test_failures_are_grouped_by_reason() -> None:
    store = featx.open(make_run(21, failed=[0, 3, 4, 8, 11, 14]).write(Path("store")))
    found = {reason.status: reason for reason in reasons_of(store)}
    assert {status: reason.count for status, reason in found.items()} == {
        "missing": 2, "decode error": 1, "non finite": 3,
    }  # fmt: skip
    assert [each.row for each in found["non finite"].shown] == [8, 11, 14]
    assert found["missing"].messages[0] == ("OSError: row 0: bröken, \n 'x'", 1)


def test_speed_of_parts_and_of_packed_stores() -> None:
    run = make_run(30, 8)
    root = run.write(Path("store"))
    for number in range(4):
        when = 1_700_000_000 + 60 * number
        os.utime(root / "parts" / layout.part_name(number), (when, when))
    assert speed_of(featx.open(root)).parts == [(0, 8), (1, 16), (2, 24), (3, 30)]
    entry = {"images_per_second": 12.5, "seconds": {"model": 2.0}, "finished": "then"}
    run.session(root).write_summary({**entry, "share_of_trial": 0.5, "below_trial": "why"})
    run.session(root).write_summary({**entry, "images_per_second": None})
    found = speed_of(featx.open(root))
    assert [each.images_per_second for each in found.runs] == [12.5, None]
    assert [each.share_of_trial for each in found.runs] == [0.5, None]
    assert [each.below_trial for each in found.runs] == ["why", ""]
    packed = speed_of(featx.open(run.write(Path("packed"), packed=True)))
    assert packed.parts == []
    assert "packed" in packed.parts_missing
    assert "no summary.json" in packed.missing
    (root / "summary.json").write_text("[]")
    assert "cannot be read" in speed_of(featx.open(root)).missing


def test_a_probe_of_another_state_says_so() -> None:
    store = featx.open(make_run().write(Path("store")))
    assert "job=probe" in probes_of(store).note
    file = Path("store/probe.json")
    file.write_text("{")
    assert "cannot be read" in probes_of(store).note
    file.write_text("{}")
    assert "not as job=probe writes it" in probes_of(store).note
    about = {
        "rows": 3, "accuracy": 2 / 3, "interval": [0.2, 0.9], "balanced_accuracy": 0.5,
        "top5": None, "calibration_error": None, "validation_accuracy": 0.5,
        "confusion": [[1, 1], [0, 1]],
    }  # fmt: skip
    said = {
        **about, "layer": "flat", "method": "ridge", "fingerprint": "of then", "finished": "then",
        "classes": ["cat", "dog"], "notes_on_rows": [], "split": {"kind": "holdout", "seed": 0},
        "layers": {"flat": {"ridge": about}},
    }  # fmt: skip
    file.write_text(json.dumps(said))
    found = probes_of(store)
    assert "another state" in found.note
    assert found.confusion is not None
    assert found.confusion.pairs == [(1, "cat", "dog")]
    odd = {"flat": {"ridge": {**about, "top5": "<b>"}}}
    file.write_text(json.dumps({**said, "layers": odd}))
    assert "not as job=probe writes it" in probes_of(store).note
    file.write_text(json.dumps({**said, "fingerprint": store.attrs["fingerprint"]}))
    assert probes_of(store).note == ""


def test_classes_beyond_the_largest_are_left_out_of_the_matrix() -> None:
    from featx.export.report.probe_results import _confusion

    names = [str(i) for i in range(50)]
    counts = np.diag(np.arange(50) + 1)
    counts[7, 31] = 4
    found = _confusion(names, counts.tolist())
    assert len(found.classes) == 40
    assert {"7", "31"} <= set(found.classes)
    assert found.left_out == 10
    assert found.pairs == [(4, "7", "31")]
    with pytest.raises(ValueError, match="confusion matrix"):
        _confusion(names[:-1], counts.tolist())
