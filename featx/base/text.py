"""Text for a terminal: tables, aligned facts, paths, sizes, times; globs over names of layers."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

WIDTH = 100
"""Largest number of characters in a line of a table or of facts, where the words allow it."""

_LEAST_ROOM = 8
"""Least width of the first column of a table that is made narrower."""

_COMMAND = "python -m featx "


@dataclass(frozen=True)
class Table:
    """A table of a result, with a title above and notes below.

    `left` columns are flush left; `best` is the index of the row of the answer, which a page marks.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    title: str = ""
    notes: Sequence[str] = ()
    best: int | None = None


Section = str | Table | Sequence[tuple[str, str | None]]
"""A part of the result of a job: text, a table, or facts, which are left out if they are None."""


def as_text(*sections: Section | None) -> str:
    """Format the sections of a result for people, with an empty line between them."""
    texts = []
    for section in sections:
        if isinstance(section, str):
            texts.append(section)
        elif isinstance(section, Table):
            lines = [section.title, table(section.header, section.rows, section.left)]
            notes = (textwrap.fill(note, WIDTH) for note in section.notes)
            texts.append("\n".join(filter(None, [*lines, *notes])))
        elif section is not None:
            texts.append(facts([(name, text) for name, text in section if text is not None]))
    return "\n\n".join(texts)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, width: int | None = WIDTH
) -> str:
    """Format rows as aligned columns; the first `left` columns flush left, the others flush right.

    A name in the header may have several lines. A first cell that does not fit into `width` beside
    the other columns gets a line of its own, since names have to stay whole.
    """
    depth = max((name.count("\n") for name in header), default=0)
    split = [("\n" * (depth - name.count("\n")) + name).split("\n") for name in header]
    every = [*zip(*split, strict=True), *rows] if header else list(rows)
    widths = [max(map(_num_columns, column)) for column in zip(*every, strict=True)]
    room = (width or 0) - sum(widths[1:]) - 2 * len(widths[1:])
    if room >= _LEAST_ROOM:  # else the other columns are too wide in any case
        names = (_num_columns(row[0]) for row in every)
        widths[0] = max((name for name in names if name <= room), default=0)
    lines = []
    for first, *others in every:
        if _num_columns(first) > widths[0]:
            lines.append(first)
            first = ""
        cells = []
        for i, (cell, size) in enumerate(zip([first, *others], widths, strict=True)):
            padding = " " * (size - _num_columns(cell))
            cells.append(cell + padding if i < left else padding + cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _num_columns(text: str) -> int:
    """Columns of a terminal that a text takes: two for a wide character, none for an accent."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in ("W", "F") for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def facts(rows: Sequence[tuple[str, str]], width: int = WIDTH) -> str:
    """Format (name, value) pairs as aligned lines; further lines of a value are indented.

    An empty name continues the value of the pair before. Lines longer than `width` are broken
    between words, and commands so that a shell still reads them as one.
    """
    indent = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, value in rows:
        pieces = []
        for line in value.splitlines():
            if len(line) <= width - indent:
                pieces.append(line)
            elif line.startswith(_COMMAND):
                pieces += _broken_command(line, width - indent)
            else:  # between words
                pieces += textwrap.wrap(
                    line,
                    width - indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                    subsequent_indent=" " * (len(line) - len(line.lstrip())),
                )
        first, *more = pieces or [""]
        lines.append(f"{name:<{indent}}{first}".rstrip())
        lines += [" " * indent + line for line in more]
    return "\n".join(lines)


def _broken_command(line: str, width: int) -> list[str]:
    """Break a command between its arguments, with a backslash at the end of each line."""
    program = _COMMAND.strip()
    lines = [program]
    for word in map(shlex.quote, shlex.split(line)[len(program.split()) :]):
        if lines[-1] != program and len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def command_text(*arguments: str) -> str:
    """Return the command with these arguments, quoted for a shell where that is necessary."""
    return _COMMAND + shlex.join(arguments)


_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, separators of lines, changes of the direction of text, and surrogates."""


def name_text(name: bytes) -> str:
    """Text of a key, a class or another name, in any locale; undecodable bytes are surrogates.

    `os.fsdecode` depends on the locale, and is for paths that come from the system or go to it.
    """
    return name.decode("utf-8", "surrogateescape")


def name_bytes(name: str | bytes | os.PathLike[str]) -> bytes:
    """Bytes of a name whose text is that of `name_text`; paths are encoded as by the system."""
    return name.encode("utf-8", "surrogateescape") if isinstance(name, str) else os.fsencode(name)


def as_utf8(name: str) -> str:
    r"""Return a key, class or path as UTF-8 text; other bytes are written as \xff."""
    return name_bytes(name).decode("utf-8", "backslashreplace")


def free_title(name: str, taken: Collection[str]) -> str:
    """Return the title of a column in a table that has others: NAME, or `column.NAME` if taken."""
    while name in taken:
        name = f"column.{name}"
    return name


def printable(text: str | bytes, kept: str = "") -> str:
    """Text without characters that move a cursor, change colours or hide other characters.

    They become escapes as in Python, unless they are in `kept`. Those from '\\x80' are bytes of a
    name that are no UTF-8, in the text surrogates; characters from there are '\\u0080' and so on.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if text.isprintable():  # as nearly all of the millions of cells of a large table are
        return text

    def escape(match: re.Match[str]) -> str:
        if match[0] in kept:
            return match[0]
        code = ord(match[0])
        if match[0] in "\n\r\t":
            return repr(match[0])[1:-1]
        if 0xDC80 <= code <= 0xDCFF:  # of the error handler surrogateescape
            return f"\\x{code - 0xDC00:02x}"
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"

    return _INVISIBLE.sub(escape, text)


def csv_cell(text: str) -> str:
    r"""Text for a cell of a CSV file, which is valid UTF-8 and no formula of a spreadsheet.

    Control characters become escapes and a backslash becomes \\, so that different texts have
    different cells. A text that begins with =, +, -, @ or ' gets a ' in front, unless it is a
    number. Undecodable bytes are surrogates in the text.
    """
    text = printable(text.replace("\\", r"\\"))
    if not text.startswith(("=", "+", "-", "@", "'")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def csv_line(cells: Iterable[T]) -> list[T | str]:
    """Cells of a line of a CSV file, of which texts are those of `csv_cell`."""
    return [csv_cell(cell) if cell and isinstance(cell, str) else cell for cell in cells]


def write_csv(file: BinaryIO, lines: Iterable[Iterable[object]]) -> None:
    """Append lines to a CSV file that pandas and spreadsheets read, the header first; see
    `csv_cell`. Floats are read back without a difference.
    """
    text = io.TextIOWrapper(file, "utf-8", newline="")
    csv.writer(text).writerows(map(csv_line, lines))
    text.flush()
    text.detach()


def csv_bytes(lines: Iterable[Iterable[object]]) -> bytes:
    """CSV file as `write_csv` writes it."""
    buffer = io.BytesIO()
    write_csv(buffer, lines)
    return buffer.getvalue()


def size_text(num_bytes: float) -> str:
    """A number of bytes with its unit: '2.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def percent_text(share: float | None, digits: int = 1) -> str:
    """A share as percent: 0.9256 is '92.6 %'; None is '-'."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def number_text(value: float, digits: int = 3, sign: str = "") -> str:
    """A number with so many decimals, or two significant digits if it is smaller: 4e-05."""
    is_small = 0 < abs(value) < 10**-digits
    return format(value, f"{sign}.2g" if is_small else f"{sign}.{digits}f")


def time_text(seconds: float) -> str:
    """A duration given in seconds, with its unit: '41 s', '12 min', '3.5 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def shown_path(path: str | Path) -> str:
    """Return a path relative to the current folder if that is shorter, else the absolute path.

    A URL stays as it is.
    """
    text = str(path)
    if "://" in text:
        return text
    try:
        relative = os.path.relpath(text)
    except OSError:  # the current folder was deleted
        return text
    return min(text, relative, key=len)


def glob_to_regex(glob: str) -> str:
    """Translate a glob over dotted names into a regular expression.

    * matches within one part of the name, ** across parts, and ? one character.
    """
    parts = {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    pieces = re.split(r"(\*\*|\*|\?)", glob)
    return "".join(parts.get(piece, re.escape(piece)) for piece in pieces)
