"""Source data=huggingface: a data set written by `datasets.Dataset.save_to_disk`, read in place."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featx.base import import_extra
from featx.config import options
from featx.errors import DataError, nearest
from featx.sources.base import FolderSource, of_other_paths, state_of_files, tag_of
from featx.sources.labels import Labels, choose_label_column, from_values, note_on_columns
from featx.sources.registry import SOURCES, ColumnOptions, source_member
from featx.sources.row_keys import numbered_keys, parse_numbered_key
from featx.types import ImageFault, Listing, Source, Status

_PREFIX = "row-"


@options("data")
class HuggingFaceOptions(ColumnOptions):
    """Options of data=huggingface."""

    root_help: ClassVar[str] = "data.root=DIR, the folder that save_to_disk wrote"

    name: str = "huggingface"
    split: str | None = None
    """Split that was saved; null takes the first."""


def open_source(config: HuggingFaceOptions) -> Source:
    """Open the data set below data.root, or its split data.split.

    Raises:
        DataError: the data set, split or column does not exist.
        MissingExtraError: the package datasets is not installed.
    """
    datasets = import_extra("datasets", "data=huggingface", "the package datasets", "huggingface")
    root = config.path
    try:
        dataset: Any = datasets.load_from_disk(str(root))
    except IndexError as error:  # its message is "list index out of range"
        raise DataError(
            f"data.root={root}: datasets cannot load a data set or a split that was saved without "
            "rows. Save it without this split."
        ) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"data.root={root} (taken from {Path.cwd()}) is no folder that save_to_disk wrote: "
            f"{str(error).rstrip('.')}."
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        split = config.split or next(iter(dataset))
        if split not in dataset:
            raise DataError(
                f"data.split={split}: {root} has {', '.join(dataset)}."
                f"{nearest(split, list(dataset))}"
            )
        dataset = dataset[split]
    elif config.split:
        raise DataError(f"data.split={config.split}: {root} holds one data set, no splits.")
    return HuggingFaceSource(dataset, root, config)


class HuggingFaceSource:
    """Rows of a `datasets.Dataset`; keys are 'row-000123', the position of the row."""

    def __init__(self, dataset: Any, root: Path, config: HuggingFaceOptions) -> None:
        from datasets import Image

        self._origin = str(root)
        self._column = _image_column(dataset, config.path_column, root)
        columns = list(dataset.features)
        self._label_column = choose_label_column(columns, config.label_column, self._origin)
        self._label_note = ""
        if config.label_column is None:
            others = [name for name in columns if name != self._column]
            self._label_note = note_on_columns(others, self._label_column)
        self._folder = FolderSource(root, config.follow_links)
        self._dataset = dataset.with_format(None)
        # decode=False returns the encoded bytes, which featx decodes itself.
        self._images = self._dataset.select_columns([self._column]).cast_column(
            self._column, Image(decode=False)
        )
        self._lock = threading.Lock()

    def listing(self) -> Listing:
        """List all rows; their content tag is a checksum of the data set's fingerprint."""
        count = len(self._dataset)
        if not count:
            raise DataError(f"data.root={self._origin} has no rows.")
        labels, classes, warnings = Labels.none(count)
        if self._label_column is not None:
            names = getattr(self._dataset.features[self._label_column], "names", None)
            values = list(self._dataset[self._label_column])
            origin = f"{self._origin}, column {self._label_column}"
            labels, classes, warnings = from_values(values, origin, names or None)
        # The fingerprint of the data set changes with every operation on it.
        tag = zlib.crc32(str(self._dataset._fingerprint).encode())
        content_tags = np.full(count, tag, dtype=np.int64)
        return Listing(
            numbered_keys(count, _PREFIX),
            labels,
            classes,
            content_tags=content_tags,
            warnings=warnings,
            label_note=self._label_note,
        )

    def read(self, key: bytes) -> bytes:
        """Read one encoded image, from the table or from the file that the row names."""
        with self._lock:
            value = self._images[parse_numbered_key(key, _PREFIX)][self._column]
        if not value or not (value.get("bytes") or value.get("path")):
            raise ImageFault(Status.EMPTY, "the row has no image")
        if data := value.get("bytes"):
            return bytes(data)
        return self._folder.read_inside(value["path"].encode())

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Stat the Arrow files of the data set, or the image's own file where a row is a path.

        Returns (n,) IMAGE_STATE.
        """
        files = [file["filename"] for file in self._dataset.cache_files]
        states = state_of_files(files, len(keys), tag_of(self._dataset._fingerprint))
        rows = np.array([parse_numbered_key(key, _PREFIX) for key in keys.tolist()])
        paths = self._paths(rows)
        own = np.flatnonzero([path is not None for path in paths])
        if len(own):
            found = [path for path in paths if path is not None]
            states[own] = of_other_paths(self._folder.states(np.array(found)), found)
        return states

    def _paths(self, rows: npt.NDArray[np.int64]) -> list[bytes | None]:
        """Return the path of each image that is a separate file, and None for images in the
        table."""
        import pyarrow.compute as pc

        # Flattening selects the field `path` alone, so image bytes are not copied.
        flat = self._images.flatten()
        column = flat.data.column(f"{self._column}.path")
        column = pc.if_else(pc.is_null(flat.data.column(f"{self._column}.bytes")), column, None)
        chosen = self._images._indices  # row numbers of a selection (Dataset.select), or None
        if chosen is not None:
            rows = chosen.column(0).to_numpy()[rows]
        found = column.take(rows).to_pylist()
        return [None if not path else path.encode() for path in found]


def _image_column(dataset: Any, name: str | None, root: Path) -> str:
    """Return data.path_column, or the only image column of the data set."""
    from datasets import Image

    images: list[str] = [
        column for column, kind in dataset.features.items() if isinstance(kind, Image)
    ]
    if name is None and len(images) == 1:
        return images[0]
    if name is not None and name in images:
        return name
    asked = "" if name is None else f"data.path_column={name}: "
    hint = "Choose one with data.path_column=NAME"
    if not images:
        hint = "cast_column(NAME, datasets.Image()) makes one of image bytes or paths"
    raise DataError(
        f"{asked}{root} has the columns {', '.join(dataset.features)}, of which "
        f"{', '.join(images) or 'none'} hold images. {hint}."
    )


SOURCES.register(
    source_member(
        "huggingface",
        "A data set that datasets.Dataset.save_to_disk wrote.",
        HuggingFaceOptions,
        open_source,
        extra="huggingface",
    )
)
