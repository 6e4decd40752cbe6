"""data.boxes: a table of regions turns every picture into as many rows as it has boxes.

A key is that of the picture, '#', and the box: 'cat/001.jpg#10,20,64,48'.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from featx.errors import DataError, counted
from featx.sources.key_forms import box_key
from featx.sources.labels import from_names, renumbered
from featx.sources.row_keys import doubles
from featx.types import Box, Listing, Source, Stateful

COLUMNS = ("path", "x", "y", "width", "height")
"""Of the table; a column `label` may stand beside them."""

_MARK = b"#"


class _Line(NamedTuple):
    picture: bytes
    key: bytes
    label: str | None


class BoxedSource:
    """The regions of another data set's pictures, in bytewise order of their keys.

    Args:
        source: of whole pictures.
        file: CSV with a header, one box a line: `path` is a picture's key; x and y are the corner
            at the top left, width and height the extent, in whole pixels of the upright picture.
            `label` is the class of the box; without that column it is the picture's.
    """

    def __init__(self, source: Source, file: Path) -> None:
        self._source = source
        self._file = file

    def listing(self) -> Listing:
        whole = self._source.listing()
        lines, labelled = self._lines()
        keys = np.array([line.key for line in lines], dtype=np.bytes_)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if twice := doubles(keys):
            shown = ", ".join(os.fsdecode(key) for key in twice)
            raise DataError(f"data.boxes={self._file} has some boxes more than once: {shown}.")
        pictures = np.array([lines[i].picture for i in order], dtype=np.bytes_)
        place = np.minimum(np.searchsorted(whole.keys, pictures), len(whole.keys) - 1)
        if (unknown := pictures[whole.keys[place] != pictures]).size:
            raise DataError(
                f"data.boxes={self._file} names {counted(len(np.unique(unknown)), 'image')} that "
                "the "
                f"data set does not have, such as {os.fsdecode(bytes(unknown[0]))}. A path is "
                "written "
                f"as the keys are, such as {os.fsdecode(bytes(whole.keys[0]))}."
            )
        labels, classes = whole.labels[place], whole.classes
        if labelled:
            labels, classes = from_names(lines[i].label for i in order)
        elif classes:  # pictures without a box take their class along
            labels, classes = renumbered(np.array(classes, dtype=object), labels)
        marks = None if whole.marks is None else whole.marks[place]
        columns = {name: values[place] for name, values in whole.columns.items()}
        return Listing(keys, labels, classes, whole.skipped, marks, columns)

    def read(self, key: bytes) -> bytes:
        return self._source.read(self.picture(key))

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Those of the pictures."""
        if not isinstance(self._source, Stateful):
            return None
        pictures, which = np.unique([self.picture(key) for key in keys], return_inverse=True)
        states = self._source.states(pictures)
        return None if states is None else states[which]

    def picture(self, key: bytes) -> bytes:
        """The key of the picture that a row is cut from."""
        return key.rpartition(_MARK)[0]

    def box(self, key: bytes) -> Box:
        """The region that is a row."""
        x, y, width, height = map(int, key.rpartition(_MARK)[2].split(b","))
        return Box(x, y, width, height)

    def _lines(self) -> tuple[list[_Line], bool]:
        """What the table says, and whether it has labels."""
        try:
            with self._file.open(
                newline="", encoding="utf-8-sig", errors="surrogateescape"
            ) as file:
                reader = csv.DictReader(file)
                names = reader.fieldnames or []
                if lacking := [name for name in COLUMNS if name not in names]:
                    raise DataError(
                        f"data.boxes={self._file} has no column {', '.join(lacking)}; expected a "
                        f"header with {', '.join(COLUMNS)} and, if there are labels, label."
                    )
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise DataError(
                        f"data.boxes={self._file} has the column {', '.join(twice)} more than once."
                    )
                lines = list(self._checked(reader))
        except (OSError, csv.Error) as error:
            raise DataError(f"data.boxes={self._file} cannot be read: {error}.") from error
        if not lines:
            raise DataError(f"data.boxes={self._file} has no boxes.")
        return lines, "label" in names

    def _checked(self, reader: csv.DictReader[str]) -> Iterator[_Line]:
        for line in reader:
            if None in line:
                raise DataError(
                    f"data.boxes={self._file}, line {reader.line_num}: there are more fields than "
                    "columns. A comma in a field needs quotes around it."
                )
            numbers = [str(line[name]).strip() for name in COLUMNS[1:]]
            whole = all(number.isascii() and number.isdecimal() for number in numbers)
            if not line["path"] or not whole or 0 in map(int, numbers[2:]):
                raise DataError(
                    f"data.boxes={self._file}, line {reader.line_num}: {','.join(numbers)} of "
                    f"{line['path']!r} is no box; expected x, y, width and height in whole pixels, "
                    "the last two above 0."
                )
            picture = os.fsencode(line["path"])
            yield _Line(picture, box_key(picture, *map(int, numbers)), line.get("label"))
