"""Check of a CSV file before it is parsed, as every parser swallows rows behind a stray quote."""

from __future__ import annotations

import csv
import gzip
import re
from pathlib import Path
from typing import Literal

from featx.errors import DataError

Quoting = Literal["line", "multiline", "none"]
"""Meanings of double quotes: they enclose a cell of one line, a cell of any lines, or nothing."""

_UTF16 = "UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8')"
_OTHER_KINDS = {
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"PK": "a zip archive or an Excel workbook; unpack it, or save the sheet as 'CSV UTF-8'",
    b"\x1f\x8b": "compressed with gzip; such a name ends in .csv.gz or .tsv.gz",
    b"BZh": "compressed with bzip2; unpack it",
    b"\xfd7zXZ": "compressed with xz; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
}


DELIMITERS = ",;\t|"
"""Characters that may separate cells; the first of those that are equally frequent is taken."""


def check_csv(
    file: Path, delimiter: str | None = None, quoting: str = "line", encoding: str | None = None
) -> str:
    """Check that a file is CSV whose quotes are balanced, in an encoding if one is given.

    Returns `delimiter`, or if that is None the one of the header: the most frequent of
    `DELIMITERS`, or that of the name (.tsv) if none is more frequent.
    """
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
        header = lines.readline(1 << 20)
        for start, kind in _OTHER_KINDS.items():
            if header.startswith(start):
                raise DataError(f"{file} is no CSV, but {kind}.")
        if b"\0" in header:
            raise DataError(f"{file} has NUL in its first line: it is no text, or {_UTF16}.")
        delimiter = delimiter or _delimiter_of(header, file)
        cell = rf'(?:"(?:[^"]|"")*+"|[^"{re.escape(delimiter)}\r]*+)'
        whole_line = re.compile(rf"{cell}(?:[{re.escape(delimiter)}\r]{cell})*+".encode())
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if encoding is not None and not line.isascii():
                _check_encoding(file, number, line, encoding)
            text = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            if quoting == "line" and b'"' in line and not whole_line.fullmatch(text):
                raise _stray_quote(file, number)
        if quoting == "multiline":
            lines.seek(0)
            number = 0
            text_lines = (line.decode("utf-8", "surrogateescape") for line in lines)
            reader = csv.reader(text_lines, delimiter=delimiter, strict=True)
            try:
                for _ in reader:
                    number = reader.line_num
            except csv.Error as error:
                raise _stray_quote(file, number + 1) from error
    return delimiter


def _delimiter_of(header: bytes, file: Path) -> str:
    """Return the delimiter of a header, whose cells in quotes do not count."""
    cells = re.sub(rb'"[^"]*"', b"", header)
    usual = "\t" if ".tsv" in file.suffixes[-2:] else ","
    return max(usual + DELIMITERS, key=lambda delimiter: cells.count(delimiter.encode()))


def _check_encoding(file: Path, number: int, line: bytes, encoding: str) -> None:
    """Raise a DataError if a line is not text of this encoding."""
    try:
        line.decode(encoding)
    except UnicodeDecodeError as error:
        start = line.rfind(b"\n", 0, error.start) + 1
        found = re.search(rb"[^,;\t|\r\n]*$", line[start : error.start])
        word = (found[0] if found else b"") + re.split(rb"[,;\t|\r\n]", line[error.start :])[0]
        shown = word.decode("cp1252", "replace")
        raise DataError(
            f"{file}, line {number}: {word!r} is not {encoding.upper()}. Excel writes 'CSV' in "
            f"Windows-1252: data.encoding=cp1252 (of data=table) reads it as {shown!r}; or save "
            "the table as 'CSV UTF-8'."
        ) from error


def _stray_quote(file: Path, number: int) -> DataError:
    """Return the error of a quote that would swallow the rows behind it."""
    return DataError(
        f'{file}, line {number}: a quote (") begins or ends inside of a cell, or a cell in quotes '
        "does not end in this line, so that rows behind it could be lost. A cell with quotes is "
        'written as "5"" long". data.quoting=multiline (of data=table) takes cells of several '
        "lines, data.quoting=none takes quotes as characters."
    )
