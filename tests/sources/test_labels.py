"""One rule of labels for all sources: numbers of any dtype, names, and what lies outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from encoded_images import encode
from made_shards import write_tar
from PIL import Image
from pyarrow import parquet

from featx.config import DataConfig
from featx.errors import DataError
from featx.sources import FolderSource, check_class_names, open_source, similar_names, source_of
from featx.sources.hdf5 import Hdf5Options
from featx.sources.huggingface import HuggingFaceOptions
from featx.sources.table import TableOptions
from featx.sources.views import BoxedSource
from featx.sources.webdataset import WebDatasetOptions
from featx.types import Listing

pytestmark = pytest.mark.usefixtures("cache_folder")


def png(value: int = 0) -> bytes:
    return encode(Image.new("RGB", (4, 4), (value % 256, 9, 9)), "PNG")


def listed(config: DataConfig) -> Listing:
    return open_source(config).listing()


def hdf5(root: Path, labels: Any) -> Listing:
    with h5py.File(root / "x.h5", "w") as file:
        file["images"] = np.zeros((len(labels), 4, 4, 3), np.uint8)
        file["labels"] = labels
    return listed(Hdf5Options(root=str(root / "x.h5"), dataset="images", label_column="labels"))


def parquet_table(root: Path, labels: Any) -> Listing:
    table = pa.table({"path": [f"{i:03d}.png" for i in range(len(labels))], "label": labels})
    parquet.write_table(table, root / "t.parquet")
    return listed(TableOptions(root=str(root / "t.parquet")))


def csv(root: Path, labels: Any) -> Listing:
    lines = "".join(f"{i:03d}.png,{label}\n" for i, label in enumerate(labels))
    (root / "t.csv").write_text("path,label\n" + lines)
    return listed(TableOptions(root=str(root / "t.csv")))


def boxes(root: Path, labels: Any) -> Listing:
    (root / "i").mkdir()
    for i in range(len(labels)):
        (root / "i" / f"{i:03d}.png").write_bytes(png(i))
    lines = "".join(f"{i:03d}.png,0,0,2,2,{label}\n" for i, label in enumerate(labels))
    (root / "b.csv").write_text("path,x,y,width,height,label\n" + lines)
    return BoxedSource(FolderSource(root / "i"), root / "b.csv").listing()


def huggingface(root: Path, labels: Any) -> Listing:
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": png(i), "path": None} for i in range(len(labels))]
    table = pa.table({"image": images, "label": labels})
    dataset = datasets.Dataset(table).cast_column("image", datasets.Image())
    dataset.save_to_disk(str(root / "saved"))
    return listed(HuggingFaceOptions(root=str(root / "saved")))


def shard(root: Path, labels: Any) -> Listing:
    files = {}
    for i, label in enumerate(labels):
        files |= {f"{i:03d}.png": png(i), f"{i:03d}.cls": str(label).encode()}
    return listed(WebDatasetOptions(root=str(write_tar(root / "x.tar", files))))


def python(root: Path, labels: Any) -> Listing:
    return source_of([(np.zeros((4, 4, 3), np.uint8), label) for label in labels]).listing()


SOURCES: dict[str, Callable[[Path, Any], Listing]] = {
    "hdf5": hdf5,
    "parquet": parquet_table,
    "csv": csv,
    "boxes": boxes,
    "huggingface": huggingface,
    "webdataset": shard,
    "python": python,
}
TYPED = ["hdf5", "parquet", "huggingface", "python"]
"""Sources whose labels have a dtype; the others hold texts."""


@pytest.mark.parametrize("source", SOURCES)
def test_numbers_are_class_indices_in_every_source(tmp_path: Path, source: str) -> None:
    listing = SOURCES[source](tmp_path, np.array([10, 2, 0, 9]))
    assert listing.labels.tolist() == [10, 2, 0, 9]
    assert listing.classes == tuple(map(str, range(11)))
    assert listing.warnings == ()


@pytest.mark.parametrize("source", TYPED)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"])
def test_numbers_of_any_dtype(tmp_path: Path, source: str, dtype: str) -> None:
    listing = SOURCES[source](tmp_path, np.array([0, 1, 2, 0], dtype))
    assert (listing.labels.tolist(), listing.classes) == ([0, 1, 2, 0], ("0", "1", "2"))


@pytest.mark.parametrize("source", SOURCES)
def test_minus_one_and_one_are_no_classes(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match=r"the labels are -1 and 1\. -1 stands for no label"):
        SOURCES[source](tmp_path, np.array([1, -1, 1, -1]))


@pytest.mark.parametrize("source", SOURCES)
def test_minus_one_is_no_label_and_is_said(tmp_path: Path, source: str) -> None:
    listing = SOURCES[source](tmp_path, np.array([1, -1, 0, -1]))
    assert listing.labels.tolist() == [1, -1, 0, -1]
    (warning,) = listing.warnings
    assert "2 rows have the label -1, which counts as no label" in warning


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("wrong", [-2, 1_000_001])
def test_a_number_outside_the_rules_is_an_error_with_its_row(
    tmp_path: Path, source: str, wrong: int
) -> None:
    expected = "002.cls holds" if (source, wrong) == ("webdataset", -2) else f"{wrong} in row 2 "
    with pytest.raises(DataError, match=expected):
        SOURCES[source](tmp_path, np.array([0, 1, wrong, 1]))


@pytest.mark.parametrize("source", ["hdf5", "parquet", "huggingface"])
def test_numbers_beyond_int64_are_errors(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match=r"1844674407370955161\d in row 1 is no class index"):
        SOURCES[source](tmp_path, np.array([0, 2**64 - 1], "u8"))


@pytest.mark.parametrize("source", ["hdf5", "parquet"])
def test_infinity_is_an_error_in_every_dtype(tmp_path: Path, source: str) -> None:
    for dtype in ("f2", "f4", "f8"):
        with pytest.raises(DataError, match=r"inf in row 1 is no class index"):
            SOURCES[source](tmp_path, np.array([0, np.inf], dtype))


@pytest.mark.parametrize("source", [*TYPED, "csv", "boxes"])
def test_whole_floats_are_whole_numbers_and_fractions_an_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "a").mkdir()
    listing = SOURCES[source](tmp_path / "a", np.array([0.0, 2.0, np.nan, 1.0]))
    assert listing.labels.tolist() == [0, 2, -1, 1]
    with pytest.raises(DataError, match=r"1\.5 in row 1"):
        SOURCES[source](tmp_path, np.array([0.0, 1.5]))


@pytest.mark.parametrize(
    ("texts", "labels", "classes"),
    [
        (["10", "2", "0"], [10, 2, 0], tuple(map(str, range(11)))),
        (["1.0", "", "0.0"], [1, -1, 0], ("0", "1")),
        (["01", "1", "2"], [0, 1, 2], ("01", "1", "2")),
        (["1", "1.0", "2"], [0, 1, 2], ("1", "1.0", "2")),
        (["b", "10", "2"], [2, 0, 1], ("10", "2", "b")),
        (["true", "NA", "false"], [1, -1, 0], ("false", "true")),
        (["3", "nan", ""], [3, -1, -1], ("0", "1", "2", "3")),
    ],
)
def test_boxes_and_tables_read_the_same_labels(
    tmp_path: Path, texts: list[str], labels: list[int], classes: tuple[str, ...]
) -> None:
    for source in (csv, boxes):
        listing = source(tmp_path, texts)
        assert (listing.labels.tolist(), listing.classes) == (labels, classes)


@pytest.mark.parametrize("source", ["hdf5", "parquet", "huggingface", "python"])
def test_texts_of_a_typed_column_are_names(tmp_path: Path, source: str) -> None:
    listing = SOURCES[source](tmp_path, ["10", "2", "10"])
    assert (listing.labels.tolist(), listing.classes) == ([0, 1, 0], ("10", "2"))


@pytest.mark.parametrize(
    ("first", "second"),
    [("Cat", "cat"), ("cat", "cat "), ("big cat", "big  cat"), ("caf\u00e9", "cafe\u0301")],
)
def test_classes_that_differ_only_by_spelling_are_named(first: str, second: str) -> None:
    (warning,) = similar_names(sorted([first, second, "dog"]))
    assert ascii(first) in warning and ascii(second) in warning  # noqa: PT018
    assert not similar_names(["1", "01", "cat", "cats"])


@pytest.mark.parametrize("name", ["a\0", "\0", "a\0b", "\ud800", "x\udc7f"])
def test_a_class_that_a_store_would_give_back_as_another_is_refused(name: str) -> None:
    check_class_names(["a", "é", "x\udcff", "\x1b", ""])
    with pytest.raises(DataError, match="Give it another name"):
        check_class_names(["a", name])
