"""CSV and Parquet files: columns, keys, labels, and image bytes by row groups."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from image_faults import image_fault

from featx.config import from_composed, from_keywords, source_of_path
from featx.errors import ConfigError, DataError, MissingExtraError
from featx.sources import MISSING_MARKS, open_source, parquet_images
from featx.sources.table import TableOptions
from featx.types import ImageFault, Listing, Source, Status

pa = pytest.importorskip("pyarrow", reason="the extra table is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra table is not installed")


def table(root: Path, **keys: object) -> Source:
    return open_source(TableOptions(root=str(root), **keys))


def labels_of(listing: Listing) -> dict[str, str | None]:
    names = [*listing.classes, None]
    pairs = zip(listing.keys.tolist(), listing.labels.tolist(), strict=True)
    return {os.fsdecode(key): names[label] for key, label in pairs}


def files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# Paths


def test_a_csv_of_paths_and_names(tmp_path: Path) -> None:
    files(tmp_path, "b/2.jpg", "a, b/1.jpg", "é.jpg")
    text = 'id,label,path\n1,dog,b/2.jpg\n2,cat,"a, b/1.jpg"\n3,,é.jpg\n'
    source = table(write(tmp_path / "t.csv", text))
    listing = source.listing()
    assert labels_of(listing) == {"a, b/1.jpg": "cat", "b/2.jpg": "dog", "é.jpg": None}
    keys = listing.keys.tolist()
    assert keys == sorted(keys)
    assert [source.read(key) for key in keys] == keys
    assert listing.content_tags is None


def test_columns_and_the_folder_of_the_paths_can_be_named(tmp_path: Path) -> None:
    files(tmp_path / "images", "007.jpg", "1.5")
    text = "path\tlabel\tfile\tkind\nx\t1\t007.jpg\tcat\ny\t2\t1.5\tdog\n"
    keys = {"path_column": "file", "image_root": str(tmp_path / "images")}
    source = table(write(tmp_path / "t.tsv", text), label_column="kind", **keys)
    assert labels_of(source.listing()) == {"007.jpg": "cat", "1.5": "dog"}
    assert source.read(b"007.jpg") == b"007.jpg"
    none = table(tmp_path / "t.tsv", label_column="", **keys).listing()
    assert (none.labels.tolist(), none.classes) == ([-1, -1], ())
    with pytest.raises(DataError, match=r"data\.path_column=flie: .* Nearest: file"):
        table(tmp_path / "t.tsv", path_column="flie").listing()
    with pytest.raises(DataError, match=r"data\.label_column=labels: .* Nearest: label"):
        table(tmp_path / "t.tsv", label_column="labels").listing()
    with pytest.raises(
        DataError, match=r"no column path or image; it has file, kind.* needs the first line path"
    ):
        table(write(tmp_path / "t.csv", "file,kind\na,b\n")).listing()


def test_a_compressed_csv_and_one_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"path,label\na.jpg,x\n"))
    assert labels_of(table(tmp_path / "t.csv.gz").listing()) == {"a.jpg": "x"}
    (tmp_path / "t.csv.gz").write_bytes((tmp_path / "t.csv.gz").read_bytes()[:-4])
    with pytest.raises(DataError, match=r"t\.csv\.gz cannot be read: Compressed file ended"):
        table(tmp_path / "t.csv.gz").listing()
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfpath,label\r\na.jpg,x\r\n")
    assert labels_of(table(tmp_path / "t.csv").listing()) == {"a.jpg": "x"}


def test_columns_that_are_not_used_may_have_one_name(tmp_path: Path) -> None:
    text = "path;label;n;;\na.jpg;x;1;;\nb.jpg;y;2;;\n"  # as Excel writes empty columns
    listing = table(write(tmp_path / "t.csv", text), columns=["n"]).listing()
    assert labels_of(listing) == {"a.jpg": "x", "b.jpg": "y"}
    assert listing.columns["n"].tolist() == [1, 2]
    columns = [pa.array(["a.jpg", "b.jpg"]), *[pa.array([0, 1])] * 3]
    rows = pa.Table.from_arrays(columns, ["path", "x", "x", "label"])
    pq.write_table(rows, tmp_path / "t.parquet")
    assert labels_of(table(tmp_path / "t.parquet").listing()) == {"a.jpg": "0", "b.jpg": "1"}


@pytest.mark.slow
def test_a_csv_of_many_blocks_keeps_text_that_looks_like_numbers_at_first(tmp_path: Path) -> None:
    rows = [f"{i:06d},{i}" for i in range(200_000)] + ["last.jpg,name"]
    listing = table(write(tmp_path / "t.csv", "path,label\n" + "\n".join(rows) + "\n")).listing()
    assert len(listing) == 200_001
    assert listing.keys[7] == b"000007"
    assert listing.classes[listing.labels[7]] == "7"
    assert listing.classes[listing.labels[-1]] == "name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path\na\nb\na\n", "path has some paths more than once: a"),
        ("path,x,y,width,height\na,0,0,1,1\na,1,0,1,1\n", "has boxes of images, which data.boxes="),
        ("path,label\na,1\n,2\n", r"1 row without a path: line 3\. Correct these rows or delete"),
        ("path,label\n", "has no rows"),
        ("path,path\na,b\n", "two columns of the same name"),
        ("path\nhttp://x/a.jpg\n", "is no path of a file"),
        ("path\n../a.jpg\n", r"leads out of .*line 2 \('\.\./a\.jpg'\)"),
        ("path\nb/../../a.jpg\n", "leads out of"),
        ("path\n/etc/passwd\n", "leads out of"),
        ("path,label\na,1\nb\n", "cannot be read: .*Row #3: Expected 2 columns, got 1: b"),
    ],
)
def test_rows_that_cannot_be_are_errors_that_name_them(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        table(write(tmp_path / "t.csv", text)).listing()
    assert "t.csv" in str(caught.value)


def test_paths_lead_out_of_the_folder_only_where_that_is_asked_for(tmp_path: Path) -> None:
    files(tmp_path, "out.jpg", "in/in.jpg")
    (tmp_path / "in" / "link.jpg").symlink_to("../out.jpg")
    inside = str(tmp_path / "in" / "in.jpg")
    path = write(tmp_path / "in" / "t.csv", f"path\nlink.jpg\nx/../in.jpg\n{inside}\nnone.jpg\n")
    source = table(path)
    assert len(source.listing()) == 4
    assert source.read(os.fsencode(inside)) == b"in/in.jpg"
    for key, message in ((b"link.jpg", "leads out of the folder"), (b"none.jpg", "no such file")):
        with image_fault(Status.MISSING, message):
            source.read(key)
    assert table(path, follow_links=True).read(b"link.jpg") == b"out.jpg"
    source = table(write(path, "path\n../out.jpg\n"), follow_links=True)
    assert source.read(source.listing().keys.tolist()[0]) == b"out.jpg"


@pytest.mark.parametrize("length", [300, 5000, 200_000])
def test_a_path_longer_than_any_file_is_one_row_that_failed(tmp_path: Path, length: int) -> None:
    (tmp_path / "a.png").write_bytes(b"image")
    (tmp_path / "t.csv").write_text(f"path,label\na.png,x\n{'p' * length}.png,y\n")
    source = table(tmp_path / "t.csv")
    keys = source.listing().keys
    assert keys.dtype.itemsize <= 4096, "the longest key determines the size of all"
    assert source.read(keys[0]) == b"image"
    with pytest.raises(ImageFault, match="file name too long"):
        source.read(keys[1])


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("path,Fehler\na,x\n", "there is no column label; data.label_column=NAME takes another"),
        ("path\na\n", "there is no column label"),
        ("path,label\na,x\n", ""),
    ],
)
def test_a_table_without_a_column_of_labels_says_how_to_name_one(
    tmp_path: Path, text: str, note: str
) -> None:
    assert table(write(tmp_path / "t.csv", text)).listing().label_note == note


@pytest.mark.parametrize("name", ["t.xlsx", "t.XLS", "t.ods"])
def test_a_workbook_is_told_how_to_become_a_table(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 and more")
    assert source_of_path(str(tmp_path / name)) == "table"
    with pytest.raises(DataError, match=r"is a workbook.* Save the sheet .*'CSV UTF-8'"):
        table(tmp_path / name).listing()


def test_the_text_file_of_a_spreadsheet_is_a_table(tmp_path: Path) -> None:
    file = write(tmp_path / "t.txt", "path\tlabel\na.jpg\tx\n")
    assert source_of_path(str(file)) == "table"
    assert table(file).listing().keys.tolist() == [b"a.jpg"]


def test_errors_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"none\.csv is no file"):
        table(tmp_path / "none.csv").listing()
    with pytest.raises(DataError, match=r"expected a name ending in \.csv"):
        table(write(tmp_path / "t.dat", "path\na\n")).listing()
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and then nothing of it")
    with pytest.raises(DataError, match=r"t\.parquet cannot be read"):
        table(tmp_path / "t.parquet").listing()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[table\]"'):
        table(tmp_path / "t.csv")


def test_a_parquet_of_paths(tmp_path: Path) -> None:
    files(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    for labels, expected in (
        (pa.array([3, None, 1], pa.int16()), ["3", None, "1"]),
        (pa.array(["x", None, "y"]).dictionary_encode(), ["x", None, "y"]),
        (pa.array(["x", None, "y"], pa.string_view()), ["x", None, "y"]),
        (pa.array([True, False, None]), ["true", "false", None]),
    ):
        paths = pa.array(["c.jpg", "a.jpg", "b.jpg"])
        is_view = labels.type == pa.string_view()
        rows = {"path": paths.cast(pa.string_view()) if is_view else paths, "label": labels}
        pq.write_table(pa.table(rows), tmp_path / "t.parquet")
        found = labels_of(table(tmp_path / "t.parquet").listing())
        assert [found[name] for name in ("c.jpg", "a.jpg", "b.jpg")] == expected
    pq.write_table(pa.table({"path": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column path is int64; expected paths, image bytes"):
        table(tmp_path / "t.parquet").listing()
    twice = pa.Table.from_arrays([pa.array(["a.jpg"])] * 2, ["path", "path"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="two columns of the same name: path, path"):
        table(tmp_path / "t.parquet").listing()


# Image bytes


def images(path: Path, rows: list[dict[str, object]], group: int = 10, **columns: object) -> Path:
    pq.write_table(pa.table({"image": rows, **columns}), path, row_group_size=group)
    return path


def test_image_bytes_are_read_by_row_groups_from_several_threads(tmp_path: Path) -> None:
    data = [random.Random(i).randbytes(1000) for i in range(95)]
    about = {"info": {"features": {"label": {"names": ["u", "v", "w"]}}}}
    rows = pa.table(
        {"image": [{"bytes": d, "path": None} for d in data], "label": [i % 3 for i in range(95)]}
    ).replace_schema_metadata({b"huggingface": json.dumps(about).encode()})
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=10)
    source = table(tmp_path / "t.parquet")
    listing = source.listing()
    assert listing.classes == ("u", "v", "w")
    assert listing.keys[[0, 94]].tolist() == [b"row-000000", b"row-000094"]
    keys = 2 * listing.keys.tolist()
    random.Random(0).shuffle(keys)
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(source.read, keys)) == [data[int(key[4:])] for key in keys]


def test_paths_next_to_the_bytes_are_keys_if_each_row_has_its_own(tmp_path: Path) -> None:
    rows = [{"bytes": b"1", "path": "z.jpg"}, {"bytes": b"2", "path": "a.jpg"}]
    source = table(images(tmp_path / "t.parquet", rows, label=["p", "q"]))
    assert labels_of(source.listing()) == {"a.jpg": "q", "z.jpg": "p"}
    assert (source.read(b"a.jpg"), source.read(b"z.jpg")) == (b"2", b"1")
    for kinds in ((pa.large_binary(), pa.large_string()), (pa.binary_view(), pa.string_view())):
        others = pa.array(rows, pa.struct(zip(("bytes", "path"), kinds, strict=True)))
        pq.write_table(pa.table({"image": others}), tmp_path / "others.parquet")
        source = table(tmp_path / "others.parquet")
        assert source.listing().keys.tolist() == [b"a.jpg", b"z.jpg"]
        assert source.read(b"z.jpg") == b"1"
    for path in ("z.jpg", None, ""):
        images(tmp_path / "t.parquet", [rows[0], {"bytes": b"2", "path": path}])
        assert table(tmp_path / "t.parquet").listing().keys.tolist() == [
            b"row-000000",
            b"row-000001",
        ]


def test_structs_without_bytes_are_paths(tmp_path: Path) -> None:
    """As Hugging Face's Image writes them, unless the images are embedded."""
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    rows: list[dict[str, object]] = [{"bytes": None, "path": p} for p in ("b.jpg", "a.jpg")]
    column = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    only_paths = [{"path": row["path"]} for row in rows]
    for image in (column, pa.array(rows), only_paths):
        pq.write_table(pa.table({"image": image, "label": ["p", "q"]}), tmp_path / "t.parquet")
        source = table(tmp_path / "t.parquet")
        assert labels_of(source.listing()) == {"a.jpg": "q", "b.jpg": "p"}
        assert source.read(b"b.jpg") == b"b.jpg"
    of_numbers = [{"bytes": list(b"1"), "path": path} for path in ("b.jpg", "a.jpg")]
    pq.write_table(pa.table({"image": of_numbers}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column image is struct<bytes: list"):
        table(tmp_path / "t.parquet").listing()
    images(tmp_path / "t.parquet", [{"bytes": None, "path": "/a.jpg"}])
    with pytest.raises(DataError, match=r"1 row whose path leads out of .*row 0 \('/a\.jpg'\)"):
        table(tmp_path / "t.parquet").listing()


def test_names_of_columns_may_have_dots(tmp_path: Path) -> None:
    rows = [{"bytes": b"1", "path": "z.jpg"}, {"bytes": b"2", "path": "a.jpg"}]
    columns = {"image.path": ["1.jpg", "2.jpg"], "image": rows, "a.b": rows}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    for name in ("image", "a.b"):
        source = table(tmp_path / "t.parquet", path_column=name, columns=["image.path"])
        listing = source.listing()
        assert listing.keys.tolist() == [b"a.jpg", b"z.jpg"]
        assert listing.columns["image.path"].tolist() == [b"2.jpg", b"1.jpg"]
        assert (source.read(b"a.jpg"), source.read(b"z.jpg")) == (b"2", b"1")


def test_plain_binary_columns_and_rows_without_bytes(tmp_path: Path) -> None:
    column = pa.array([b"1", None, b""], pa.large_binary())
    pq.write_table(pa.table({"jpg": column}), tmp_path / "t.parquet")
    source = table(tmp_path / "t.parquet", path_column="jpg")
    source.listing()
    assert source.read(b"row-000000") == b"1"
    images(tmp_path / "u.parquet", [{"bytes": b"1", "path": "a"}, {"bytes": None, "path": "b"}])
    nothing = table(tmp_path / "u.parquet")
    nothing.listing()
    for where, key in ((source, b"row-000001"), (source, b"row-000002"), (nothing, b"b")):
        with image_fault(Status.EMPTY):
            where.read(key)


def test_a_row_group_too_large_to_be_held_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_images, "MAX_GROUP_BYTES", 9000)
    rows: list[dict[str, object]] = [{"bytes": random.Random(i).randbytes(1000)} for i in range(20)]
    images(tmp_path / "t.parquet", rows, group=3)
    assert len(table(tmp_path / "t.parquet").listing()) == 20
    images(tmp_path / "t.parquet", rows, group=20)
    with pytest.raises(DataError, match=r"row group holds .*row_group_size=1000"):
        table(tmp_path / "t.parquet").listing()


def test_damaged_image_bytes_cost_no_more_than_their_row_group(tmp_path: Path) -> None:
    data = [random.Random(i).randbytes(3000) for i in range(20)]
    rows: list[dict[str, object]] = [{"bytes": d} for d in data]
    pq.write_table(
        pa.table({"image": rows}),
        tmp_path / "t.parquet",
        row_group_size=10,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
    )
    whole = bytearray((tmp_path / "t.parquet").read_bytes())
    group = pq.ParquetFile(io.BytesIO(bytes(whole))).metadata.row_group(1).column(0)
    middle = group.data_page_offset + group.total_compressed_size // 2
    whole[middle : middle + 50] = bytes(50)
    (tmp_path / "t.parquet").write_bytes(whole)
    source = table(tmp_path / "t.parquet")
    source.listing()
    assert [source.read(b"row-%06d" % i) for i in range(10)] == data[:10]
    with image_fault(Status.DECODE_ERROR, "row group 1 is damaged"):
        source.read(b"row-000015")


@pytest.mark.parametrize("name", ["image", "an.image"])
def test_content_tags_tell_of_other_bytes_under_the_same_keys(tmp_path: Path, name: str) -> None:
    def tags(rows: list[dict[str, object]]) -> npt.NDArray[np.int64] | None:
        pq.write_table(pa.table({name: rows}), tmp_path / "t.parquet", row_group_size=3)
        return table(tmp_path / "t.parquet", path_column=name).listing().content_tags

    rows: list[dict[str, object]] = [{"bytes": b"x" * i} for i in range(1, 9)]
    before, again = tags(rows), tags(rows)
    rows[3] = {"bytes": random.Random(0).randbytes(100)}
    after = tags(rows)
    assert before is not None
    assert again is not None
    assert after is not None
    np.testing.assert_array_equal(before, again)
    assert (before != after).any()


# Columns that the store carries


def test_columns_of_a_csv_keep_what_stands_in_them(tmp_path: Path) -> None:
    text = (
        "path,label,patient,slide,age,good,gap,id,long,empty\n"
        "c.jpg,x,Ann,7,1.5,true,1,007,12345678901234567890,\n"
        "a.jpg,x,,-3,,False,,012,1,\n"
        "b.jpg,y,Bö,0,2e3,TRUE,3,1,2,\n"
    )
    names = ["slide", "patient", "age", "good", "gap", "id", "long", "empty", "label"]
    listing = table(write(tmp_path / "t.csv", text), columns=names).listing()
    columns = listing.columns
    assert list(columns) == sorted(names)
    assert listing.keys.tolist() == [b"a.jpg", b"b.jpg", b"c.jpg"]
    assert columns["patient"].tolist() == [b"", "Bö".encode(), b"Ann"]
    assert columns["slide"].dtype == np.int64
    assert columns["slide"].tolist() == [-3, 0, 7]
    np.testing.assert_array_equal(columns["age"], [np.nan, 2000, 1.5])
    assert columns["good"].tolist() == [False, True, True]
    assert columns["good"].dtype == np.bool_
    np.testing.assert_array_equal(columns["gap"], [np.nan, 3, 1])
    assert columns["id"].tolist() == [b"012", b"1", b"007"]
    assert columns["long"].tolist() == [b"1", b"2", b"12345678901234567890"]
    assert columns["empty"].tolist() == [b"", b"", b""]
    assert columns["label"].tolist() == [b"x", b"y", b"x"]
    assert table(tmp_path / "t.csv").listing().columns == {}
    assert {name: len(v) for name, v in listing.head(2).columns.items()} == dict.fromkeys(names, 2)


def test_marks_of_missing_numbers_are_those_of_pandas_in_any_case() -> None:
    parsers = pytest.importorskip("pandas._libs.parsers", reason="pandas is not installed")
    marks = {mark.lower() for mark in parsers.STR_NA_VALUES if mark}
    assert marks == MISSING_MARKS


@pytest.mark.parametrize(
    "mark", ["NaN", "nan", "NA", "n/a", "#N/A", "<NA>", "NULL", "none", "-nan"]
)
def test_marks_in_columns_of_numbers_are_missing_values(tmp_path: Path, mark: str) -> None:
    lines = (f"a,{mark},{mark},,True", f"b,3,7,1.5,{mark}", f"c,,2,{mark},false")
    text = "\n".join(("path,label,whole,number,good", *lines)) + "\n"
    names = ["whole", "number", "good", "label"]
    listing = table(write(tmp_path / "t.csv", text), columns=names).listing()
    assert listing.labels.tolist() == [-1, 3, -1]
    assert listing.classes == ("0", "1", "2", "3")
    np.testing.assert_array_equal(listing.columns["whole"], [np.nan, 7, 2])
    np.testing.assert_array_equal(listing.columns["number"], [np.nan, 1.5, np.nan])
    np.testing.assert_array_equal(listing.columns["good"], [1, np.nan, 0])
    np.testing.assert_array_equal(listing.columns["label"], [np.nan, 3, np.nan])
    end = (
        f"1 row has the text {mark!r}, which counts as no label because the other labels are "
        "numbers or booleans; if it names a class, rename it"
    )
    assert listing.warnings == (f"{tmp_path}/t.csv, column label: {end}",)
    listing = table(tmp_path / "t.csv", columns=names[:3], label_column="good").listing()
    assert labels_of(listing) == {"a": "True", "b": None, "c": "false"}
    assert listing.warnings == (f"{tmp_path}/t.csv, column good: {end}",)


def test_marks_in_text_are_values_and_warned_of(tmp_path: Path) -> None:
    text = (
        "path,label,country,only,num,id\n"
        "a,NaN,NA,NaN,nan,NA\n"
        "b,dog,DE,,unknown,007\n"
        "c,NaN,NA,,1.5,012\n"
        "d,nan,FR,,,\n"
    )
    names = ["country", "id", "label", "num", "only"]
    listing = table(write(tmp_path / "t.csv", text), columns=names).listing()
    assert listing.classes == ("NaN", "dog", "nan")
    assert listing.labels.tolist() == [0, 1, 0, 2]
    assert listing.columns["country"].tolist() == [b"NA", b"DE", b"NA", b"FR"]
    assert listing.columns["only"].tolist() == [b"NaN", b"", b"", b""]
    assert listing.columns["num"].tolist() == [b"nan", b"unknown", b"1.5", b""]
    end = "which counts as a value like any other; leave a cell empty where the value is missing"
    assert sorted(listing.warnings) == [
        f"{tmp_path}/t.csv, column country: 2 rows have the text 'NA', {end}",
        f"{tmp_path}/t.csv, column id: 1 row has the text 'NA', {end}",
        f"{tmp_path}/t.csv, column label: 3 rows have the text 'NaN' or 'nan', {end}",
        f"{tmp_path}/t.csv, column num: 1 row has the text 'nan', {end}",
        f"{tmp_path}/t.csv, column only: 1 row has the text 'NaN', {end}",
    ]


def test_numbers_with_a_decimal_comma_are_text_and_warned_of(tmp_path: Path) -> None:
    text = "path;age;dose;place;only\na;1,5;2;1,5;7\nb;-20,25;NA;x;8\nc;3;0,5;;9\nd;;;2,0;\n"
    names = ["age", "dose", "only", "place"]
    listing = table(write(tmp_path / "t.csv", text), columns=names).listing()
    assert listing.columns["age"].tolist() == [b"1,5", b"-20,25", b"3", b""]
    assert listing.columns["only"][:3].tolist() == [7, 8, 9]
    end = "so that the column is text; write numbers with a decimal point if they are to be numbers"
    assert list(listing.warnings) == [
        f"{tmp_path}/t.csv, column age: 2 rows have a number with a comma, such as '1,5', {end}",
        f"{tmp_path}/t.csv, column dose: 1 row has a number with a comma, such as '0,5', {end}",
    ]


def test_two_labels_with_marks_never_become_one(tmp_path: Path) -> None:
    listing = table(write(tmp_path / "t.csv", "path,label\na,1\nb,01\nc,NaN\n")).listing()
    assert listing.classes == ("01", "1", "NaN")
    same, marks = listing.warnings
    assert "'1' and '01' are the same number" in same
    assert "1 row has the text 'NaN'" in marks


def test_infinity_is_a_number_beside_finite_ones(tmp_path: Path) -> None:
    text = "path,x,code,empty\na,inf,INF,\nb,-Infinity,,\nc,NaN,INF,\nd,2,,\n"
    listing = table(
        write(tmp_path / "t.csv", text), columns=["x", "code", "empty"], label_column=""
    ).listing()
    np.testing.assert_array_equal(listing.columns["x"], [np.inf, -np.inf, np.nan, 2])
    assert listing.columns["code"].tolist() == [b"INF", b"", b"INF", b""]


def test_columns_of_a_parquet_have_the_types_that_they_have(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"bytes": b"1", "path": "z"}, {"bytes": b"2", "path": "a"}]
    given = {
        "i": pa.array([1, 2], pa.uint8()),
        "f": pa.array([0.5, None], pa.float32()),
        "gap": pa.array([None, 2**53], pa.int64()),
        "b": pa.array([True, None]),
        "t": pa.array(["x", None]).dictionary_encode(),
        "n": pa.nulls(2),
    }
    columns = table(images(tmp_path / "t.parquet", rows, **given), columns=[*given]).listing()
    found = columns.columns
    assert found["i"].tolist() == [2, 1]
    assert found["i"].dtype == np.int64
    np.testing.assert_array_equal(found["f"], [np.nan, 0.5])
    assert found["f"].dtype == np.float64
    np.testing.assert_array_equal(found["gap"], [2.0**53, np.nan])
    np.testing.assert_array_equal(found["b"], [np.nan, 1])
    assert found["t"].tolist() == [b"", b"x"]
    assert found["n"].tolist() == [b"", b""]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([2**63], pa.uint64()), "a store cannot hold exactly"),
        (pa.array([2**53 + 1, None]), "a store cannot hold exactly"),
        (pa.array([[1]]), "is list<.*expected whole numbers, numbers, booleans or text"),
        (pa.array([0], pa.timestamp("ms")), r"is timestamp\[ms\]; expected"),
        (pa.array(["a\0b"]), "a text with NUL in it in row 0"),
        (pa.array(["", "x" * 4097]), "a text of more than 4096 bytes in row 1"),
    ],
)
def test_values_that_no_column_of_a_store_holds_are_refused(
    tmp_path: Path, values: object, message: str
) -> None:
    rows: list[dict[str, object]] = [{"bytes": b"1", "path": f"{i}"} for i in range(len(values))]  # type: ignore[arg-type]
    path = images(tmp_path / "t.parquet", rows, kind=values)
    with pytest.raises(DataError, match=rf"t\.parquet, column kind .*{message}"):
        table(path, columns=["kind"]).listing()


