"""Rows that are views of the images of another source: data.views and data.crops, and data.boxes.

A key is the key of the image, '#', and the view: 'cat/001.jpg#hflip', 'cat/001.jpg#10,20,64,48'.
"""

from __future__ import annotations

import csv
import itertools
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import name_bytes, name_text
from featx.config import DataConfig, ViewName, names_tuple
from featx.errors import DataError, counted
from featx.sources.labels import find_column, from_encoded_texts, note_on_columns, renumber
from featx.sources.row_keys import box_key, find_rows, parse_box_key, sorting_order
from featx.sources.table_files import UNREADABLE, check_csv, open_csv
from featx.types import Box, BoxReader, Listing, RandomCrop, Source, Stateful, View, ViewSource

_SEPARATOR = b"#"
"""Separator between the key of the image and the view."""

_ORIENTATIONS: dict[ViewName, int] = {
    "original": 1,
    "hflip": 2,
    "rot180": 3,
    "vflip": 4,
    "transpose": 5,
    "rot270": 6,
    "transverse": 7,
    "rot90": 8,
}
"""View -> EXIF orientation from which an image is turned so."""

BOX_COLUMNS = ("path", "x", "y", "width", "height")
"""Required columns of the table data.boxes. A column `label` is optional."""

_FROM_COCO = (
    'python -c "import csv, json, sys; d = json.load(open(sys.argv[1])); '
    "f = {i['id']: i['file_name'] for i in d['images']}; "
    "n = {c['id']: c['name'] for c in d['categories']}; "
    "b = {(f[a['image_id']], *map(round, a['bbox'][:2]), *(round(s) or 1 for s in a['bbox'][2:]), "
    "n[a['category_id']]) for a in d['annotations']}; "
    "csv.writer(sys.stdout).writerows([('path', 'x', 'y', 'width', 'height', 'label'), *sorted(b)])"
    '"'
)
"""Command that writes the table of a file such as COCO's instances_val2017.json."""

_PIXELS = re.compile(r"[0-9]{1,18}")
"""Number of pixels in the table."""

_BATCH_LINES = 1 << 13
"""Lines of the table that are objects of Python at a time."""

_NAMED_LINES = 10
"""Maximum number of wrong lines that an error describes."""


class DerivedSource(ABC):
    """Source whose rows are made of the rows of another source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # Once: isinstance with a protocol takes 30 us, for each of a million keys.
        self._views = source if isinstance(source, ViewSource) else None

    @property
    def reads_in_decoders(self) -> bool:
        """Whether decoders read the images."""
        return getattr(self._source, "reads_in_decoders", False)

    @abstractmethod
    def listing(self) -> Listing:
        """List all rows."""

    @abstractmethod
    def view(self, key: bytes) -> View:
        """View of the image that a row is."""

    def read(self, key: bytes) -> bytes:
        """Read the encoded image that a row shows. Raises as `Source.read` does."""
        return self._source.read(parent_key(key))

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Return the states of the images that rows show, or None if the source has none."""
        if not isinstance(self._source, Stateful):
            return None
        parents, which = np.unique([parent_key(key) for key in keys], return_inverse=True)
        states = self._source.states(parents)
        return None if states is None else states[which]

    def image_key(self, key: bytes) -> bytes:
        """Return the key of the image that a row shows."""
        parent = parent_key(key)
        return parent if self._views is None else self._views.image_key(parent)


