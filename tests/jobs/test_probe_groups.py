"""job=probe where rows are not independent: nothing of one group is on both sides of a split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import probe_job
import pytest
from csv_rows import csv_rows
from made_store import MadeRun, make_labelled
from PIL import Image
from probe_problem import write_store
from tiny_model import extract, run_job

import featx
from featx.errors import DataError
from featx.sources.row_keys import box_key, frame_key

pytestmark = pytest.mark.usefixtures("in_tmp_path")

GROUPS, ROWS = 60, 8
"""Groups of rows that look alike, but whose class cannot be seen: the truth is 0.5."""

GROUP_OF = np.repeat(np.arange(GROUPS), ROWS)
Y = GROUP_OF % 2


def alike(seed: int = 0) -> np.ndarray:
    """(480, 80) rows of a group are one random vector and a little noise."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(GROUPS, 80))
    return (centres[GROUP_OF] + 0.2 * rng.normal(size=(len(Y), 80))).astype(np.float32)


def run_with(
    keys: list[bytes] | None = None, columns: dict[str, np.ndarray] | None = None, seed: int = 0
) -> MadeRun:
    run = make_labelled({"x": alike(seed)}, Y, ["a", "b"])
    listing = replace(
        run.listing,
        keys=run.listing.keys if keys is None else np.array(keys),
        columns=columns or {},
    )
    return replace(run, listing=listing)


def probe(store: str = "store", **options: Any) -> dict[str, Any]:
    return probe_job.probe(store=store, **{"method": "knn", **options})


BOXES = [
    box_key(b"%03d.jpg" % group, row, 0, 9, 9)
    for group, row in zip(GROUP_OF, range(480), strict=True)
]
BOXES.sort()
VIEWS = [b"%03d.jpg#crop%d" % (group, place % ROWS) for place, group in enumerate(GROUP_OF)]
FRAMES = [frame_key(b"%03d.mp4" % group, place % ROWS) for place, group in enumerate(GROUP_OF)]
PATIENTS = {"patient": np.array([b"p%03d" % group for group in GROUP_OF])}


SPLITS: list[dict[str, Any]] = [
    {}, {"folds": 5}, {"test_share": 0.4}
]  # fmt: skip


def test_few_shot_lines_begin_with_the_columns_of_the_predictions() -> None:
    run_with(BOXES).write(Path("store"), packed=True)
    probe(method="ridge", shots=[1])
    predictions, few_shot = probe_job.predictions(), csv_rows("store/probe/few_shot.csv")
    shared = ["layer", "method", "seed", "fold", "split", "key", "group", "true", "predicted"]
    assert [*few_shot[0]] == [*shared, "shots", "draw"]
    assert [*predictions[0]][: len(shared)] == shared
    group_of = {line["key"]: line["group"] for line in predictions}
    assert len({*group_of.values()}) == GROUPS
    assert all(line["group"] == group_of[line["key"]] for line in few_shot)
    assert {line["draw"] for line in few_shot} == set("12345")


