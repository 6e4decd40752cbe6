"""job=compare: one table over several stores, against their own files."""

from __future__ import annotations

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csv_rows import csv_rows
from made_store import as_bfloat16, make_labelled, make_run
from probe_job import probe
from probe_problem import blobs, write_store
from tiny_model import job_result, run_job

import featx
from featx.errors import ConfigError, StoreError, nearest
from featx.similarity import compare_stores
from featx.store import read_result, result_json

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def ask(store: str, **keys: Any) -> Any:
    return job_result("compare", store=store, **keys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores a and b of the same rows; a is probed."""
    folder = tmp_path_factory.mktemp("made")
    x, y = blobs(num_rows=90, width=6)
    write_store(folder / "a", y, failed=(4, 7), x=x, half=x[:, :3])
    write_store(folder / "b", y, failed=(4, 7), x=x[:, ::-1])
    probe(store=str(folder / "a"))
    return folder


@pytest.fixture
def entry(made: Path, in_tmp_path: None) -> dict[str, Any]:
    """What probe.json says of store a; both stores are copied to runs."""
    shutil.copytree(made, "runs")
    found: dict[str, Any] = json.loads(Path("runs/a/probe.json").read_text())
    return found


@pytest.mark.slow
def test_a_probed_store_and_one_without(
    entry: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask("[runs/a, runs/b]")
    assert found["notes"] == []
    a, b = csv_rows("runs/compare.csv")
    assert (a["layers"], b["layers"]) == ("half x", "x")
    assert (a["rows"], a["failed"], a["complete"]) == ("90", "2", "yes")
    assert (a["probe_layer"], a["metric"]) == (entry["layer"], "accuracy")
    assert float(a["value"]) == entry["accuracy"]
    assert [float(a["interval_low"]), float(a["interval_high"])] == entry["interval"]
    assert int(a["test_rows"]) == entry["rows"]
    assert a["width"] == str({"half": 3, "x": 6}[entry["layer"]])
    assert int(a["bytes"]) == 90 * (6 + 3) * 4
    assert (b["width"], b["value"], b["probe_layer"]) == ("6", "", "")
    assert found["stores"][1]["probe"] is None
    run_job("compare", store="[runs/a,runs/b]")
    text = capsys.readouterr().out
    assert f"{100 * entry['accuracy']:.1f} %" in text
    assert "compare.csv" in text


def test_bfloat16_takes_as_much_room_as_float16() -> None:
    as_bfloat16(make_run(20)).copied(Path("b"))
    make_run(20, dtype="float16").copied(Path("h"))
    sizes = [each["bytes"] for each in compare_stores(["b", "h"]).stores]
    assert sizes == [20 * (5 + 12) * 2] * 2


@pytest.mark.usefixtures("entry")
def test_the_same_from_python() -> None:
    found = ask("[runs/a,runs/b]")
    from featx.similarity import compare_stores

    for stores in (["runs/a", Path("runs/b")], [featx.open("runs/a"), "runs/b"], "runs/*"):
        compared = compare_stores(stores)
        assert (compared.stores, compared.notes) == (found["stores"], found["notes"])
    with pytest.raises(ConfigError, match="expected stores"):
        compare_stores([])


@pytest.mark.usefixtures("entry")
def test_probes_of_the_same_rows_and_of_others() -> None:
    probe(store="runs/b")
    (note,) = ask("[runs/a,runs/b]")["notes"]
    assert note.startswith("job=probe 'store=[runs/b,runs/a]' tests whether")
    file = Path("runs/a/probe.json")
    result = json.loads(file.read_text())
    del result["split"]["test_keys_sha256"], result["sha256"]  # as it was written before
    file.write_text(json.dumps(result))
    assert ask("[runs/a,runs/b]")["notes"] == [note]
    probe(store="runs/b", folds=5)
    (note,) = ask("[runs/a,runs/b]")["notes"]
    assert "different splits" in note


@pytest.mark.usefixtures("entry")
def test_equal_sizes_of_a_split_are_not_equal_rows() -> None:
    """The seed of a split chooses places, and a store that grew has its rows in another order."""
    x, y = blobs(num_rows=90, width=6)
    run = make_labelled({"x": x, "half": x[:, :3]}, y, ["c0", "c1", "c2"], failed=(4, 7))
    other_keys = replace(run.listing, keys=run.listing.keys[np.roll(np.arange(90), 3)])
    replace(run, listing=other_keys).write(Path("runs/c"), packed=True)
    probe(store="runs/c")
    splits = [json.loads(Path(f"runs/{name}/probe.json").read_text())["split"] for name in "ac"]
    assert splits[0]["test_rows"] == splits[1]["test_rows"]
    assert (
        "the probes have different splits, so that their test rows differ"
        in ask("[runs/a,runs/c]")["notes"]
    )


@pytest.mark.slow
def test_numbers_have_their_own_metric(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(num_rows=90, width=6)
    write_store(Path("store"), y, {"age": x[:, 0].astype("f8")}, x=x)
    entry = probe(label_column="age", l2=0.1)
    (line,) = csv_rows(ask("store")["file"])
    assert (line["metric"], float(line["value"])) == ("r2", entry["r2"])
    run_job("compare", store="store")
    assert f"{entry['r2']:.3f}" in capsys.readouterr().out


@pytest.mark.usefixtures("entry")
def test_a_pattern_takes_what_is_a_store() -> None:
    Path("runs/notes").mkdir()
    Path("runs/broken").mkdir()
    Path("runs/broken/featx.json").write_text("{")
    found = ask("runs/*", out="table")
    assert [Path(each["store"]).name for each in found["stores"]] == ["a", "b"]
    assert found["file"].endswith("table/compare.csv")
    (note,) = found["notes"]
    assert note.startswith("left out: ")
    with pytest.raises(ConfigError, match="no store has such a path"):
        ask("nothing/*")
    with pytest.raises(StoreError):
        ask("[runs/a,runs/missing]")


@pytest.mark.usefixtures("entry")
def test_a_pattern_says_which_stores_are_deeper() -> None:
    make_run(40, 8).write(Path("runs/photos/toy"))
    found = ask("runs/*")
    assert len(found["stores"]) == 2
    (note,) = (note for note in found["notes"] if "deeper" in note)
    assert note.startswith(
        "left out: 1 store one folder deeper than the pattern, such as runs/phot"
    )
    both = ask("[runs/*,runs/*/*]")
    assert len(both["stores"]) == 3
    assert not any("deeper" in note for note in both["notes"])


def test_other_images_and_labels_are_said() -> None:
    make_run(40, 8).write(Path("runs/a"))
    make_run(30, 8).write(Path("runs/b"))
    run = make_run(40, 8)
    labels = run.listing.labels.copy()
    labels[4] = 1 - labels[4]
    replace(run, listing=replace(run.listing, labels=labels)).write(Path("runs/c"))
    keys = [set(each.listing.keys.tolist()) for each in (make_run(40, 8), make_run(30, 8))]
    first, second = ask("[runs/a,runs/b,runs/c]")["notes"]
    assert first.startswith("runs/b is of other images than runs/a: ")
    assert f"{len(keys[0] & keys[1])} of its 30 keys" in first
    assert second == "runs/c has other labels than runs/a"


def test_images_and_labels_are_compared_by_key() -> None:
    """A store that grew has its rows in another order, and classes may be numbered otherwise."""
    run = make_run(40, 8)
    run.write(Path("runs/a"))
    listing, order = run.listing, np.random.default_rng(0).permutation(40)
    keys, labels = listing.keys[order], listing.labels[order]
    other_labels = np.where(labels < 0, labels, 1 - labels)
    same = replace(listing, keys=keys, labels=other_labels, classes=listing.classes[::-1])
    replace(run, listing=same).write(Path("runs/b"))
    replace(run, listing=replace(same, classes=listing.classes)).write(Path("runs/c"))
    assert ask("[runs/a,runs/b,runs/c]")["notes"] == ["runs/c has other labels than runs/a"]


@pytest.mark.usefixtures("entry")
def test_a_probe_of_another_state_is_left_out() -> None:
    path = Path("runs/a/probe.json")
    path.write_bytes(result_json({**read_result(path), "rows_sha256": "other"}, 1))
    found = ask("[runs/a,runs/b]")
    assert found["stores"][0]["probe"] is None
    assert "another state" in found["notes"][0]


@pytest.mark.usefixtures("entry")
def test_paths_with_characters_of_a_list() -> None:
    names = ["x,1", "[y]", " it's,2"]
    for name in names:
        shutil.copytree("runs/b", name)
    for store, expected in {
        "x,1": names[:1],
        "[y]": names[1:2],
        '["x,1", [y]]': names[:2],
        "['x,1',\" it's,2\", [y],]": ["x,1", " it's,2", "[y]"],
        f"[{','.join(['./' * 100 + 'runs/b'] * 20)}]": ["b"],  # longer than a path can be
    }.items():
        assert [Path(each["store"]).name for each in ask(store)["stores"]] == expected
    page = featx.write_report(["runs/a", *names], out="report.html").read_text()
    assert all(name in html.unescape(page) for name in names)


@pytest.mark.parametrize("store", ["[runs/a,runs/b]", "runs/a,runs/b"])
def test_other_jobs_take_one_store(store: str) -> None:
    with pytest.raises(ConfigError, match=r"job=verify reads one store.*job=compare"):
        run_job("verify", store=store)


@pytest.mark.parametrize("job", ["compare", "probe", "report", "cka"])
def test_a_list_without_brackets_says_how_a_list_is_written(job: str) -> None:
    with pytest.raises(ConfigError, match=r"in brackets, 'store=\[runs/a,runs/b\]'"):
        run_job(job, store="runs/a,runs/b")


@pytest.mark.parametrize(
    ("word", "job"),
    [
        *(("anomalies", "outliers"), ("anomaly", "outliers"), ("knn", "neighbors")),
        *(("similar", "neighbors"), ("mislabeled", "mislabelled"), ("classify", "probe")),
        *(("outlier", "outliers"), ("neighbours", "neighbors"), ("comparison", "compare")),
        *(("dedup", "duplicates"), ("wronglabels", "mislabelled"), ("umap", "report")),
        *(("embed", "extract"), ("train", "probe"), ("gradcam", "attribute"), ("csv", "export")),
    ],
)
def test_words_that_people_type_name_a_job(word: str, job: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_job(word, store="store")
    assert f"Nearest: {job}" in str(caught.value)
    assert nearest(word, ["fp32"]) == ""