class ViewedSource(DerivedSource):
    """Several views of each row of another source, which are whole images or boxes."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        super().__init__(source)
        crops = [f"crop{number}" for number in range(1, (config.crops or 0) + 1)]
        self._names = [name.encode() for name in (*names_tuple(config.views), *crops)]
        self._scale, self._ratio = config.crop_bounds

    def listing(self) -> Listing:
        """List the views of all rows; each has the label and the columns of its row."""
        rows = self._source.listing()
        endings = np.array([_SEPARATOR + name for name in self._names])
        keys = np.char.add(rows.keys[:, None], endings).ravel()
        order = sorting_order(keys, "the data set has some views")
        return replace(rows.take(order // len(self._names)), keys=keys[order])

    def view(self, key: bytes) -> View:
        """View of the image that a row is; a random crop is decided by the key."""
        name = key.rpartition(_SEPARATOR)[2].decode()
        parent = View()
        if self._views is not None:
            parent = self._views.view(parent_key(key))
        if name in _ORIENTATIONS:
            return parent._replace(orientation=_ORIENTATIONS[name])
        seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        return parent._replace(crop=RandomCrop(seed, self._scale, self._ratio))


def parent_key(key: bytes) -> bytes:
    """Return the key of the row of the other source from which a row is made."""
    return key.rpartition(_SEPARATOR)[0]


_Line = tuple[bytes, bytes, str | None]
"""A line of the table: key of the image, key of the row, and label."""


class BoxedSource(DerivedSource):
    """Boxes of the images of another source, in bytewise order of their keys."""

    def __init__(self, source: Source, file: Path) -> None:
        super().__init__(source)
        self._file = file
        self._label_note = ""

    def listing(self) -> Listing:
        """List all boxes."""
        images = self._source.listing()
        batches: list[tuple[npt.NDArray[Any], ...]] = []
        texts: dict[str | None, int] = {}
        unknown: set[bytes] = set()
        all_lines = self._lines()
        # Objects of Python for every line would take several times the memory of the listing.
        while lines := list(itertools.islice(all_lines, _BATCH_LINES)):
            image_keys = np.array([image_key for image_key, _, _ in lines], dtype=np.bytes_)
            # A key that is not there has any place, which is clipped to be one of an image; the
            # comparison finds it.
            places = np.minimum(find_rows(images.keys, image_keys), len(images.keys) - 1)
            unknown.update(image_keys[images.keys[places] != image_keys].tolist())
            codes = np.array([texts.setdefault(label, len(texts)) for _, _, label in lines])
            batches.append((np.array([key for _, key, _ in lines], np.bytes_), places, codes))
        if unknown:
            raise DataError(
                f"data.boxes={self._file} names {counted(len(unknown), 'image')} that the data set "
                f"does not have, such as {name_text(min(unknown))}. A path is written as the keys "
                f"are, such as {name_text(bytes(images.keys[0]))}, with / for the backslashes of "
                "Windows."
            )
        keys, positions, codes = (np.concatenate(each) for each in zip(*batches, strict=True))
        order = sorting_order(keys, f"data.boxes={self._file} has some boxes")
        keys, positions = keys[order], positions[order]
        labels, classes, warnings = images.labels[positions], images.classes, images.warnings
        label_note = self._label_note or images.label_note
        if None not in texts:
            origin = f"data.boxes={self._file}, column label"
            labels, classes, more = from_encoded_texts([*map(str, texts)], codes, origin)
            labels, warnings, label_note = labels[order], (*warnings, *more), ""
        elif classes:  # images without a box must not leave their class behind
            labels, classes, _ = renumber(np.array(classes, dtype=object), labels)
        content_tags = None if images.content_tags is None else images.content_tags[positions]
        columns = {name: values[positions] for name, values in images.columns.items()}
        return Listing(
            keys,
            labels,
            classes,
            images.skipped,
            content_tags,
            columns,
            warnings,
            label_note,
        )

    def view(self, key: bytes) -> View:
        """Return the box that a row consists of, in pixels of the upright image."""
        return View(_box_of(key))

    def _lines(self) -> Iterator[_Line]:
        """Read the table line by line; `label` is None if it has no such column."""
        if self._file.suffix.lower() == ".json":
            raise DataError(
                f"data.boxes={self._file} is JSON; expected CSV with {', '.join(BOX_COLUMNS)} and, "
                "if there are labels, label. For annotations as those of COCO this command writes "
                f"it, in whole pixels:\n{_FROM_COCO} {shlex.quote(str(self._file))} > boxes.csv"
            )
        try:
            delimiter = check_csv(self._file)
            with open_csv(self._file, "utf-8-sig") as file:
                reader = csv.reader(file, delimiter=delimiter)
                names = next(reader, [])
                for wanted in (*BOX_COLUMNS, "label"):
                    if (name := find_column(names, wanted)) is not None:
                        names[names.index(name)] = wanted
                others = [name for name in names if name not in BOX_COLUMNS]
                note = note_on_columns(others, find_column(names, "label"), option="")
                is_hint = "like labels" in note
                self._label_note = f"data.boxes={self._file}: {note}" if is_hint else ""
                if missing := [name for name in BOX_COLUMNS if name not in names]:
                    raise DataError(
                        f"data.boxes={self._file} has no column {', '.join(missing)}; expected a "
                        f"header with {', '.join(BOX_COLUMNS)} and, if there are labels, label."
                    )
                if duplicates := [
                    name for name in (*BOX_COLUMNS, "label") if names.count(name) > 1
                ]:
                    raise DataError(
                        f"data.boxes={self._file} has the column {', '.join(duplicates)} more than "
                        "once."
                    )
                line = None
                for line in self._convert_lines(reader, names):
                    yield line
        except csv.Error as error:
            number = reader.line_num
            raise DataError(f"data.boxes={self._file}, line {number}: {error}.") from error
        except UNREADABLE as error:
            raise DataError(f"data.boxes={self._file} cannot be read: {error}.") from error
        if line is None:
            raise DataError(f"data.boxes={self._file} has no boxes.")

    def _convert_lines(self, reader: Any, names: list[str]) -> Iterator[_Line]:
        """Convert the lines of the table one by one; errors of all lines are one error."""
        problems: list[str] = []
        columns = [names.index(name) for name in BOX_COLUMNS]
        label_column = names.index("label") if "label" in names else None
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                number = "more" if len(cells) > len(names) else "fewer"
                problems.append(
                    f"line {reader.line_num}: there are {number} fields than columns. A delimiter "
                    "in a field needs quotes; a field may be empty."
                )
                continue
            path, *numbers = (cells[column] for column in columns)
            # pandas writes a column of floats as 128.0.
            numbers = [number.strip().removesuffix(".0") for number in numbers]
            are_whole_numbers = all(_PIXELS.fullmatch(number) for number in numbers)
            is_path = path and "\0" not in path
            if not is_path or not are_whole_numbers or 0 in map(int, numbers[2:]):
                problems.append(
                    f"line {reader.line_num}: {','.join(numbers)} of {path!r} is no box; "
                    "expected x, y, width and height in whole pixels, the last two above 0."
                )
                continue
            image_key = name_bytes(path)
            label = None if label_column is None else cells[label_column]
            yield image_key, box_key(image_key, *map(int, numbers)), label
        if len(problems) == 1:
            raise DataError(f"data.boxes={self._file}, {problems[0]}")
        if problems:
            more = len(problems) - _NAMED_LINES
            shown = [*problems[:_NAMED_LINES], *([f"and {more} more"] if more > 0 else [])]
            raise DataError(
                f"data.boxes={self._file}: {len(problems)} lines are wrong.\n" + "\n".join(shown)
            )


class ReadBoxes:
    """Boxes that their source reads one by one, so that each row is an image of its own."""

    def __init__(self, boxed: BoxedSource, reader: BoxReader) -> None:
        self._reader = reader
        self.listing = boxed.listing
        self.states = boxed.states

    def read(self, key: bytes) -> bytes:
        """Read the box of a row as an encoded image. Raises as `Source.read` does."""
        return self._reader.read_box(parent_key(key), _box_of(key))


def _box_of(key: bytes) -> Box:
    """Return the box that the key of a row names."""
    parsed = parse_box_key(key)
    assert parsed is not None  # such keys are made by `listing` only
    return parsed[1]
