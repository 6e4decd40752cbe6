"""Columns of a table through every job: extracted, resumed, grown, retried, probed, exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_store import dataset_digests
from probe_job import probe
from tiny_model import extract, run_job, write_image

import featx
from featx.errors import DataError, StoreError, StoreMismatchError

pytest.importorskip("pyarrow", reason="the extra table is not installed")

pytestmark = pytest.mark.usefixtures("in_tmp_path")

TABLE = {"name": "table", "root": "t.csv", "columns": ["status", "patient", "side"]}


def patient(i: int) -> str:
    return f"p{i % 4}" if i % 7 else ""


def write_table(count: int = 12, changed: str | None = None) -> None:
    lines = ["path,label,patient,status,side"]
    for i in range(count):
        write_image(Path(f"{i:03d}.png"), i)
        side = ("train", "train", "test", "validation")[i // 2 % 4]
        name = changed if changed is not None and i == 5 else patient(i)
        lines.append(f"{i:03d}.png,{i % 2},{name},{i},{side}")
    Path("t.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")


def check(store: featx.FeatureStore, count: int = 12) -> None:
    assert store.complete
    assert store.columns == ("patient", "side", "status")
    assert store.column("patient").tolist() == [patient(i) for i in range(count)]
    assert store.column("status").tolist() == list(range(count))
    assert run_job("verify", out="store") == 0


@pytest.mark.slow
def test_a_run_a_resume_and_a_growth() -> None:
    write_table()
    check(extract(TABLE))
    once = dataset_digests("store")
    check(extract(TABLE))
    check(extract({**TABLE, "columns": ["side", "patient", "status"]}))
    with pytest.raises(StoreMismatchError, match=r"data\.columns.*now gives patient \(text\)"):
        extract({**TABLE, "columns": ["patient"]})
    with pytest.raises(StoreMismatchError, match=r"now gives none"):
        extract({"name": "table", "root": "t.csv"})
    write_table(changed="somebody")
    with pytest.raises(
        StoreMismatchError, match=r"column patient: 005\.png had 'p1' and has 'some"
    ):
        extract(TABLE)
    assert dataset_digests("store") == once
    write_table(15)
    with pytest.raises(StoreMismatchError, match=r"3 new images"):
        extract(TABLE)
    check(extract(TABLE, grow=True), 15)
    check(extract(TABLE), 15)
    check(extract(TABLE, layers=["conv", "pool"]), 15)


@pytest.mark.slow
def test_a_part_that_is_lost_and_rows_that_are_retried() -> None:
    write_table()
    image = Path("003.png").read_bytes()
    Path("003.png").write_bytes(b"")
    extract(TABLE, pack=False, max_failures=3)
    Path("store/parts/part-000001.h5").unlink()
    extract(TABLE, max_failures=3)
    Path("003.png").write_bytes(image)
    check(extract(TABLE, retry_failed=True))
    assert featx.open("store").ok.all()


@pytest.mark.slow
def test_workers_write_them_too() -> None:
    write_table()
    check(extract(TABLE, executor={"name": "local", "workers": 2}, device="cpu"))


def test_regions_have_the_columns_of_their_image() -> None:
    write_table(4)
    Path("boxes.csv").write_text(
        "path,x,y,width,height\n002.png,0,0,20,20\n001.png,5,5,20,20\n002.png,10,0,20,20\n"
    )
    store = extract({**TABLE, "boxes": "boxes.csv"})
    assert store.column("status").tolist() == [1, 2, 2]


@pytest.mark.slow
def test_a_column_is_probed_for_and_another_says_the_split() -> None:
    write_table(32)
    extract(TABLE)
    found = probe(split="side", label_column="patient")
    assert found["classes"] == ["p0", "p1", "p2", "p3"]
    about = found["split"]
    assert (about["split_column"], about["label_column"]) == ("side", "patient")
    named = [i for i in range(32) if i % 7]
    sides = [("train", "train", "test", "validation")[i // 2 % 4] for i in named]
    assert about["fit"] == [sides.count("train")]
    assert about["validation_rows"] == [sides.count("validation")]
    assert found["rows"] == about["test_rows"][0] == sides.count("test")
    assert found["notes_on_rows"] == ["5 rows without a label are left out"]


def test_a_column_that_says_no_split_or_no_class_is_reported() -> None:
    write_table(16)
    extract(TABLE)
    with pytest.raises(DataError, match=r"probe\.split=patient is 'p0'; expected train"):
        probe(split="patient")
    with pytest.raises(StoreError, match=r"no column 'sides'.* Nearest: side"):
        probe(split="sides")
