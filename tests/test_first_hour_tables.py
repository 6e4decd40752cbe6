"""Tables as Excel and pandas write them, and tables whose images are elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_model import KEYS

import featx
from featx.errors import ConfigError, DataError, StoreMismatchError
from featx.sources import open_source
from featx.sources.table import TableOptions
from featx.types import Listing

ROWS = ["cat/a.png", "cat/b.png", "dog/c.png"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ROWS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 40), "red").save(tmp_path / name)
    return tmp_path


def list_table(file: Path, **options: object) -> Listing:
    return open_source(TableOptions(root=str(file), **options)).listing()  # type: ignore[arg-type]


def names_of(listing: Listing) -> list[str]:
    return [listing.classes[label] for label in listing.labels]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_the_delimiter_is_that_of_the_header(folder: Path, delimiter: str, mark: bytes) -> None:
    lines = [["path", "label", "note"], *([row, row[:3], "x"] for row in ROWS)]
    text = "".join(delimiter.join(cells) + "\r\n" for cells in lines)
    (folder / "t.csv").write_bytes(mark + text.encode())
    assert names_of(list_table(folder / "t.csv")) == ["cat", "cat", "dog"]


def test_a_delimiter_in_a_quoted_column_name_does_not_count(folder: Path) -> None:
    (folder / "t.csv").write_text('"size; w; h",path,label\n"1;2",cat/a.png,cat\n')
    assert names_of(list_table(folder / "t.csv")) == ["cat"]


@pytest.mark.parametrize("given", [";", "semicolon"])
def test_the_delimiter_can_be_given(folder: Path, given: str) -> None:
    (folder / "t.csv").write_text("path;label;x,y,z,w\ncat/a.png;cat;1\n")
    assert names_of(list_table(folder / "t.csv", delimiter=given)) == ["cat"]


@pytest.mark.parametrize("given", ["", "ab", "\n"])
def test_a_delimiter_is_one_character(given: str) -> None:
    with pytest.raises(ConfigError, match="delimiter"):
        featx.extract(data={"name": "table", "root": "t.csv", "delimiter": given})


def test_windows_1252_is_named_and_read_when_asked(folder: Path) -> None:
    text = "path,label\ncat/a.png,ok\ncat/b.png,gestört\n"
    (folder / "t.csv").write_bytes(text.encode("cp1252"))
    with pytest.raises(DataError, match=r"t\.csv, line 3: .*UTF-8.*data.encoding=cp1252.*gestört"):
        list_table(folder / "t.csv")
    listing = list_table(folder / "t.csv", encoding="cp1252")
    assert names_of(listing) == ["ok", "gestört"]
    (folder / "t.csv").write_text(text, "utf-8-sig")
    with pytest.raises(DataError, match=r"t\.csv begins with a byte order mark of UTF-8"):
        list_table(folder / "t.csv", encoding="cp1252")
    assert names_of(list_table(folder / "t.csv", encoding="utf-8-sig")) == ["ok", "gestört"]


def test_paths_of_another_encoding_are_found(folder: Path) -> None:
    Image.new("RGB", (40, 40)).save(folder / "stör.png")
    (folder / "t.csv").write_bytes("path\nstör.png\n".encode("latin-1"))
    source = open_source(TableOptions(root=str(folder / "t.csv"), encoding="latin-1"))
    assert source.read(bytes(source.listing().keys[0])) == (folder / "stör.png").read_bytes()


@pytest.mark.parametrize("given", ["utf-16", "nonsense", "base64"])
def test_an_encoding_contains_ascii(given: str) -> None:
    with pytest.raises(ConfigError, match=f"data.encoding={given}: expected an encoding"):
        TableOptions(root="t.csv", encoding=given)


def test_every_row_with_a_problem_is_counted_and_the_first_are_named(folder: Path) -> None:
    lines = ["path,label", "", *(f",{i}" for i in range(7)), "cat/a.png,1", "../x.png,2"]
    (folder / "t.csv").write_text("\n".join([*lines, "https://example.org/x.png,3", ""]))
    with pytest.raises(DataError) as caught:
        list_table(folder / "t.csv")
    text = str(caught.value)
    assert "7 rows without a path: line 3, line 4, line 5, line 6, line 7 and 2 more" in text
    assert "1 row whose path leads out of" in text
    assert "line 11 ('../x.png')" in text
    assert "1 row whose path is no path of a file: line 12 ('https://example.org/x.png')" in text


def test_lines_are_those_of_the_file_if_cells_have_several(folder: Path) -> None:
    (folder / "t.csv").write_text('path,label\ncat/a.png,"two\nlines"\n,x\n')
    with pytest.raises(DataError, match="1 row without a path: line 4"):
        list_table(folder / "t.csv", quoting="multiline")


def test_boxes_and_classes_of_excel_are_read(folder: Path) -> None:
    (folder / "boxes.csv").write_text("path;x;y;width;height\ncat/a.png;0;0;8;8\n")
    (folder / "classes.csv").write_text("cat;Katze\ndog;Hund\n")
    store = featx.extract(
        data={
            "name": "folder",
            "root": folder,
            "boxes": folder / "boxes.csv",
            "classes": folder / "classes.csv",
        },
        **{**KEYS, "out": folder / "out"},  # type: ignore[arg-type]
    )
    assert [str(key) for key in store.keys] == ["cat/a.png#0,0,8,8"]
    assert list(store.classes) == ["Katze"]


@pytest.mark.parametrize("is_list", [False, True], ids=["table", "list of paths"])
def test_a_run_of_which_no_image_exists_names_the_path_that_was_tried(
    tmp_path: Path, is_list: bool
) -> None:
    (tmp_path / "t.csv").write_text("path\n" + "".join(f"{i}.png\n" for i in range(40)))
    data: object = tmp_path / "t.csv"
    if is_list:
        data = [tmp_path / f"{i}.png" for i in range(40)]
    with pytest.raises(
        DataError, match="none of 16 images that were tried, of 40, exists"
    ) as caught:
        featx.extract(data=data, out=tmp_path / "out")
    assert f"looked for at {tmp_path / '0.png'}" in str(caught.value)
    assert ("data.image_root=DIR" in str(caught.value)) is not is_list
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_of_images_is_named(folder: Path) -> None:
    (folder / "t.csv").write_text("path\ncat/a.png\n")
    data = {"name": "table", "root": folder / "t.csv", "image_root": folder / "nowhere"}
    with pytest.raises(DataError, match=r"nowhere/cat/a.png"):
        featx.extract(data=data, out=folder / "out")


@pytest.mark.parametrize("refresh", [False, "auto"])
def test_a_store_in_which_every_row_failed_is_started_again(
    tmp_path: Path, refresh: bool | str
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for i in range(3):
        (images / f"{i}.png").write_bytes(b"no image")
    extract = {**KEYS, "data": images, "out": tmp_path / "out", "refresh": refresh}
    assert not featx.extract(**extract).ok.any()  # type: ignore[arg-type]
    for i in range(3):
        Image.fromarray(np.full((40, 40, 3), i * 50, np.uint8)).save(images / f"{i}.png")
    store = featx.extract(**extract)  # type: ignore[arg-type]
    assert store.ok.all()
    assert len(store.failures) == 0


def test_rows_that_were_committed_before_a_kill_are_not_deleted(tmp_path: Path) -> None:
    """A run that is killed before its end leaves the summary of the run before it."""
    images = tmp_path / "images"
    images.mkdir()
    for i in range(3):
        (images / f"{i}.png").write_bytes(b"no image")
    extract = {**KEYS, "data": images, "out": tmp_path / "out"}
    featx.extract(**extract)  # type: ignore[arg-type]
    summary = (tmp_path / "out" / "summary.json").read_bytes()
    Image.fromarray(np.full((40, 40, 3), 9, np.uint8)).save(images / "1.png")
    featx.extract(**extract, retry_failed=True)  # type: ignore[arg-type]
    (tmp_path / "out" / "summary.json").write_bytes(summary)
    (images / "1.png").unlink()  # so that a new store would lack the row
    with pytest.raises(StoreMismatchError, match="no longer in the data set"):
        featx.extract(**extract)  # type: ignore[arg-type]
    assert featx.open(tmp_path / "out").ok.tolist() == [False, True, False]
