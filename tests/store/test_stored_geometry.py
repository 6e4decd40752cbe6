"""Places of tokens travel with a store: through parts, packing and later runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from golden_stores import GOLDEN, TOKENS, golden_tokens
from made_store import edited, make_added, make_run

import featx
from featx.errors import StoreError
from featx.store import check_store
from featx.types import TokenGeometry


@pytest.mark.parametrize("packed", [False, True])
def test_readers_find_them_in_parts_and_in_the_packed_file(tmp_path: Path, packed: bool) -> None:
    run = golden_tokens()
    root = run.copied(tmp_path / "store", packed=packed)
    store = featx.open(root)
    assert {name: store[name].tokens for name in store.layers} == run.tokens
    assert store["tokens"].attrs["token_grid"] == [2, 3]
    assert store["tokens"].attrs["prefix_tokens"] == 2
    assert check_store(root).complete
    assert make_run(3, 2).tokens == {}


def test_h5py_alone_reads_them() -> None:
    with h5py.File(GOLDEN / TOKENS / "features.h5") as file:
        attrs = file["features/tokens"].attrs
        assert attrs["prefix_tokens"] == 2
        assert attrs["class_token"] == 1
        assert attrs["token_grid"].tolist() == [2, 3]
        assert attrs["input_size"].tolist() == [32, 48]


def test_a_layer_without_places_has_none(tmp_path: Path) -> None:
    root = make_run(3, 2, {"x": (8, 2)}).copied(tmp_path / "store")
    assert featx.open(root)["x"].tokens is None
    assert "tokens" not in json.loads((root / "featx.json").read_text())


def test_a_later_run_brings_those_of_its_layers(tmp_path: Path) -> None:
    run = golden_tokens()
    root = run.copied(tmp_path / "store", packed=True)
    places = TokenGeometry(1, True, (2, 2), (32, 32))
    added = replace(make_added(run, {"deep": (5, 2)}), tokens={"deep": places})
    for packed in (False, True):
        added.finish(root, packed=packed)
        store = featx.open(root)
        assert {name: store[name].tokens for name in store.layers} == {**run.tokens, "deep": places}
    assert check_store(root).complete


def test_verify_compares_them_with_the_manifest(tmp_path: Path) -> None:
    root = golden_tokens().copied(tmp_path / "store", packed=True)
    with edited(root / "features.h5") as file:
        file["features/tokens"].attrs["prefix_tokens"] = 1
    [damage] = check_store(root).damages
    assert damage.what == "/features/tokens has prefix_tokens 1, expected 2"


@pytest.mark.parametrize("grid", [[0, 3], [2, 3, 1]])
def test_impossible_places_are_refused(tmp_path: Path, grid: list[int]) -> None:
    root = golden_tokens().copied(tmp_path / "store", packed=True)
    with edited(root / "features.h5") as file:
        file["features/tokens"].attrs["token_grid"] = grid
    with pytest.raises(StoreError, match="layer tokens"):
        featx.open(root)["tokens"].tokens  # noqa: B018 - reading the property raises
