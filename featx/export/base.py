"""What a format has to write; the rest (run.py) is the same for all of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from featx.config.run_config import Config
from featx.export.selection import Selection


@dataclass(frozen=True)
class File:
    """One file of an export; it appears under its name when it is whole.

    Attributes:
        name: below the export's folder, with `/`.
        write: fills the open file; a format that makes folders gets the path of an empty one.
        start, stop: which rows of the selection it holds.
        is_folder: whether the name is that of a folder.
    """

    name: str
    write: Callable[[Any], None]
    start: int
    stop: int
    is_folder: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


class Format(ABC):
    """The files of one format.

    Args:
        selection: what is exported.
        config: of the command; formats look at `export` and, for pictures, at `data`.

    Raises:
        FeatxError: a package is missing, or the format cannot hold these layers.
    """

    def __init__(self, selection: Selection, config: Config) -> None:
        self.selection = selection
        self.config = config

    @abstractmethod
    def files(self) -> list[File]:
        """The files, in the order they are written; the same each time for the same rows."""

    @abstractmethod
    def opening(self, out: Path) -> str:
        """A few lines of Python that open the export."""

    @property
    def num_bytes(self) -> int:
        """About how many bytes will be written, to be compared with the room there is."""
        return len(self.selection) * self.selection.row_bytes()

    def shards(
        self, stem: str, ending: str, row_bytes: float, write: Callable[[BinaryIO, int, int], None]
    ) -> list[File]:
        """Files of about export.shard_gib: stem-00000-of-00003.ending.

        Args:
            stem: may have folders in front.
            ending: of the names, without the dot.
            row_bytes: of one row in the file.
            write: fills a file with rows [start, stop) of the selection.
        """
        num_rows = len(self.selection)
        each = max(1, int(self.config.export.shard_bytes / max(1.0, row_bytes)))
        count = max(1, math.ceil(num_rows / each))
        found = []
        for number in range(count):
            start, stop = number * each, min(num_rows, (number + 1) * each)
            name = f"{stem}-{number:05d}-of-{count:05d}.{ending}"

            def fill(file: BinaryIO, start: int = start, stop: int = stop) -> None:
                write(file, start, stop)

            found.append(File(name, fill, start, stop))
        return found


def literal(text: object) -> str:
    """A path or a name as a Python string literal, for `Format.opening`: "runs/photos"."""
    shown = str(text)
    plain = shown.isprintable() and '"' not in shown and "\\" not in shown
    return f'"{shown}"' if plain else repr(shown)


def missing_extra(name: str, extra: str, what: str) -> str:
    """The message where a format's package is not installed."""
    return f'{what} needs the package {name}: pip install "featx[{extra}]".'
