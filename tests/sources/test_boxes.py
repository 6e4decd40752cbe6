"""data.boxes: regions of images as rows; each equals the row of the region saved by itself."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_except
from PIL import Image
from tiny_model import extract, run_job

from featx.errors import ConfigError, DataError
from featx.sources import FolderSource
from featx.sources.table import TableOptions, open_source
from featx.sources.views import BoxedSource
from featx.store import FeatureStore

pytestmark = pytest.mark.usefixtures("in_tmp_path")

HEADER = ("path", "x", "y", "width", "height")


def write_boxes(lines: list[tuple[object, ...]], header: tuple[str, ...] = HEADER) -> Path:
    file = Path("boxes.csv")
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([header, *lines])
    return file


def boxes_of(photos: Path) -> list[tuple[object, ...]]:
    """Three regions of every image of 48 x 48 pixels, one of them all of it."""
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    return [(n, *box) for n in names for box in ((0, 0, 48, 48), (5, 7, 20, 31), (16, 0, 32, 32))]


def boxed(photos: Path, file: Path, **keys: Any) -> FeatureStore:
    data = {"name": "folder", "root": str(photos), "boxes": str(file)}
    return extract(data, **{"part_rows": 32, **keys})


def test_the_error_of_annotations_of_coco_has_the_command_that_writes_the_table() -> None:
    Path("images").mkdir()
    Path("images", "a.jpg").touch()
    boxes = [[1.6, 2, 10.4, 0.2], [5, 6, 7, 8], [5, 6, 7, 8]]
    annotations = [{"image_id": 9, "category_id": 3, "bbox": box} for box in boxes]
    images, categories = [{"id": 9, "file_name": "a.jpg"}], [{"id": 3, "name": "traffic light"}]
    coco = {"images": images, "annotations": annotations, "categories": categories}
    Path("my instances.json").write_text(json.dumps(coco))
    with pytest.raises(DataError, match="is JSON; expected CSV with path, x, y") as error:
        BoxedSource(FolderSource(Path("images")), Path("my instances.json")).listing()
    command = str(error.value).splitlines()[1].replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(command, shell=True, check=True)
    listing = BoxedSource(FolderSource(Path("images")), Path("boxes.csv")).listing()
    assert listing.keys.tolist() == [b"a.jpg#2,2,10,1", b"a.jpg#5,6,7,8"]
    assert listing.classes == ("traffic light",)


@pytest.mark.parametrize("decode", slow_except(["fast", "reference"], "fast"))
def test_a_row_is_that_of_the_region_saved_by_itself(photos: Path, decode: str) -> None:
    lines = boxes_of(photos)
    store = boxed(photos, write_boxes(lines), decode=decode)
    assert store.complete
    assert len(store.keys) == 63
    order = sorted(f"{line[0]}#" + ",".join(map(str, line[1:])) for line in lines)
    assert list(store.keys) == order
    for number, key in enumerate(order):
        name, _, box = key.partition("#")
        x, y, width, height = map(int, box.split(","))
        path = Path("cut") / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.open(photos / name).crop((x, y, x + width, y + height)).save(path)
    apart = extract("cut", decode=decode, out="apart", part_rows=32)
    assert store["conv"][:].tobytes() == apart["conv"][:].tobytes()
    assert store.classes == ("cat", "dog")
    assert [store.classes[i] for i in store.labels] == [key[:3] for key in order]
    with pytest.raises(ConfigError, match="boxes of images"):
        run_job("export", store="store", export={"format": "webdataset"})


@pytest.mark.slow
def test_many_lines_in_any_order_take_little_memory(photos: Path) -> None:
    [image, other, *_] = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    places = np.random.default_rng(0).permutation(140_000)
    lines = [((image, other)[i % 2], i % 40, i, 1, 1, f"c{i % 3}") for i in places.tolist()]
    source = BoxedSource(FolderSource(photos), write_boxes(lines, (*HEADER, "label")))
    tracemalloc.start()
    listing = source.listing()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = sorted((f"{line[0]}#{line[1]},{line[2]},1,1", line[5]) for line in lines)
    assert listing.keys.tolist() == [key.encode() for key, _ in expected]
    assert [listing.classes[i] for i in listing.labels] == [label for _, label in expected]
    assert peak_bytes < 3 * listing.num_bytes + (8 << 20)


@pytest.mark.slow
def test_a_box_that_reaches_outside_fails_alone(photos: Path) -> None:
    lines = boxes_of(photos)
    good = boxed(photos, write_boxes(lines), out="good")
    lines[4] = (lines[4][0], 40, 7, 20, 31)
    store = boxed(photos, write_boxes(lines), out="bad", max_failures=1)
    (failure,) = store.failures
    assert failure["key"] == f"{lines[4][0]}#40,7,20,31"
    assert failure["status"] == "transform error"
    assert "reaches outside the image of 48 x 48" in failure["message"]
    for row in np.flatnonzero(store.ok):
        key = store.keys[row]
        np.testing.assert_allclose(store["conv"][row], good["conv"][good.row(key)], atol=1e-2)


def test_an_image_that_fails_takes_its_own_boxes_along(photos: Path) -> None:
    lines = boxes_of(photos)
    name = str(lines[3][0])
    (photos / name).write_bytes((photos / name).read_bytes()[:200])
    store = boxed(photos, write_boxes(lines), max_failures=10)
    assert [f["key"].partition("#")[0] for f in store.failures] == [name] * 3
    assert {f["status"] for f in store.failures} == {"truncated"}


def test_whole_pixels_may_be_written_as_floats_and_the_table_compressed(photos: Path) -> None:
    lines = boxes_of(photos)
    floats = [(path, *(float(str(number)) for number in box)) for path, *box in lines]
    expected = BoxedSource(FolderSource(photos), write_boxes(lines)).listing().keys.tolist()
    file = Path("boxes.csv.gz")
    file.write_bytes(gzip.compress(write_boxes(floats).read_bytes()))
    assert BoxedSource(FolderSource(photos), file).listing().keys.tolist() == expected


@pytest.mark.parametrize("names", [("class",), ("class", "category")])
def test_columns_that_look_like_labels_are_named(photos: Path, names: tuple[str, ...]) -> None:
    lines = [(*line, *("x" for _ in names)) for line in boxes_of(photos)]
    note = BoxedSource(FolderSource(photos), write_boxes(lines, (*HEADER, *names))).listing()
    assert ", ".join(map(repr, names)) in note.label_note
    assert "rename the one that holds the labels to label" in note.label_note


def test_labels_of_boxes_need_none_of_the_images(photos: Path) -> None:
    Path("images.csv").write_text(
        "\n".join(["path", *{str(path) for path, *_ in boxes_of(photos)}])
    )
    images = open_source(TableOptions(root="images.csv", image_root=str(photos)))
    lines = [(*line, "x") for line in boxes_of(photos)]
    assert BoxedSource(images, write_boxes(boxes_of(photos))).listing().label_note
    assert not BoxedSource(images, write_boxes(lines, (*HEADER, "label"))).listing().label_note


def test_labels_that_are_marks_of_missing_values_are_warned_of(photos: Path) -> None:
    lines = [(*line, ("NaN", "tail", "")[i % 3]) for i, line in enumerate(boxes_of(photos))]
    file = write_boxes(lines, (*HEADER, "label"))
    listing = BoxedSource(FolderSource(photos), file).listing()
    assert listing.classes == ("NaN", "tail")
    (warning,) = listing.warnings
    num_rows = sum(line[-1] == "NaN" for line in lines)
    assert f"column label: {num_rows} rows have the text 'NaN'" in warning


@pytest.mark.parametrize(
    ("lines", "header", "message"),
    [
        ([], HEADER, "has no boxes"),
        ([("cat/000.png", 0, 0, 8)], HEADER[:4], "has no column height"),
        ([("cat/000.png", 0, 0, 8, 0)], HEADER, "line 2: 0,0,8,0 of 'cat/000.png' is no box"),
        ([("cat/000.png", -1, 0, 8, 8)], HEADER, "is no box"),
        ([("cat/000.png", 0.5, 0, 8, 8)], HEADER, "is no box"),
        ([("cat/000.png", 0, 0, 8, "8" * 5000)], HEADER, "is no box"),
        ([("", 0, 0, 8, 8)], HEADER, "is no box"),
        ([("cat/000.png\0", 0, 0, 8, 8)], HEADER, "is no box"),
        ([("none.png", 0, 0, 8, 8)], HEADER, "does not have, such as none.png"),
        ([("cat/000.png", 0, 0, 8, 8)] * 2, HEADER, "more than once: cat/000.png#0,0,8,8"),
        ([("cat/000.png", 0, 0, 8, 8, 4)], (*HEADER, "x"), "the column x more than once"),
        ([("cat/000.png", 0, 0, 8, 8, "a", "b")], (*HEADER, "label"), "line 2: there are more"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    photos: Path, lines: list[tuple[object, ...]], header: tuple[str, ...], message: str
) -> None:
    source = BoxedSource(FolderSource(photos), write_boxes(lines, header))
    with pytest.raises(DataError, match=message):
        source.listing()


def test_a_table_that_is_not_there(photos: Path) -> None:
    with pytest.raises(DataError, match=r"data\.boxes=none\.csv cannot be read"):
        boxed(photos, Path("none.csv"))


@pytest.mark.slow
def test_a_run_resumes_grows_and_is_verified_as_any_other(photos: Path) -> None:
    lines = boxes_of(photos)
    boxed(photos, write_boxes(lines[:30]))
    grown = boxed(photos, write_boxes(lines), grow=True)
    assert len(grown.keys) == 63
    assert run_job("verify", store="store", verify={"reextract_rows": 63}) == 0
    elsewhere = photos.rename("elsewhere")
    data = {"name": "folder", "root": str(elsewhere)}
    assert run_job("verify", store="store", verify={"reextract_rows": 63}, data=data) == 0


def test_a_cell_longer_than_csv_allows_is_refused_with_its_line(photos: Path) -> None:
    name = boxes_of(photos)[0][0]
    text = f"path,x,y,width,height,label\n{name},0,0,8,8,a\n{name},1,1,8,8,{'q' * 150_000}\n"
    Path("long.csv").write_text(text)
    with pytest.raises(DataError, match=r"long\.csv, line 3: field larger than field limit"):
        boxed(photos, Path("long.csv"))
