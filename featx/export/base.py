"""Base class of export formats; run.py does everything that is the same for all formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from featx.base import Member, Registry
from featx.config import Config, ExportConfig, Positive, options
from featx.errors import ConfigError, FeatxError
from featx.export.selection import ExportSelection


@dataclass(frozen=True)
class File:
    """One file of an export, which appears under its name when it is complete.

    Attributes:
        name: path below the folder of the export, with '/'.
        write: function that fills the open binary file.
        start: first row of the selection that the file holds.
        stop: row after the last one.
        reserved_bytes: largest size in bytes of a file that h5py writes, or None. HDF5 may crash
            when a disk is full, so the space is reserved first, and `write` gets a file object for
            h5py.
    """

    name: str
    write: Callable[[BinaryIO], object]
    start: int
    stop: int
    reserved_bytes: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Folder:
    """One folder of an export, for formats whose unit is a folder.

    Attributes:
        name: path below the folder of the export, with '/'.
        write: function that fills an empty folder, whose path it gets.
        start: first row of the selection that the folder holds.
        stop: row after the last one.
    """

    name: str
    write: Callable[[Path], object]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Format(ABC):
    """Files of one export format.

    Args:
        selection: rows and layers to export.
        config: config of the command; formats read its group `export` and, for images, `data`.

    Raises:
        FeatxError: a package is missing, or the format cannot hold these layers.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        self.selection = selection
        self.config = config

    @abstractmethod
    def files(self) -> Sequence[File | Folder]:
        """Return files and folders in the order of writing, always the same for the same rows."""

    @abstractmethod
    def opening(self, out: Path) -> str:
        """Return a few lines of Python code that open the export.

        Args:
            out: folder of the export.
        """

    @property
    def settings(self) -> dict[str, Any]:
        """Options of the format that change the content of its files, as JSON types."""
        return {}

    @property
    def num_bytes(self) -> int:
        """Approximate size of the export in bytes, which is compared with the free space."""
        return len(self.selection) * self.selection.row_bytes()


@options("export")
class ShardOptions(ExportConfig):
    """Options of a format that divides its rows into files of limited size."""

    shard_gib: Positive | None = None
    """Largest size of one file in GiB, 1 when not given; for webdataset it is estimated."""

    @property
    def shard_bytes(self) -> int:
        """The option `shard_gib` in bytes."""
        return int((1.0 if self.shard_gib is None else self.shard_gib) * (1 << 30))


class ShardedFormat(Format):
    """A format whose options are `ShardOptions`."""

    def shards(
        self, stem: str, ending: str, row_bytes: float, write: Callable[[BinaryIO, int, int], None]
    ) -> list[File]:
        """Divide the rows into shards of export.shard_gib, named stem-00000-of-00003.ending."""
        ranges = self.ranges(row_bytes)
        files = []
        for number, (start, stop) in enumerate(ranges):
            name = f"{stem}-{number:05d}-of-{len(ranges):05d}.{ending}"

            # Default arguments bind start and stop of this iteration.
            def fill(file: BinaryIO, start: int = start, stop: int = stop) -> None:
                write(file, start, stop)

            files.append(File(name, fill, start, stop))
        return files

    def ranges(self, row_bytes: float) -> list[tuple[int, int]]:
        """Return start and stop of shards of about export.shard_gib; at least one."""
        options = self.config.export
        if not isinstance(options, ShardOptions):
            raise FeatxError(f"export.format={options.format} was registered without ShardOptions.")
        num_rows = len(self.selection)
        each = max(1, int(options.shard_bytes / max(1.0, row_bytes)))
        return [(start, min(num_rows, start + each)) for start in range(0, num_rows, each)]


@dataclass(frozen=True, kw_only=True)
class FormatMember(Member):
    """An export format as it is registered.

    Attributes:
        make: makes the format for rows, layers and a config, usually the class itself. Its options
            are `ShardOptions` for a `ShardedFormat`, else None or a subclass of `ExportConfig`.
        holds_failed_rows: whether failed rows have a place in the format, with a status. Otherwise
            they are left out, and the command says how many.
    """

    make: Callable[[ExportSelection, Config], Format]
    holds_failed_rows: bool = True


FORMATS: Registry[FormatMember] = Registry("export.format", "featx.export", "featx.exports")
"""All export formats by their names."""


def literal(text: object) -> str:
    """Return a path or name as a Python string literal, such as "runs/photos"."""
    path = str(text)
    is_plain = path.isprintable() and '"' not in path and "\\" not in path
    return f'"{path}"' if is_plain else repr(path)


def refuse_maps(selection: ExportSelection, holding: str) -> None:
    """Check that every layer has one vector per row."""
    maps = [name for name in selection.layers if len(selection.row_shape(name)) != 1]
    if maps:
        raise ConfigError(
            f"{holding}; {', '.join(maps)} hold maps. Name the layers you want with layers=[...], "
            "or extract these with reduce=avg."
        )


def only_layer_of(selection: ExportSelection, option: str) -> str:
    """Return the layer of an export that has a single one."""
    if len(selection.layers) > 1:
        raise ConfigError(
            f"{option} holds one layer, and {len(selection.layers)} are selected: "
            f"{', '.join(selection.layers)}. Name one with layers=[...]."
        )
    return selection.layers[0]
