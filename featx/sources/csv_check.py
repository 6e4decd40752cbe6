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


def check_csv(file: Path, separator: str = ",", quoting: str = "line") -> None:
    """Check that a file is UTF-8 CSV with this separator and that its quotes are balanced."""
    cell = rf'(?:"(?:[^"]|"")*+"|[^"{separator}\r]*+)'
    whole_line = re.compile(rf"{cell}(?:[{separator}\r]{cell})*+".encode())
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
        header = lines.readline(1 << 20)
        for start, kind in _OTHER_KINDS.items():
            if header.startswith(start):
                raise DataError(f"{file} is no CSV, but {kind}.")
        if b"\0" in header:
            raise DataError(f"{file} has NUL in its first line: it is no text, or {_UTF16}.")
        other = max(b";,\t|", key=header.count)
        if header.count(other) > header.count(separator.encode()):
            raise DataError(
                f"{file} has cells that {chr(other)!r} separates; expected {separator!r}. In "
                f"Python: pandas.read_csv({str(file)!r}, sep={chr(other)!r}, "
                "decimal=',' if numbers have commas).to_csv('NEW.csv', index=False)."
            )
        lines.seek(0)
        number = 0
        if quoting == "line":
            for number, line in enumerate(lines, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
                if b'"' in line and not whole_line.fullmatch(text):
                    raise _stray_quote(file, number)
        elif quoting == "multiline":
            text_lines = (line.decode("utf-8", "surrogateescape") for line in lines)
            reader = csv.reader(text_lines, delimiter=separator, strict=True)
            try:
                for _ in reader:
                    number = reader.line_num
            except csv.Error as error:
                raise _stray_quote(file, number + 1) from error


def _stray_quote(file: Path, number: int) -> DataError:
    """Return the error of a quote that would swallow the rows behind it."""
    return DataError(
        f'{file}, line {number}: a quote (") begins or ends inside of a cell, or a cell in quotes '
        "does not end in this line, so that rows behind it could be lost. A cell with quotes is "
        'written as "5"" long". data.quoting=multiline (of data=table) takes cells of several '
        "lines, data.quoting=none takes quotes as characters."
    )
