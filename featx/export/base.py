"""Base class of export formats; run.py does everything that is the same for all formats."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import h5py

from featx.base import Member, Registry
from featx.config import Config, ExportConfig, Positive, options
from featx.errors import ConfigError, FeatxError
from featx.export.selection import ExportSelection
from featx.storage import AtomicFolder

OptionsT = TypeVar("OptionsT", bound=ExportConfig)


class ExportFolder:
    """Folder, empty at first, in which a format writes its files, which get their final names
    together at the end. `names` are those of the files and folders so far.
    """

    def __init__(self, root: Path) -> None:
        self.names: list[str] = []
        self._disk = AtomicFolder(root)

    def file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """File of any size at a path below the folder, with '/', that the block fills from start to
        end.
        """
        # No other process writes to this folder, so there is nothing that one has left.
        return self._disk.stream_file(self._path(name), has_lock=True)

    @contextlib.contextmanager
    def hdf5_file(
        self, name: str, most_bytes: int, libver: tuple[str, str] | None = None
    ) -> Iterator[h5py.File]:
        """Empty HDF5 file of at most `most_bytes` at a path below the folder, with '/'. Its space
        is reserved first, because HDF5 may crash on a full disk.
        """
        with (
            self._disk.reserve_file(self._path(name), most_bytes) as reserved,
            h5py.File(reserved, "w", libver=libver) as file,
        ):
            yield file

    def folder(self, name: str) -> AbstractContextManager[Path]:
        """Empty folder, which the block fills; it counts as one file of the export."""
        return self._disk.fill_folder(self._path(name))

    def _path(self, name: str) -> Path:
        path = self._disk.root / name
        self._disk.make_folder(path.parent)
        self.names.append(name)
        return path


class Format(ABC):
    """Files of one export format. Formats read the group `export` of the config and, for images,
    `data`. Raises FeatxError if a package is missing, or the format cannot hold these layers.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        self.selection = selection
        self.config = config

    def own_options(self, kind: type[OptionsT]) -> OptionsT:
        """Return the options of the format, which it was registered with."""
        options = self.config.export
        if not isinstance(options, kind):
            raise FeatxError(
                f"export.format={options.format} was registered without {kind.__name__}."
            )
        return options

    @abstractmethod
    def write(self, folder: ExportFolder) -> None:
        """Write all files, the same for the same rows and options."""

    @abstractmethod
    def opening(self, out: Path) -> str:
        """Return a few lines of Python code that open the export in the folder `out`."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Description of the contents as JSON types, equal for two exports with the same files."""
        return self.selection.fingerprint

    @property
    def num_bytes(self) -> int:
        """Approximate size of the export in bytes, which is compared with the free space."""
        return len(self.selection) * self.selection.row_bytes()


@options("export")
class ShardOptions(ExportConfig):
    """Options of a format that divides its rows into files of limited size."""

    shard_gib: Positive | None = None
    """Largest size of one file in GiB, 1 when not given; for webdataset it is estimated."""


class ShardedFormat(Format):
    """A format whose options are `ShardOptions`."""

    def shards(self, row_bytes: float, name: str = "{}") -> list[tuple[str, int, int]]:
        """Divide the rows of about `row_bytes` into shards of about export.shard_gib; there is at
        least one. Return the name of each, such as 'data-00000-of-00003.parquet' for
        'data-{}.parquet', its first row of the selection and the row after its last one.
        """
        num_rows = len(self.selection)
        shard_bytes = int((self.own_options(ShardOptions).shard_gib or 1.0) * (1 << 30))
        each = max(1, int(shard_bytes / max(1.0, row_bytes)))
        starts = range(0, num_rows, each)
        # Readers sort the names.
        width = max(5, len(str(len(starts))))
        of = f"{len(starts):0{width}d}"
        return [
            (name.format(f"{i:0{width}d}-of-{of}"), start, min(num_rows, start + each))
            for i, start in enumerate(starts)
        ]


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
    vectors = _vectors(selection)
    maps = [name for name in selection.layers if name not in vectors]
    if maps:
        leave = f"'layers=[{','.join(vectors)}]' leaves them out; or extract"
        advice = leave if vectors else "Extract"
        raise ConfigError(
            f"{holding}; rows of {', '.join(maps)} are maps, tokens or single numbers. "
            f"{advice} maps and tokens with reduce=avg."
        )


def only_layer_of(selection: ExportSelection, option: str) -> str:
    """Return the layer of an export that has a single one."""
    if len(selection.layers) > 1:
        raise ConfigError(
            f"{option} holds one layer, and {len(selection.layers)} are selected: "
            f"{', '.join(selection.layers)}. Name one, such as "
            f"'layers=[{(_vectors(selection) or selection.layers)[0]}]'."
        )
    return selection.layers[0]


def _vectors(selection: ExportSelection) -> list[str]:
    return [name for name in selection.layers if len(selection.row_shape(name)) == 1]
