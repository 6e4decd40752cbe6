"""CSV files that parsers misread without a word: stray quotes and files that are no CSV."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import pytest

from featx.errors import ConfigError, DataError
from featx.sources import open_source
from featx.sources.table import TableOptions
from featx.sources.table_files import check_csv

pd = pytest.importorskip("pandas", reason="pandas is the other reader of these tests")

ROWS = [f"i/{k}.png,{'cat' if k % 2 else 'dog'},{k}" for k in range(40)]


def write(path: Path, rows: list[str], end: str = "\n") -> Path:
    path.write_text(end.join(["path,label,note", *rows, ""]), encoding="utf-8", newline="")
    return path


def rows_of(path: Path, quoting: str = "line") -> int:
    pytest.importorskip("pyarrow", reason="the extra table is not installed")
    return len(open_source(TableOptions(root=str(path), quoting=quoting)).listing().keys)


@pytest.mark.parametrize("line", ["sep=;\r\n", "\ufeffSEP=,\n"])
def test_a_line_for_excel_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.csv").write_text(f"{line}path;label\na.png;cat\n", newline="")
    with pytest.raises(DataError, match=r"t\.csv begins with sep=, a line for Excel"):
        check_csv(tmp_path / "t.csv")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "note",
    ['"5 inch', '5" inch', '5 inch"', '"5" inch', '"a""', '"a"b"', '"two\nlines"', '"'],
)
def test_a_quote_that_may_swallow_rows_is_refused_with_its_line(
    tmp_path: Path, note: str, end: str
) -> None:
    for place in (0, 5, 39):
        rows = [*ROWS]
        rows[place] = f"i/{place}.png,cat,{note}"
        with pytest.raises(DataError, match=f"line {place + 2}: a quote"):
            check_csv(write(tmp_path / "t.csv", rows, end))


@pytest.mark.parametrize("note", ['"5"" inch"', '""', '"a, b"', '""""', "it's", '"é ü"', ""])
def test_quotes_around_whole_cells_are_read_as_pandas_reads_them(tmp_path: Path, note: str) -> None:
    rows = [*ROWS]
    rows[5] = f'i/5.png,"cat",{note}'
    path = write(tmp_path / "t.csv", rows)
    source = open_source(TableOptions(root=str(path), columns=["note"]))
    read = pd.read_csv(path, dtype=str, keep_default_na=False).sort_values("path")
    listing = source.listing()
    assert [key.decode() for key in listing.keys.tolist()] == read["path"].tolist()
    notes = listing.columns["note"]
    if notes.dtype.kind == "S":
        assert [text.decode() for text in notes.tolist()] == read["note"].tolist()
    assert [listing.classes[label] for label in listing.labels] == read["label"].tolist()


def test_a_dialect_may_allow_lines_and_quotes_in_cells(tmp_path: Path) -> None:
    rows = [*ROWS]
    rows[5] = 'i/5.png,cat,"a\nb, ""c"""'
    path = write(tmp_path / "lines.csv", rows)
    assert rows_of(path, "multiline") == len(pd.read_csv(path)) == 40
    rows[5] = 'i/5.png,cat,"5 inch'
    path = write(tmp_path / "quote.csv", rows)
    assert rows_of(path, "none") == 40
    with pytest.raises(DataError, match="line 7: a quote"):
        rows_of(path, "multiline")
    with pytest.raises(ConfigError, match=r"data\.quoting=all: expected one of line, multiline"):
        TableOptions(root=str(path), quoting="all")


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("t.csv", data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("path,label\na.png,é\n".encode("utf-16"), "UTF-16"),
        ("path,label\na.png,é\n".encode("utf-16-be"), "UTF-16"),
        ("path,label\na.png,é\n".encode("utf-16-le"), "UTF-16"),
        (gzip.compress(b"path,label\n", mtime=0), "compressed with gzip"),
        (zipped(b"path,label\n"), "zip archive or an Excel workbook"),
        (b"path,label\ni\\a.png,x\n", "backslashes"),
    ],
)
def test_a_file_that_is_no_csv_is_named_for_what_it_is(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "t.csv")


def test_a_name_of_linux_may_have_a_backslash_and_two_paths_of_one_image_are_named(
    tmp_path: Path,
) -> None:
    for name in ("i\\a.png", "b.png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "t.csv").write_text("path\ni\\a.png\nb.png\n./b.png\n.//b.png\n")
    listing = open_source(TableOptions(root=str(tmp_path / "t.csv"))).listing()
    assert len(listing.keys) == 4
    (warning,) = listing.warnings
    assert "are two rows of one image" in warning