def test_columns_that_are_not_there_or_cannot_be_named_so(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "path,patient,a/b\na,1,2\n")
    with pytest.raises(DataError, match=r"data\.columns=patent: .* Nearest: patient"):
        table(path, columns=["patent"]).listing()
    for names, message in (
        (["a/b"], "cannot be called 'a/b' in a store"),
        (["."], "cannot be called"),
        (["patient", "patient"], "patient is named twice"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.columns: .*{message}"):
            table(path, columns=names)
    with pytest.raises(
        ConfigError, match=r"data\.columns has .* with data=python or data=table only"
    ):
        from_composed(
            from_keywords({"data": {"name": "folder", "root": "x", "columns": ["patient"]}})
        )


# Several files


def shards(root: Path, counts: dict[str, int], **columns: list[object]) -> list[bytes]:
    """Parquet files of image bytes; the bytes of all rows, in the order of the files' names."""
    every = []
    for name, count in counts.items():
        data = [f"{name} {i}".encode() for i in range(count)]
        rows: list[dict[str, object]] = [{"bytes": d, "path": None} for d in data]
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        cut = {column: values[len(every) :][:count] for column, values in columns.items()}
        images(root / name, rows, group=3, **cut)
        every += data
    return every


def test_many_parquet_files_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_images, "KEPT_BYTES", 100)
    counts = {f"set/data-{i}.parquet": 7 + i for i in range(4)} | {"set/more/data-9.parquet": 0}
    number: list[object] = list(range(34))
    data = shards(tmp_path, counts, label=[n % 2 for n in range(34)], n=number)  # type: ignore[misc]
    for root in ("set", "set/data-*.parquet", "set/data-{0..3}.parquet"):
        source = table(tmp_path / root, columns=["n"])
        listing = source.listing()
        assert listing.keys[[0, 7]].tolist() == [
            b"data-0.parquet/row-000000",
            b"data-1.parquet/row-000000",
        ]
        assert listing.columns["n"].tolist() == number
        assert listing.labels.tolist() == [n % 2 for n in range(34)]
        assert listing.content_tags is not None
        keys = dict(zip(listing.keys.tolist(), data, strict=True))
        mixed = list(keys) * 2
        random.Random(0).shuffle(mixed)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(source.read, mixed)) == [keys[key] for key in mixed]


