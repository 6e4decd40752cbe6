"""What the Python functions take, and what `dir` and `help` show of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_store import make_run
from tiny_model import extract, write_images

import featx
from featx.analysis import Predictions
from featx.analysis.embedding import Embedding
from featx.errors import ConfigError
from featx.pipeline import RunMetrics
from featx.similarity import (
    RowIndex,
    compare_stores,
    data_set_distance,
    duplicate_groups,
    find_outliers,
    judge_labels,
    layer_similarity,
    nearest_rows,
    nearest_to,
)
from featx.torch import FeatureDataset, TokenDataset

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def same(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, Path | dict) else np.array_equal(a, b, equal_nan=True)


ROWS = np.ones((2, 5))
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "FeatureDataset": lambda store: FeatureDataset(store, "flat").rows,
    "TokenDataset": lambda store: TokenDataset(store, "tokens", tokens="all").store.ok,
    "compare_stores": lambda store: compare_stores([store]).stores[0],
    "data_set_distance": lambda store: data_set_distance(store, store, "flat", device="cpu").kid,
    "duplicate_groups": lambda store: np.concatenate(duplicate_groups(store, "flat", 0.1, "cpu")),
    "export_store": lambda store: featx.export_store(store, export={"format": "npy"}, out="npy"),
    "find_outliers": lambda store: find_outliers(store, "flat", device="cpu").distances,
    "judge_labels": lambda store: judge_labels(store, "flat", 2, device="cpu").confidences,
    "layer_similarity": lambda store: layer_similarity(store, device="cpu").measures["cka"],
    "layer_similarity of two": lambda store: layer_similarity(store, store).measures["cka"],
    "nearest_rows": lambda store: nearest_rows(store, "flat", device="cpu").neighbours,
    "nearest_to": lambda store: nearest_to(store, "flat", ROWS, device="cpu")[0],
    "open": lambda store: featx.open(store).status,
    "probe": lambda store: featx.probe(store, layers=["flat"], device="cpu")["accuracy"],
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_store_is_given_open_or_by_its_path(name: str) -> None:
    make_run(40, 16, {"flat": (5,), "tokens": (4, 3)}, failed=[3]).write(Path("store"))
    call = OF_ROWS[name]
    expected = call(featx.open("store"))
    assert same(call("store"), expected)
    assert same(call(Path("store")), expected)


def test_results_that_hold_arrays_are_compared_by_identity() -> None:
    make_run(40, 16, {"flat": (5,), "deep": (4,)}).write(Path("store"))
    for find in (
        lambda: nearest_rows("store", "flat", device="cpu"),
        lambda: find_outliers("store", "flat", device="cpu"),
        lambda: judge_labels("store", "flat", 2, device="cpu"),
        lambda: layer_similarity("store", device="cpu"),
        lambda: Embedding({"flat": ROWS}, np.ones(2, bool), []),
        lambda: Predictions([], ROWS, ("a", "b"), "flat", 1.0, RunMetrics({}, 1.0, 0, None)),
    ):
        one, other = find(), find()
        assert one != other
        assert [other, one].index(one) == 1


def test_a_probe_returns_what_is_in_its_file() -> None:
    make_run(40, 16).copied(Path("store"))
    found = featx.probe("store", probe={"folds": 2}, device="cpu")
    written = json.loads(Path("store/probe.json").read_text())
    assert found["layers"].keys() == written["layers"].keys() == {"flat", "map"}
    assert (found["layer"], found["accuracy"]) == (written["layer"], written["accuracy"])
    with pytest.raises(ConfigError, match=r"probe\.folds=1"):
        featx.probe("store", probe={"folds": 1})


def test_an_index_is_of_a_store_that_is_open_or_of_its_path() -> None:
    pytest.importorskip("faiss", reason="no faiss: featx[faiss] has it")
    store = featx.open(make_run(40, 16).copied(Path("store")))
    expected = RowIndex(store, "flat", 0.9, device="cpu").nearest_rows().neighbours
    for given in ("store", Path("store")):
        found = RowIndex(given, "flat", 0.9, device="cpu").nearest_rows()
        assert np.array_equal(found.neighbours, expected)


def test_what_takes_a_model_or_its_images_too_takes_a_store_open_or_by_its_path() -> None:
    photos = write_images(Path("photos"))
    store = extract(photos, layers=["pool"], out="store")
    featx.probe(store, device="cpu")
    images = [photos / str(store.keys[0])]
    code: dict[str, Any] = {"model_factory": "zoo:TwoStageConvNet", "device": "cpu"}
    for given in (store, Path("store/features.h5")):
        assert np.array_equal(featx.embed(images, given, **code)["pool"], store["pool"][:1])
        with featx.embedder(given, **code) as embed:
            assert embed(images).ok.all()
        (row,) = found = featx.predict(given, images, **code)
        assert repr(found).startswith("Predictions(1 image, 0 failed, classification by pool: ")
        with featx.predictor(given, **code) as predict:
            assert predict(images)[0].label == row.label
            with torch.autocast("cpu"), pytest.raises(ConfigError, match="is enabled here"):
                predict(images)
        found = featx.stats(store=given, overwrite=True, device="cpu", verbose=False)
        assert np.allclose(found["pool"].mean, store.xy("pool")[0].mean(0))
        page = featx.write_report(given, report={"tsne": False}, device="cpu")
        assert page.is_file()


@pytest.mark.parametrize("name", featx.similarity.__all__)
def test_progress_is_the_last_keyword_and_none_by_default(name: str) -> None:
    parameters = list(inspect.signature(getattr(featx.similarity, name)).parameters.values())
    if "on_progress" in [each.name for each in parameters]:
        last = parameters[-1]
        assert (last.name, last.default, last.kind) == ("on_progress", None, last.KEYWORD_ONLY)