# Each split with one kind of groups, and each kind of groups with one split.
@pytest.mark.parametrize(
    ("keys", "columns", "options", "by", "split"),
    [
        (BOXES, {}, {}, "image", SPLITS[0]),
        pytest.param(BOXES, {}, {}, "image", SPLITS[1], marks=pytest.mark.slow),
        pytest.param(BOXES, {}, {}, "image", SPLITS[2], marks=pytest.mark.slow),
        (VIEWS, {}, {}, "image", SPLITS[1]),
        (FRAMES, {}, {}, "video", SPLITS[1]),
        (None, PATIENTS, {"group_column": "patient"}, "patient", SPLITS[2]),
    ],
)
def test_rows_of_a_group_tell_nothing_of_it(
    keys: list[bytes] | None,
    columns: dict[str, np.ndarray],
    options: dict[str, Any],
    by: str,
    split: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_with(keys, columns).write(Path("store"), packed=True)
    found = probe(shots=[4], **options, **split)
    shown = capsys.readouterr().out
    assert found["accuracy"] < 0.75
    assert found["few_shot"]["4"]["mean"] < 0.75
    # The strength was chosen on rows that are as new as those that are tested.
    assert found["validation_accuracy"] < 0.8
    assert found["split"]["groups"] == {
        "by": by, "groups": GROUPS, "largest": ROWS, "rows_without_value": 0
    }  # fmt: skip
    assert all(rows % ROWS == 0 for rows in found["split"]["test_rows"])
    # 480 rows that come in eights are not 480 independent ones.
    assert found["effective_rows"] < len(Y) / 3
    low, high = found["interval"]
    assert low < 0.5 < high
    assert found["near_duplicates"]["rows"] == 0
    assert (
        f"groups      rows of one {by} stay on one side: 60 groups, the largest of 8 rows" in shown
    )


def test_near_duplicates_on_both_sides_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run_with().write(Path("store"), packed=True)
    found = probe()
    assert found["split"]["groups"] is None
    assert found["accuracy"] > 0.95, "the error that groups prevent"
    near = found["near_duplicates"]
    assert "duplicates  96 of 96 test rows are like a training row" in capsys.readouterr().out
    assert (near["layer"], near["cosine"], near["not_checked"]) == ("x", 0.9, None)
    assert near["rows"] == found["rows"]  # a row of 8 has one of its group in training
    assert near["without"] is None  # nothing would be left
    assert len(near["pairs"]) == 50
    assert near["pairs"][0]["cosine"] >= near["pairs"][-1]["cosine"] >= 0.9
    assert any("near-duplicate among the training rows" in note for note in found["notes_on_rows"])


def test_the_accuracy_without_near_duplicates(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(100, 80)).astype(np.float32)
    y = np.arange(100) % 2
    roles = np.array([b"train"] * 60 + [b"val"] * 20 + [b"test"] * 20)
    x[85] = x[3] + 0.01  # a copy with another label, which is therefore predicted wrong
    assert y[85] == y[3]
    y[85] = 1 - y[85]
    run = make_labelled({"x": x}, y, ["a", "b"])
    run = replace(run, listing=replace(run.listing, columns={"role": roles}))
    run.write(Path("store"), packed=True)
    split = {"method": "knn", "split": "role", "k": 1}
    found = probe(**split)
    near = found["near_duplicates"]
    keys = featx.open("store").keys
    assert near["rows"] == 1
    assert [(pair["test"], pair["training"]) for pair in near["pairs"]] == [(keys[85], keys[3])]
    others = near["without"]
    assert (others["rows"], others["correct"]) == (19, found["correct"])
    assert others["accuracy"] > found["accuracy"]
    assert "without them the accuracy is" in capsys.readouterr().out


def test_rows_without_any_variation_are_duplicates(capsys: pytest.CaptureFixture[str]) -> None:
    """Standardised, all features of these rows are 0, which has no direction."""
    x = np.full((60, 80), 2.5, np.float32)
    write_store(Path("store"), np.arange(60) % 2, x=x)
    found = probe(method="ridge", l2=1)
    assert found["near_duplicates"]["rows"] == found["rows"]
    assert found["near_duplicates"]["pairs"][0]["cosine"] == 1
    # A row of means among others is like no other one.
    x = np.random.default_rng(0).normal(size=(60, 80)).astype(np.float32)
    x[1:] -= x[1:].mean(0)
    x[0] = 0
    write_store(Path("others"), np.arange(60) % 2, x=x)
    assert probe("others", method="ridge", l2=1)["near_duplicates"]["rows"] == 0


@pytest.mark.slow
def test_what_is_not_checked_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with().write(Path("store"), packed=True)
    assert "is streamed" in probe(memory_gib=0.0)["near_duplicates"]["not_checked"]
    monkeypatch.setattr("featx.analysis.probe.leakage.MAX_PRODUCTS", 1000)
    capsys.readouterr()
    assert probe()["near_duplicates"]["rows"] is None
    assert "duplicates  not looked for: 3.7e+04 pairs of rows" in capsys.readouterr().out
    make_labelled({"x": alike()[:, :5]}, Y, ["a", "b"]).write(Path("narrow"), packed=True)
    assert "64 features or more" in probe("narrow")["near_duplicates"]["not_checked"]


def test_a_given_split_that_divides_groups_is_reported() -> None:
    roles = np.array([b"train"] * 300 + [b"val"] * 84 + [b"test"] * 96)
    run_with(BOXES, {"role": roles}).write(Path("sound"), packed=True)
    found = probe("sound", split="role")
    assert [note for note in found["notes_on_rows"] if "divides" in note] == [
        "the given split divides 1 group (image) between validation and training rows, such as "
        "that of 037.jpg#296,0,9,9, with 4 of 84 rows: strengths are chosen too well"
    ]
    run_with(BOXES, {"role": np.roll(roles, 3)}).write(Path("divided"), packed=True)
    notes = probe("divided", split="role")["notes_on_rows"]
    assert any("between test and training rows" in note and "too high" in note for note in notes)
    split = probe_job.given_split((f'"{key.decode()}"' for key in BOXES), map(bytes.decode, roles))
    file = probe("sound", **split)
    assert file["notes_on_rows"] == found["notes_on_rows"]


@pytest.mark.slow
def test_what_occurs_in_both_stores_is_reported() -> None:
    run_with(None, PATIENTS).write(Path("store"), packed=True)
    other = run_with(None, PATIENTS, seed=1).changed(other=1)
    other.write(Path("other"), packed=True)
    notes = probe(test_store="other", group_column="patient")["notes_on_rows"]
    assert any("480 test rows of probe.test_store have keys that" in note for note in notes)
    assert any(
        "480 test rows of probe.test_store have a value of patient" in note for note in notes
    )
    run_with(BOXES).write(Path("boxes"), packed=True)
    elsewhere = [b"9" + key for key in BOXES[:472]] + BOXES[472:]
    order = np.argsort(np.array(elsewhere), kind="stable")
    run_with([elsewhere[i] for i in order], seed=1).changed(other=1).write(
        Path("rest"), packed=True
    )
    found = probe("boxes", test_store="rest")
    assert found["effective_rows"] < 200
    notes = found["notes_on_rows"]
    assert any("8 test rows of probe.test_store have images that" in note for note in notes)


def test_rows_without_a_value_are_groups_of_their_own() -> None:
    values = PATIENTS["patient"].copy()
    values[:16] = b""
    run_with(None, {"patient": values}).write(Path("store"), packed=True)
    found = probe(group_column="patient")
    assert found["split"]["groups"]["groups"] == GROUPS - 2 + 16
    assert "16 rows have no value of patient: each is a group of its own" in found["notes_on_rows"]


def test_what_groups_do_not_allow_is_reported() -> None:
    columns = {
        "label_itself": np.array([b"pq"[label : label + 1] for label in Y]),
        "two_each": np.array([b"%d%d" % (label, i % 4 > 1) for i, label in enumerate(Y)]),
        "one": np.array([b"same"] * len(Y)),
        "three": np.array([b"%d" % (i % 3) for i in range(len(Y))]),
    }
    run_with(None, columns).write(Path("store"), packed=True)
    with pytest.raises(DataError, match=r"every class has a single group \(label_itself\)"):
        probe(group_column="label_itself")
    with pytest.raises(DataError, match=r"single group \(two_each\) besides the test rows"):
        probe(group_column="two_each")
    with pytest.raises(DataError, match=r"more than the groups allow: .* is empty\. Give fewer\."):
        probe(group_column="three", folds=5)
    with pytest.raises(DataError, match=r"fold 1 is empty\. Give more groups\."):
        probe(group_column="one", folds=2)
    few = np.where(Y == 0, GROUP_OF, GROUP_OF % 8 + 1000)
    run_with(None, {"few": few}).write(Path("few"), packed=True)
    notes = probe("few", group_column="few", folds=5)["notes_on_rows"]
    assert notes[0] == (
        "1 class, such as b, is in fewer groups than the 5 folds, and not tested in every fold"
    )


def test_what_is_never_tested_is_said() -> None:
    # Of c, d and f there is one group each; those of d and f are all groups of e.
    texts = "a0a0b0b0 a1a1b1b1 a2a2b2b2 a3a3b3b3 c4c4a4a4 d5d5e5e5 f6f6e6e6".replace(" ", "")
    y, groups = ([*texts[start::2]] for start in (0, 1))
    run = make_labelled({"x": alike()[: len(y), :9]}, map("abcdef".index, y), "abcdef")
    listing = replace(run.listing, columns={"group": np.array(groups, "S1")})
    replace(run, listing=listing).write(Path("store"), packed=True)
    notes = [
        "3 classes, such as c, d, f, are in a single group, trained on and never tested",
        "1 class, such as e, is never tested: that would leave another class without training rows",
    ]
    assert probe(group_column="group")["notes_on_rows"][:-1] == notes
    folds = probe(group_column="group", folds=4)
    left = "2 rows of other classes are in a group with such a class, and never tested"
    assert folds["notes_on_rows"][:-1] == [*notes, left]
    assert (folds["rows"], folds["rows_labelled"]) == (16, 28)


@pytest.mark.slow
def test_extracted_boxes_are_grouped_and_the_same_images_in_two_stores_are_reported(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    lines = ["path,x,y,width,height,label"]
    for folder, numbers in (("photos", range(12)), ("others", range(10, 22))):
        Path(folder).mkdir()
        for i in numbers:
            pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(Path(folder, f"{folder}-{i:02d}.png"))
    lines += [
        f"photos-{i:02d}.png,{x},0,20,20,{'ab'[int(rng.integers(2))]}"
        for i in range(12)
        for x in (0, 4, 8, 12)
    ]
    Path("boxes.csv").write_text("\n".join(lines))
    labels = ["path,label", *(f"others-{i:02d}.png,{'ab'[i % 2]}" for i in range(10, 22))]
    Path("others/labels.csv").write_text("\n".join(labels))
    extract({"name": "folder", "root": "photos", "boxes": "boxes.csv"})
    found = probe(layers=["conv"])
    assert found["split"]["groups"] == {
        "by": "image", "groups": 12, "largest": 4, "rows_without_value": 0
    }  # fmt: skip
    assert found["split"]["test_rows"][0] % 4 == 0
    extract({"name": "table", "root": "others/labels.csv"}, out="others-store")
    notes = probe(test_store="others-store", layers=["conv"])["notes_on_rows"]
    # Other keys, and two images of the same bytes.
    assert [note for note in notes if "byte for byte" in note] == [
        "2 test rows of probe.test_store are of the same images as training rows, byte for byte: "
        "the accuracy is too high"
    ]


@pytest.mark.slow
def test_other_images_under_the_same_keys_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Paired comparisons match rows by key, which other images may have too."""
    for folder, first in (("photos", 0), ("others", 2)):
        for i in range(20):
            pixels = np.random.default_rng(i + (first if i < 6 else 0)).integers(
                0, 256, (40, 40, 3), np.uint8
            )
            path = Path(folder, "ab"[i % 2], f"{i:02d}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
        extract({"name": "folder", "root": folder}, out=f"{folder}-store")
    assert run_job("probe", store="others-store", device="cpu", layers=["conv"]) == 0
    capsys.readouterr()
    assert run_job("probe", store="[photos-store,others-store]", layers=["conv"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    found = json.loads(Path("photos-store/probe.json").read_text())
    tested = {row["key"] for row in probe_job.predictions("photos-store", split="test")}
    num_others = sum(int(Path(key).stem) < 6 for key in tested)
    assert num_others > 0
    assert found["compared_store"]["rows_of_other_images"] == num_others
    assert f"The images of {num_others} of these rows have other bytes there" in out
    assert run_job("cka", store="[photos-store,others-store]", layers=["conv"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "6 of the 20 images have other bytes in the other store" in out
    assert run_job("cka", store="[photos-store,photos-store]", layers=["conv"]) == 0
    assert "other bytes" not in capsys.readouterr().out


def test_test_rows_of_few_groups_have_a_note() -> None:
    run_with(columns={"few": GROUP_OF // 4}).write(Path("store"), packed=True)
    notes = probe(group_column="few")["notes_on_rows"]
    (note,) = (note for note in notes if "narrow" in note)
    assert note == (
        "the test rows are of 3 groups; with fewer than 20 the intervals are too narrow"
    )
