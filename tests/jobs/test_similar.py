"""job=similar: what it prints and writes down."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_store import make_run
from tiny_model import run_job

import featx
from featx.errors import ConfigError
from featx.jobs import similar
from featx.similarity import nearest_rows

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def store() -> featx.FeatureStore:
    run = make_run(30, 8, failed=[3])
    flat = run.features["flat"].copy()
    flat[11] = flat[4]
    flat[20] = flat[5]
    return featx.open(replace(run, features={**run.features, "flat": flat}).write(Path("store")))


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ask(json: bool = False, out: str | None = None, **similar: Any) -> int:
    keys: dict[str, Any] = {"store": "store", "device": "cpu", "similar": similar}
    keys["layer"] = similar.pop("layer", "flat")
    return run_job("similar", json=json, **keys, **({"out": out} if out else {}))


def test_of_one_picture(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    key = str(store.keys[4])
    assert ask(key=key, k=3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["picture", key, "cat"]
    assert lines[4].split() == [str(store.keys[11]), "dög", "11", "1.0000"]
    assert len(lines) == 7
    ask(json=True, key=key, k=3, metric="euclidean")
    found = json.loads(capsys.readouterr().out)
    assert found["row"] == 4
    assert found["nearest"][0]["row"] == 11
    assert found["nearest"][0]["euclidean"] == 0
    assert not Path("store/similar").exists(), "it is printed only"


def test_of_every_row(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    ask(json=True, k=4)
    summary = json.loads(capsys.readouterr().out)
    expected = nearest_rows(store, "flat", 4, device="cpu")
    with np.load("store/similar/neighbours.npz") as found:
        assert np.array_equal(found["row"], expected.rows)
        assert np.array_equal(found["neighbour"], expected.neighbours)
        assert np.array_equal(found["score"], expected.scores)
        assert found["key"].tolist() == store.key_bytes[expected.rows].tolist()
        assert str(found["layer"]) == "flat"
        assert str(found["metric"]) == "cosine"
        assert str(found["fingerprint"]) == store.attrs["fingerprint"]
    rows = rows_of("store/similar/neighbours.csv")
    assert len(rows) == 29 * 4
    assert [int(row["neighbour"]) for row in rows] == expected.neighbours.ravel().tolist()
    assert [row["neighbour_key"] for row in rows] == store.keys[
        expected.neighbours.ravel()
    ].tolist()
    known = store.labels[expected.rows] >= 0
    same = store.labels[expected.rows] == store.labels[expected.neighbours[:, 0]]
    assert summary["nearest_of_same_class"] == pytest.approx(same[known].mean())


def test_many_pairs_are_in_the_npz_only(
    store: featx.FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(k=4, out="found")
    assert Path("found/neighbours.csv").exists()
    monkeypatch.setattr(similar, "CSV_PAIRS", 29 * 4)
    ask(k=5, out="found")
    assert [path.name for path in Path("found").iterdir()] == ["neighbours.npz"]


def test_duplicates(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    ask(duplicates=0.99999)
    assert "4 of 29 in 2 groups" in capsys.readouterr().out
    rows = rows_of("store/similar/duplicates.csv")
    assert [(row["group"], row["row"]) for row in rows] == [
        ("0", "4"), ("0", "11"), ("1", "5"), ("1", "20"),
    ]  # fmt: skip
    assert [row["key"] for row in rows] == store.keys[[4, 11, 5, 20]].tolist()
    assert {row["cosine_to_first"] for row in rows} == {"1.000000"}
    ask(json=True, duplicates=0.99999)
    assert json.loads(capsys.readouterr().out)["groups_of_several_classes"] == 1


def test_layers(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    ask(cka=True, layer=["flat", "map"], rows=20)
    told = capsys.readouterr().out
    assert "20, chosen of 29, seed 0" in told
    assert "linear CKA, debiased" in told
    found = json.loads(Path("store/similar/layers.json").read_text())
    assert found["layers"] == found["others"] == ["flat", "map"]
    assert np.diag(found["rsa"]) == pytest.approx(1, abs=1e-5)
    ask(json=True, cka=True, layer="flat", other="store")
    assert json.loads(capsys.readouterr().out)["cka"][0][0] == pytest.approx(1, abs=1e-5)


def test_an_index_says_what_it_found(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss", reason="no faiss: featx[faiss] has it")
    ask(json=True, k=4, recall=0.9)
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    # Of 29 rows there is one list only.
    assert not summary["exact"]
    assert summary["index"] == {"recall": 1.0, "measured_on": 15, "lists": 1, "looked_at": 1}
    assert "looks at 1 of its 1 lists" in shown.err
    with np.load("store/similar/neighbours.npz") as found:
        assert found["recall"] == 1
        # Rows that are copies of each other may change places.
        expected = nearest_rows(store, "flat", 4, device="cpu")
        assert np.allclose(found["score"], expected.scores, atol=1e-6)
    ask(k=4, recall=0.9)
    assert "100.00% of the nearest rows, measured on 15 rows" in capsys.readouterr().out
    ask(json=True, k=4, recall=1)
    assert json.loads(capsys.readouterr().out)["exact"]


def test_an_unfinished_store_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(21, 8).write(Path("store"), parts=[0])
    ask(k=2)
    assert "is not complete; 8 rows are there and ok" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"key": "a", "cka": True}, r"similar\.key and similar\.cka are different questions"),
        ({"cka": True, "k": 3}, r"similar\.k has an effect with nearest rows only"),
        ({"other": "x"}, r"similar\.other has an effect with similar\.cka=true only"),
        ({"duplicates": 1.5}, r"similar\.duplicates=1\.5"),
        ({"rows": 100}, r"similar\.rows has an effect"),
        ({"metric": "dot"}, r"similar\.metric=dot"),
        ({"k": 0}, r"similar\.k=0"),
        ({"recall": 1.5}, r"similar\.recall=1\.5: expected a share above 0, up to 1"),
        ({"recall": 0.9, "key": "a"}, r"recall has an effect with the nearest rows of every row"),
        ({"layer": None}, r"name one layer with layer="),
    ],
)
def test_what_does_not_go_together(
    store: featx.FeatureStore, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(**keys)