def test_a_file_that_comes_later_changes_no_key(tmp_path: Path) -> None:
    shards(tmp_path, {"a-1.parquet": 3, "a-3.parquet": 2})
    before = table(tmp_path).listing()
    shards(tmp_path, {"a-2.parquet": 4})
    after = table(tmp_path).listing()
    kept = np.isin(after.keys, before.keys)
    assert after.keys[kept].tolist() == before.keys.tolist()
    assert before.content_tags is not None
    assert after.content_tags is not None
    assert after.content_tags[kept].tolist() == before.content_tags.tolist()


def test_a_file_that_is_replaced_stops_the_run(tmp_path: Path) -> None:
    shards(tmp_path, {"a-1.parquet": 3, "a-2.parquet": 3})
    source = table(tmp_path)
    source.listing()
    shards(tmp_path, {"a-2.parquet": 5})
    assert source.read(b"a-1.parquet/row-000001") == b"a-1.parquet 1"
    with pytest.raises(OSError, match="changed while it was in use"):
        source.read(b"a-2.parquet/row-000001")
    (tmp_path / "a-2.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        source.read(b"a-2.parquet/row-000001")


def test_many_csv_files_are_typed_together(tmp_path: Path) -> None:
    files(tmp_path / "set", "a.jpg", "sub/b.jpg", "c.jpg")
    write(tmp_path / "set" / "1.csv", "path,label,n,mixed\nc.jpg,1,5,7\n")
    write(tmp_path / "set" / "2.csv", "n,mixed,path,label\n6,x,a.jpg,2\n,,sub/b.jpg,\n")
    source = table(tmp_path / "set", columns=["n", "mixed"])
    listing = source.listing()
    assert labels_of(listing) == {"a.jpg": "2", "c.jpg": "1", "sub/b.jpg": None}
    np.testing.assert_array_equal(listing.columns["n"], [6, 5, np.nan])
    assert listing.columns["mixed"].tolist() == [b"x", b"7", b""]
    assert source.read(b"sub/b.jpg") == b"sub/b.jpg"
    assert table(tmp_path / "set" / "*.csv").read(b"c.jpg") == b"c.jpg"


def test_files_that_are_no_one_table_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tables below .*\.parquet"):
        table(tmp_path).listing()
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "notes.gz", "x")
    with pytest.raises(DataError, match=r"other: there is no table in it.* end in \.csv"):
        table(tmp_path / "other").listing()
    with pytest.raises(DataError, match=r"\*\.parquet: there is no such file"):
        table(tmp_path / "*.parquet").listing()
    shards(tmp_path, {"a.parquet": 2, "b.parquet": 2}, n=[1, 2, "x", "y"])
    with pytest.raises(DataError, match="column n is int64 and string, not the same in all files"):
        table(tmp_path, columns=["n"]).listing()
    with pytest.raises(DataError, match=r"c\.parquet is no file"):
        table(tmp_path / "{a,c}.parquet").listing()
    pq.write_table(pa.table({"pixels": [b"1"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet has no column image, which .*a\.parquet has"):
        table(tmp_path).listing()
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and then nothing of it")
    with pytest.raises(DataError, match=r"c\.parquet cannot be read"):
        table(tmp_path).listing()
    pq.write_table(pa.table({"image": ["x.jpg"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"image holds paths in .*c\.parquet and none in"):
        table(tmp_path).listing()
    write(tmp_path / "d.csv", "path\na\n")
    with pytest.raises(DataError, match=r"tables of two kinds, such as .*parquet and .*d\.csv"):
        table(tmp_path).listing()
    write(tmp_path / "e.csv", 'path\nb\n""\n')
    with pytest.raises(DataError, match=r"e\.csv: 1 row without a path: line 3"):
        table(tmp_path / "*.csv").listing()
