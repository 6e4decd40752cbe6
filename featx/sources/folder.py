"""Source data=folder: image files below a folder."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from featx.config import NaturalNumber, options
from featx.errors import DataError, counted
from featx.sources.base import FolderSource, endings
from featx.sources.labels import from_values
from featx.sources.registry import SOURCES, FileOptions, source_member
from featx.sources.table_files import UNREADABLE, check_csv
from featx.types import Listing, Source


@options("data")
class FolderOptions(FileOptions):
    """Options of data=folder."""

    root_help: ClassVar[str] = "data.root=DIR, the folder of your images"

    name: str = "folder"
    depth: NaturalNumber | None = None
    """Largest number of folders between data.root and an image: 0 takes images in data.root itself,
    1 also those in class folders; null takes every depth."""
    classes: str | None = None
    """JSON or CSV file that maps folder names to class names or numbers."""


def open_source(config: FolderOptions) -> Source:
    """Open the folder data.root, in which '~' is expanded."""
    folder = FolderSource(
        config.path, config.follow_links, endings(config.extensions), config.depth
    )
    if config.classes is None:
        return folder
    return _Relabelled(folder, Path(config.classes).expanduser())


class _Relabelled:
    """A folder whose classes are renamed by a file (option data.classes)."""

    reads_in_decoders = True

    def __init__(self, folder: FolderSource, file: Path) -> None:
        self._folder = folder
        self._names = read_class_map(file)
        self._file = file
        self.read = folder.read
        self.states = folder.states

    def listing(self) -> Listing:
        listing, origin = self._folder.listing(), f"data.classes={self._file}"
        unknown = [name for name in listing.classes if name not in self._names]
        if unknown:
            raise DataError(
                f"{origin} has no class for {counted(len(unknown), 'folder')} of the data set, "
                f"such as {', '.join(unknown[:5])}."
            )
        names = [self._names[name] for name in listing.classes]
        values, classes, warnings = from_values(names, origin)
        table = np.append(values, -1)  # label -1 (no folder) selects the last entry
        warnings = (*listing.warnings, *warnings)
        return replace(listing, labels=table[listing.labels], classes=classes, warnings=warnings)


def read_class_map(file: Path) -> dict[str, str | int]:
    """Read a file that maps folder names to class names or numbers.

    JSON: one object. CSV: two columns without a header, the folder and the class. Class names that
    are all whole numbers become numbers.
    """
    is_json = file.suffix.lower() == ".json"
    try:
        delimiter = "" if is_json else check_csv(file)
        text = file.read_text(encoding="utf-8-sig")
    except UNREADABLE as error:
        raise DataError(f"data.classes={file} cannot be read as text: {error}.") from error
    pairs = _from_json(file, text) if is_json else _from_csv(file, text, delimiter)
    names = dict(pairs)
    if len(names) < len(pairs):
        folders = [folder for folder, _ in pairs]
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise DataError(f"data.classes={file} has two classes for the folder {twice}.")
    if all(isinstance(value, str) and value.isdecimal() for value in names.values()):
        return {folder: int(value) for folder, value in names.items()}
    return names


def _from_json(file: Path, text: str) -> list[tuple[str, str | int]]:
    """Parse a JSON object into pairs, which keep a repeated folder, so that it can be reported."""
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except ValueError as error:
        raise DataError(f"data.classes={file} is no JSON: {error}.") from error
    if not (
        isinstance(pairs, list)
        and all(isinstance(pair, tuple) and isinstance(pair[1], str | int) for pair in pairs)
    ):
        raise DataError(
            f"data.classes={file}: expected one object, such as "
            '{"n01440764": "tench"} or {"n01440764": 0}.'
        )
    return pairs


def _from_csv(file: Path, text: str, delimiter: str) -> list[tuple[str, str | int]]:
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
    for line in rows:
        if len(line) != 2:
            raise DataError(
                f"data.classes={file}: {','.join(line)!r} has {len(line)} columns; expected two, "
                "the folder and its class."
            )
    return [(folder, name.strip()) for folder, name in rows]


SOURCES.register(
    source_member(
        "folder",
        "Image files below a folder; the first sub-folder is the label.",
        FolderOptions,
        open_source,
    )
)
