"""job=neighbors, job=duplicates and job=cka: what they print and write."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csv_rows import csv_rows
from made_store import make_labelled, make_run
from PIL import Image
from tiny_model import extract, job_result, run_job

import featx
from featx.errors import ConfigError, RunError
from featx.similarity import data_set_distance, nearest_rows

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def store() -> featx.FeatureStore:
    run = make_run(30, 8, failed=[3])
    flat = run.features["flat"].copy()
    flat[11] = flat[4]
    flat[20] = flat[5]
    return featx.open(replace(run, features={**run.features, "flat": flat}).copied(Path("store")))


def keys_of(job: str, store: str = "store", layers: Any = "flat", **options: Any) -> dict[str, Any]:
    own = {job: options} if options else {}
    return {"store": store, "device": "cpu", "layers": layers, **own}


def ask(job: str, **options: Any) -> int:
    out = {"out": options.pop("out")} if "out" in options else {}
    return run_job(job, **out, **keys_of(job, **options))


def result(job: str, **options: Any) -> Any:
    return job_result(job, **keys_of(job, **options))


def test_of_one_image(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    key = str(store.keys[4])
    assert ask("neighbors", key=key, k=3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["image", key, "cat"]
    assert lines[2].split() == ["metric", "cosine", "of", "standardised", "values"]
    assert lines[5].split() == [str(store.keys[11]), "dög", "11", "1.000"]
    assert len(lines) == 8
    found = result("neighbors", key=key, k=3, metric="euclidean")
    assert found["row"] == 4
    assert found["nearest"][0]["row"] == 11
    assert found["nearest"][0]["euclidean"] == 0
    assert not Path("store/neighbors").exists(), "it is printed only"


def test_of_every_row(store: featx.FeatureStore) -> None:
    summary = result("neighbors", k=4)
    expected = nearest_rows(store, "flat", 4, device="cpu")
    with np.load("store/neighbors/neighbors.npz") as found:
        assert np.array_equal(found["row"], expected.rows)
        assert np.array_equal(found["neighbor"], expected.neighbours)
        assert np.array_equal(found["score"], expected.scores)
        assert found["key"].tolist() == store.key_bytes[expected.rows].tolist()
        assert str(found["layer"]) == "flat"
        assert str(found["metric"]) == "cosine"
        assert str(found["fingerprint"]) == store.attrs["fingerprint"]
    rows = csv_rows("store/neighbors/neighbors.csv")
    assert len(rows) == 29 * 4
    assert [int(row["neighbor"]) for row in rows] == expected.neighbours.ravel().tolist()
    assert [row["neighbor_key"] for row in rows] == store.keys[expected.neighbours.ravel()].tolist()
    known = store.labels[expected.rows] >= 0
    same = store.labels[expected.rows] == store.labels[expected.neighbours[:, 0]]
    assert summary["nearest_of_same_class"] == pytest.approx(same[known].mean())


def test_other_views_of_an_image_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 8)).repeat(2, axis=0)  # each image and its mirror image are equal
    run = make_labelled({"flat": x}, (np.arange(20) % 2).repeat(2), ["cat", "dog"])
    keys = np.array([b"%02d.jpg%s" % (i, end) for i in range(20) for end in (b"", b"#hflip")])
    replace(run, listing=replace(run.listing, keys=keys)).write(Path("views"))
    summary = result("neighbors", store="views", k=4)
    share = summary["retrieval"]["recall"]["1"]
    assert summary["nearest_of_same_class"] == pytest.approx(share)
    assert share < 1
    capsys.readouterr()
    ask("neighbors", store="views", k=1)
    assert "rows of the same image are left out of a ranking" in capsys.readouterr().out
    assert result("neighbors", store="views", k=1)["nearest_of_same_class"] is None


def test_each_neighbour_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(9)
    keys = np.array([b"%d\n.jpg" % i for i in range(9)])
    replace(run, listing=replace(run.listing, keys=keys)).write(Path("store"))
    ask("neighbors", key="4\n.jpg", k=3)
    assert sum(r"\n.jpg" in line for line in capsys.readouterr().out.splitlines()) == 3


def test_a_full_disk_leaves_both_files_of_an_earlier_search(
    store: featx.FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("neighbors", k=4)
    before = {path.name: path.read_bytes() for path in Path("store/neighbors").iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(RunError, match=r"neighbors\.npz failed: No space left.* Free some space"):
        ask("neighbors", k=3)
    assert {path.name: path.read_bytes() for path in Path("store/neighbors").iterdir()} == before
    assert sorted(before) == ["neighbors.csv", "neighbors.npz"]


def test_scores_are_those_of_standardised_values(store: featx.FeatureStore) -> None:
    key, x = str(store.keys[6]), store["flat"][store.ok].astype(np.float64)
    for standardise in (True, False):
        values = (x - x.mean(0)) / x.std(0) if standardise else x
        unit = values / np.linalg.norm(values, axis=1, keepdims=True)
        place = int(np.flatnonzero(np.flatnonzero(store.ok) == 6)[0])
        expected = np.sort(np.delete(unit @ unit[place], place))[::-1][:3]
        found = result("neighbors", key=key, k=3, standardise=standardise)
        assert found["standardised"] == standardise
        assert [one["cosine"] for one in found["nearest"]] == pytest.approx(expected, abs=1e-5)


def test_many_pairs_are_in_the_npz_only(
    store: featx.FeatureStore,
) -> None:
    make_run(2000, 512, {"flat": (8,)}).write(Path("large"))
    ask("neighbors", k=4, out="found")
    assert Path("found/neighbors.csv").exists()
    ask("neighbors", store="large", k=501, out="found")
    assert [path.name for path in Path("found").iterdir()] == ["neighbors.npz"]


def test_duplicates(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    ask("duplicates", threshold=0.99999)
    assert "4 of 29 in 2 groups" in capsys.readouterr().out
    rows = csv_rows("store/duplicates/duplicates.csv")
    assert [(row["group"], row["row"]) for row in rows] == [
        ("0", "4"), ("0", "11"), ("1", "5"), ("1", "20"),
    ]  # fmt: skip
    assert [row["key"] for row in rows] == store.keys[[4, 11, 5, 20]].tolist()
    assert {row["cosine_to_first"] for row in rows} == {"1.000000"}
    assert result("duplicates", threshold=0.99999)["groups_of_several_classes"] == 1


def test_copies_are_other_files_not_other_boxes_views_and_frames_of_one() -> None:
    Path("photos").mkdir()
    Image.new("RGB", (48, 48), "teal").save("photos/a.png")  # all its boxes and views are equal
    shutil.copy("photos/a.png", "photos/copy.png")
    boxes = [f"{name}.png,{x},0,20,20" for name in ("a", "copy") for x in (0, 8)]
    Path("boxes.csv").write_text("\n".join(["path,x,y,width,height", *boxes]))
    Path("frames").mkdir()
    for frame in ("a.mp4@00000.000", "a.mp4@00001.000", "copy.mp4@00000.000"):
        shutil.copy("photos/a.png", f"frames/{frame}")
    cases: dict[str, dict[str, Any]] = {
        "copy.png#0,0,20,20": {"boxes": "boxes.csv"},
        "copy.png#hflip": {"views": ["original", "hflip"]},
        "copy.mp4@00000.000": {"root": "frames", "extensions": ["000"]},
    }
    for copy, options in cases.items():
        data = {"name": "folder", "root": "photos", **options}
        extract(data, layers=["pool"], reduce="flatten", overwrite=True)
        keys = {"store": "store", "layers": "pool", "device": "cpu"}
        found = job_result("duplicates", neighbors={"standardise": False}, **keys)
        assert (found["groups"], found["rows_in_groups"]) == (1, found["rows"])
        assert found["copies_of_files"] == 1
        [row] = csv_rows("store/duplicates/duplicates.csv", same_file="yes")
        assert row["key"] == copy


def test_duplicates_whose_name_has_a_newline_are_printed_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("photos").mkdir()
    Image.new("RGB", (48, 48), "teal").save("photos/a\n.png")
    shutil.copy("photos/a\n.png", "photos/b.png")
    extract("photos", layers=["pool"], reduce="flatten")
    run_job("duplicates", store="store", neighbors={"standardise": False})
    assert "2 rows: a\\n.png, b.png" in capsys.readouterr().out


def test_rows_without_a_label_are_of_no_class() -> None:
    run = make_run(30, 8)
    flat = run.features["flat"].copy()
    flat[9] = flat[4]
    assert [int(run.listing.labels[row]) for row in (4, 9)] == [0, -1]
    replace(run, features={**run.features, "flat": flat}).write(Path("store"))
    found = result("duplicates", threshold=0.99999)
    assert (found["groups"], found["groups_of_several_classes"]) == (1, 0)


def test_layers(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    ask("cka", layers=["flat", "map"], rows=20)
    output = capsys.readouterr().out
    assert "20, chosen of 29, seed 0" in output
    assert "linear CKA, debiased" in output
    found = json.loads(Path("store/cka/layers.json").read_text())
    assert found["layers"] == found["others"] == ["flat", "map"]
    assert np.diag(found["rsa"]) == pytest.approx(1, abs=1e-5)
    assert result("cka", layers="flat", store="[store,store]")["cka"][0][0] == pytest.approx(
        1, abs=1e-5
    )
    assert result("cka", layers={"map": "avg", "fl*": "none"})["layers"] == [
        "map",
        "flat",
    ]  # as a run is given them


def test_scores_of_wide_and_constant_layers_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(30, 8)
    constant = replace(run, features={**run.features, "flat": np.ones_like(run.features["flat"])})
    constant.write(Path("store"))
    run.write(Path("other"))
    wide, equal = result("cka", layers=["flat", "map"], rows=11)["notes"]
    assert wide.startswith("linear CKA: near 1 for any two layers, even noise, where one has more ")
    assert "numbers than the 11 images: map." in wide
    assert equal == "nan, because all images have the same features: flat."
    ask("cka", layers=["flat", "map"], rows=11)
    assert equal in capsys.readouterr().out
    for store, other in (("store", "other"), ("other", "store")):
        wide, equal = result("cka", store=f"[{store},{other}]", layers=["flat", "map"], rows=11)[
            "notes"
        ]
        assert f"11 images: map of {store}, map of {other}. Use" in wide
        assert equal == "nan, because all images have the same features: flat of store."
    (equal,) = result("cka", layers="flat", store="[store,other]", measures=["cka"])["notes"]
    assert equal.endswith("have the same features: all layers of one of the stores.")


def test_layers_without_an_order_of_distances_are_explained() -> None:
    """Rows of one number are constant rows, whose correlation distances are all 1."""
    run = make_run(30, 8, {"one": (1,), "flat": (5,)})
    run.write(Path("store"))
    found = result("cka", layers=None)
    title = "RSA, correlation distance"
    assert found["notes"] == [
        f"{title}: nan where all pairs of images have the same distance: one."
    ]
    assert found["rsa"][found["layers"].index("one")] == [None, None]
    assert found["cka"][0][0] == pytest.approx(1, abs=1e-5)


def test_few_rows_of_data_sets_are_explained() -> None:
    for name, num_rows in (("store", 30), ("other", 11)):
        make_run(num_rows, 8).write(Path(name))
    biased, subsets = result("distance", layers=None, store="[store,other]")["notes"]
    assert "more numbers than the smaller store rows (11): map." in " ".join(biased.split())
    assert "Each subset has all 11 rows of the smaller store" in subsets


def test_measures_of_layers(store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]) -> None:
    ask("cka", layers=["flat", "map"])
    assert "RSA, correlation distance" in capsys.readouterr().out
    ask("cka", layers=["flat", "map"], measures=["svcca", "procrustes"])
    output = capsys.readouterr().out
    assert "SVCCA, 99% of the variance" in output
    assert "Procrustes distance, squared" in output
    found = json.loads(Path("store/cka/layers.json").read_text())
    assert "cka" not in found
    assert np.diag(found["svcca"]) == pytest.approx(1)
    assert np.diag(found["procrustes"]) == pytest.approx(0, abs=1e-9)


def test_distance_of_two_stores(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(20, 8).write(Path("other"))
    summary = result("distance", layers=None, store="[store,other]")
    assert [each["layer"] for each in summary["layers"]] == ["flat", "map"]
    for each in summary["layers"]:
        found = data_set_distance(store, featx.open("other"), each["layer"], device="cpu")
        assert each == asdict(found)
    ask("distance", layers=None, store="[store,other]")
    output = capsys.readouterr().out
    assert "mean of 100 subsets of 20 rows of each store" in output
    assert output.splitlines()[0].split()[:2] == ["layer", "Fréchet"]


def test_an_index_says_what_it_found(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss", reason="no faiss: featx[faiss] has it")
    summary = result("neighbors", k=4, recall=0.9)
    # Of 29 rows there is one list only.
    assert not summary["exact"]
    assert summary["index"] == {"recall": 1.0, "measured_on": 15, "lists": 1, "probed_lists": 1}
    assert "searches 1 of its 1 lists" in capsys.readouterr().err
    with np.load("store/neighbors/neighbors.npz") as found:
        assert found["recall"] == 1
        # Rows that are copies of each other may change places.
        expected = nearest_rows(store, "flat", 4, device="cpu")
        assert np.allclose(found["score"], expected.scores, atol=1e-6)
    ask("neighbors", k=4, recall=0.9)
    assert "100.00% of the nearest rows, measured on 15 rows" in capsys.readouterr().out
    assert result("neighbors", k=4)["exact"]


def test_an_unfinished_store_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(21, 8).write(Path("store"), parts=[0])
    ask("neighbors", k=2)
    assert "store is not complete; 8 rows are there and ok" in capsys.readouterr().err
    make_run(21, 8).write(Path("whole"))
    for job in ("cka", "distance"):
        ask(job, store="[whole,store]")
        assert "store is not complete; 8 rows are there and ok" in capsys.readouterr().err


def test_what_is_refused(store: featx.FeatureStore) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("neighbors", {"metric": "dot"}, r"neighbors\.metric=dot"),
        ("neighbors", {"k": 0}, r"neighbors\.k=0"),
        ("neighbors", {"recall": 1.0}, r"neighbors\.recall=1\.0: expected a share between 0 and 1"),
        ("neighbors", {"recall": 0.9, "key": "a"}, r"recall has no effect with neighbors\.key"),
        ("neighbors", {"layers": None}, r"name one layer with layers="),
        ("duplicates", {"threshold": 1.5}, r"duplicates\.threshold=1\.5"),
        ("duplicates", {"layers": None}, r"name one layer with layers="),
        ("cka", {"rows": 3}, r"cka\.rows=3"),
        ("cka", {"measures": ["cca"]}, r"expected some of cka, .* Nearest: svcca"),
        ("cka", {"measures": []}, r"cka\.measures is empty: expected cka"),
        ("cka", {"store": "[store,store,store]"}, "job=cka compares the layers of two stores"),
        ("distance", {}, r"job=distance needs two stores, 'store=\[runs/a,runs/b\]'"),
    ]
    for job, keys, message in refused:
        with pytest.raises(ConfigError, match=message):
            ask(job, **keys)
