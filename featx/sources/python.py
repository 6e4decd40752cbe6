"""Data sets that a Python program passes as objects: `featx.extract(data=dataset)`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.base import import_extra, name_bytes
from featx.config import OBJECT_SOURCE, DataConfig, column_name_problem, options
from featx.errors import ConfigError, DataError, counted, first_names
from featx.sources.base import FolderSource, of_other_paths
from featx.sources.labels import (
    Labels,
    existing_column,
    find_column,
    from_values,
    note_on_columns,
)
from featx.sources.listing_checks import check_listing
from featx.sources.pixel_encoding import encode_array, encode_image
from featx.sources.registry import SOURCES, source_member
from featx.sources.row_keys import find_row, find_rows, numbered_keys, sorting_order
from featx.sources.table_columns import column_values
from featx.types import (
    IMAGE_STATE,
    UNTOLD,
    Array,
    ImageFault,
    Listing,
    Source,
    Stateful,
    Status,
    image_checksum,
)

_ORIGIN = "labels of the data set"

_FRAMES = ("pandas", "polars", "pyarrow")
"""Packages of tables."""

_FILES = FolderSource(Path("/"))
"""Reader of files at any path: the paths come from the user's own code, so they are not
restricted."""


def open_source(config: ObjectOptions) -> Source:
    """Raise a DataError that says how to pass a data set: a config cannot contain the object."""
    raise DataError(
        "data=python stands for a data set that is a Python object, so only a Python program can "
        "open it: featx.extract(data=dataset, ...)."
    )


@options("data")
class ObjectOptions(DataConfig):
    """Options of a data set that is a Python object."""

    name: str = OBJECT_SOURCE
    columns: list[str] | None = None
    """Further columns, such as [patient,slide], that the store carries for each row; null takes
    none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None and (problem := column_name_problem(self.columns)):
            raise ConfigError(f"data.columns: {problem}")


def source_of(data: object, config: DataConfig | None = None) -> Source:
    """Turn a data set object of a Python program into a Source.

    Args:
        data: a Source, which is checked but otherwise used as it is, or a map-style data set
            (`__len__` and `__getitem__`), which is wrapped.
        config: options of the group `data`, whose columns are taken from a table.

    Raises:
        DataError: the object is neither, or has no such columns.
    """
    if isinstance(data, type):
        raise DataError(f"data is the class {data.__name__}; give one object of it.")
    names = (config.columns or []) if isinstance(config, ObjectOptions) else []
    if _is_of_table(data) and hasattr(type(data), "collect"):  # a LazyFrame of Polars
        try:
            data = data.collect()  # type: ignore[attr-defined]
        except Exception as error:  # of the user's own query
            raise DataError(
                f"data is a LazyFrame, and its collect() failed: {type(error).__name__}: {error}. "
                "Correct its query, or give what .collect() returns."
            ) from error
    is_frame = _is_of_table(data) and _has_columns(data)
    if names and not is_frame:
        raise DataError(
            f"data.columns names columns of a table, and data is a {type(data).__name__}. Give a "
            "DataFrame, or a source whose listing has columns."
        )
    if isinstance(data, Source):
        return _CheckedSource(data)
    if isinstance(data, str | bytes | os.PathLike):
        raise DataError(
            f"the data set is {os.fspath(data)!r}, a path, and expected is an object. A path is an "
            "option: data={'name': 'folder', 'root': PATH}, or only data=PATH."
        )
    if is_frame:
        note = _note_on(_names_of_frame(data))
        return MapSource(_rows_of_frame(data), True, _columns_of_frame(data, names), note)
    shape = tuple(getattr(data, "shape", ()))
    if len(shape) == 3 and shape[2] in (3, 4):
        raise DataError(
            f"data is an array {shape}, which looks like one image: give [data], or list(data) if "
            f"it holds {counted(shape[0], 'image')} (H, W) of grey."
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not _is_stream(data):
        # The index of a column of pandas need not count its rows.
        column = list_of_column(data)
        return MapSource(data if column is None else column, paths_are_keys=True)
    hint = " Give list(data), if its items fit into memory." if hasattr(data, "__iter__") else ""
    hint = " Give its .dataset." if hasattr(data, "dataset") else hint  # a DataLoader
    raise DataError(
        f"data is a {type(data).__name__}; expected a path, a mapping, a data set with __len__ "
        f"and __getitem__ (a list will do), or an object with listing() and read(key).{hint}"
    )


def list_of_column(data: object) -> list[Any] | None:
    """Return a column of a table of pandas, Polars or Arrow as a list, whose missing values are
    None. Return None if `data` is no such column.
    """
    return _list_of(data) if _is_of_table(data) and not _has_columns(data) else None


def _is_of_table(data: object) -> bool:
    """Return whether an object is a table of pandas, Polars or Arrow, or a column of one."""
    # A GeoDataFrame is one of pandas.
    return any(kind.__module__.partition(".")[0] in _FRAMES for kind in type(data).__mro__)


def _has_columns(table: object) -> bool:
    return hasattr(table, "columns") or hasattr(table, "column_names")


def _is_stream(data: object) -> bool:
    """Return whether a data set of torch can only be iterated over."""
    library = sys.modules.get("torch.utils.data")
    if library is None:
        return False
    # This __getitem__ only raises an exception.
    return getattr(type(data), "__getitem__", None) is library.Dataset.__getitem__


def _rows_of_frame(frame: Any) -> list[object]:
    """Return the paths of a table of pandas, Polars or Arrow, with their labels if it has some."""
    names = _names_of_frame(frame)
    column = find_column(names, "path") or find_column(names, "image")
    if column is None:
        raise DataError(
            f"data has no column path or image; it has {', '.join(names)}. Rename the column of "
            "the paths, or give a list of them."
        )
    paths = _column_of_frame(frame, column)
    is_path = [isinstance(path, str | os.PathLike) and path != "" for path in paths]
    bad = [row for row, is_given in enumerate(is_path) if not is_given]
    if bad:
        first = ", ".join(map(str, bad[:5])) + (", ..." if bad[5:] else "")
        raise DataError(
            f"data has {counted(len(bad), 'row')} without a path: {first}, column {column}. Images "
            "themselves are given as a list, of (image, label) if there are labels."
        )
    label = find_column(names, "label")
    if label is None:
        return paths
    return list(zip(paths, _column_of_frame(frame, label), strict=True))


def _names_of_frame(frame: Any) -> list[str]:
    """Return the names of the columns of a table."""
    return [str(name) for name in getattr(frame, "column_names", None) or frame.columns]


def _column_of_frame(frame: Any, name: str) -> list[Any]:
    """Return a column of a table as a list."""
    columns = list(getattr(frame, "column_names", None) or frame.columns)
    named = [column for column in columns if str(column) == name]
    if len(named) > 1:
        raise DataError(f"data has two columns of the same name: {', '.join(map(str, columns))}.")
    return _list_of(frame[named[0]])


def _columns_of_frame(frame: Any, names: Sequence[str]) -> dict[str, Array]:
    """Return columns of a table as those of a listing, in the order of their names."""
    columns, names_of_frame = {}, _names_of_frame(frame)
    for name in sorted(names):
        pyarrow = import_extra("pyarrow", "data.columns of a DataFrame", "pyarrow", "table")
        existing_column("data", "data.columns", name, names_of_frame)
        try:
            values = pyarrow.array(_column_of_frame(frame, name))
        except (pyarrow.ArrowException, OverflowError) as error:
            raise DataError(
                f"data, column {name} is not of one type that a store can hold ({error}). Write it "
                "as text, or leave it out of data.columns."
            ) from error
        columns[name] = column_values(pyarrow.chunked_array([values]), f"data, column {name}")
    return columns


def _list_of(column: Any) -> list[Any]:
    """Return a column of a table of pandas, Polars or Arrow as a list; missing values are None."""
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, method):
            values = getattr(column, method)()
            if hasattr(column, "isna"):  # of pandas, whose NA is neither None nor comparable
                are_missing = column.isna()
            else:
                are_missing = [isinstance(value, float) and value != value for value in values]
            return [None if m else v for v, m in zip(values, are_missing, strict=True)]
    return list(column)


class MapSource:
    """A map-style data set whose items are (image, label), a mapping with the keys image and
    perhaps label, or an image alone.

    An image is a Pillow image, an array as for `encode_array`, encoded bytes, or the path of a
    file. Labels come from `dataset.targets`, else from `dataset.labels`, else from every item,
    which is then read once before the run (only the first item if it has no label), and their names
    from `dataset.classes`, else from `dataset.features` of Hugging Face. Keys are `dataset.keys` if
    that is a list of str or bytes, else row numbers; of a list of different paths they are the
    paths, if `paths_are_keys`.

    Items are read one at a time, whatever the number of reading threads: data sets made for worker
    processes are often not thread-safe.
    """

    def __init__(
        self,
        dataset: Any,
        paths_are_keys: bool = False,
        columns: Mapping[str, Array] = MappingProxyType({}),
        label_note: str = "no attribute targets or labels, and items without a label",
    ) -> None:
        self._dataset = dataset
        features = getattr(dataset, "features", None)  # types of columns, in Hugging Face's
        self._label_note = _note_on(features) if isinstance(features, Mapping) else label_note
        self._paths_are_keys = paths_are_keys
        self._columns = dict(columns)
        self._lock = threading.RLock()
        self._listed: tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]] | None = None
        self._labels: list[object] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state for another process without the lock, which cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the state with a new lock."""
        vars(self).update(state, _lock=threading.RLock())

    def listing(self) -> Listing:
        """List the rows in bytewise order of their keys."""
        count = len(self._dataset)
        if not count:
            raise DataError("the data set has no rows: len(dataset) is 0.")
        keys = self._keys_of(count)
        labels, classes, warnings = self._labels_of(count)
        order = sorting_order(keys, "dataset.keys has some")
        self._listed = keys[order], order
        note = "" if classes else self._label_note
        columns = {name: values[order] for name, values in self._columns.items()}
        return Listing(
            keys[order], labels[order], classes, columns=columns, warnings=warnings, label_note=note
        )

    def read(self, key: bytes) -> bytes:
        """Read one item and encode its image without loss."""
        keys, rows = self._keys_and_rows()
        row = int(rows[find_row(keys, key)])
        # The user's own code may raise anything; it is recorded as a failure of this row.
        try:
            with self._lock:
                image, label = _split(self._dataset[row])
                if self._labels is not None and not _same(self._labels[row], label):
                    raise ImageFault(
                        Status.DECODE_ERROR,
                        f"dataset[{row}] has label {label}, but {self._labels[row]} when listed",
                        "LabelMismatch",
                    )
                encoded = _encode(image)
        except (ImageFault, MemoryError):
            raise
        except Exception as error:
            raise ImageFault.of(error) from error
        if isinstance(encoded, Path):
            return _FILES.read(_absolute(encoded))
        if not encoded:
            raise ImageFault(Status.EMPTY, "the image has no bytes")
        return encoded

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Return states of a list, tuple, array or tensor; other data sets have none.

        The state of a path is that of its file, the state of any other item a checksum of its
        encoded image.

        Returns (n,) IMAGE_STATE. None for other data sets, since only `__getitem__` knows where an
        item comes from and what reading it costs.
        """
        torch = sys.modules.get("torch")  # without it there is no tensor
        in_memory = (list, tuple, np.ndarray, *([torch.Tensor] if torch else []))
        if not isinstance(self._dataset, in_memory):
            return None
        listed, rows = self._keys_and_rows()
        states = np.full(len(keys), UNTOLD)
        paths: dict[int, bytes] = {}
        for i, row in enumerate(rows[find_rows(listed, keys)].tolist()):
            try:
                encoded = _encode(_split(self._dataset[row])[0])
            except MemoryError:
                raise
            # The item is not an image. Reading the row records the failure. Here its message takes
            # the place of an image, so that the state changes when the message does.
            except Exception as error:  # noqa: BLE001 - the user's own code
                encoded = repr(error).encode()
            if isinstance(encoded, Path):
                paths[i] = _absolute(encoded)
            else:
                states["size"][i], states["tag"][i] = len(encoded), image_checksum(encoded) >> 1
        if paths:
            files = _FILES.states(np.array(list(paths.values())))
            states[list(paths)] = of_other_paths(files, paths.values())
        return states

    def place(self, key: bytes) -> str:
        """Return the path of a row."""
        keys, rows = self._keys_and_rows()
        row = int(rows[find_row(keys, key)])
        return str(Path(_split(self._dataset[row])[0]).absolute())

    def _keys_and_rows(self) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]]:
        """Return the keys of the listing, and the row of the data set of each."""
        with self._lock:
            if self._listed is None:
                self.listing()
            assert self._listed is not None
            return self._listed

    def _keys_of(self, count: int) -> npt.NDArray[np.bytes_]:
        """Return (count,) keys: `dataset.keys` if present, else row numbers."""
        keys_attribute = getattr(self._dataset, "keys", None)
        if keys_attribute is None or callable(keys_attribute):  # callable: the method of a mapping
            return self._path_keys() if self._paths_are_keys else numbered_keys(count)
        try:
            keys = [name_bytes(key) for key in keys_attribute]
        except (TypeError, UnicodeEncodeError) as error:
            raise DataError(
                f"dataset.keys is {keys_attribute!r:.100}: expected a list of str or bytes, one "
                f"for each row, or no attribute of this name ({error})."
            ) from error
        if len(keys) != count or any(not key or b"\0" in key for key in keys):
            raise DataError(
                f"dataset.keys has {len(keys)} entries of a data set of {count} rows; expected one "
                "for each, not empty and without NUL."
            )
        return np.array(keys, dtype=np.bytes_)

    def _path_keys(self) -> npt.NDArray[np.bytes_]:
        """Return the paths of a list of different paths as keys, else row numbers.

        Row numbers, too, if one of the paths cannot be that of a file.
        """
        numbers = numbered_keys(len(self._dataset))
        if not isinstance(self._dataset, list | tuple):
            return numbers
        items = [
            each[0] if isinstance(each, tuple | list) and each else each for each in self._dataset
        ]
        if not all(isinstance(item, str | os.PathLike) for item in items):
            return numbers
        try:
            keys = {os.fsencode(item): None for item in items}
        except UnicodeEncodeError:
            return numbers
        are_names = len(keys) == len(items) and all(key and b"\0" not in key for key in keys)
        return np.array(list(keys), dtype=np.bytes_) if are_names else numbers

    def _labels_of(self, count: int) -> Labels:
        """Return labels and class names from the attributes of the data set, or from its items."""
        for name in ("targets", "labels"):
            values = getattr(self._dataset, name, None)
            if values is not None and not callable(values):
                values = values.tolist() if hasattr(values, "tolist") else values
                values = [*map(_label, values)]
                if len(values) != count:
                    raise DataError(
                        f"dataset.{name} has {len(values)} entries, the data set {count} rows."
                    )
                break
        else:
            values = self._labels_of_column() or self._labels_of_items(count)
        self._labels = values
        names: Any = getattr(self._dataset, "classes", None)
        features = getattr(self._dataset, "features", None)  # types of columns, in Hugging Face's
        if names is None and isinstance(features, Mapping):
            names = getattr(features.get(find_column(features, "label")), "names", None)
        names = names.tolist() if hasattr(names, "tolist") else names
        if not isinstance(names, list | tuple):
            return from_values(values, _ORIGIN)
        # torchvision's ImageNet has a tuple of synonyms for each class.
        names = [", ".join(map(str, n)) if isinstance(n, list | tuple) else n for n in names]
        return from_values(values, _ORIGIN, names)

    def _labels_of_column(self) -> list[object] | None:
        """Return the column of labels of a data set of Hugging Face, whose items would be read with
        their images; None for others, and with a transform, which may make the labels.
        """
        form = getattr(self._dataset, "format", None)
        if not isinstance(form, Mapping) or form.get("type") == "custom":
            return None
        image, column = (find_column(form.get("columns", ()), name) for name in ("image", "label"))
        return None if image is None or column is None else list(self._dataset[column])

    def _labels_of_items(self, count: int) -> list[object]:
        """Read the label of every item; of a data set other than a list, up to one without a label
        if none before has one.

        Returns count labels, None for an item without one, or that raises an exception, which is
        recorded when it is read. Raises DataError if the first item, or each of a list, is of a
        kind that has no image.
        """
        values: list[object] = []
        wrong: list[TypeError] = []
        is_list = isinstance(self._dataset, list | tuple)  # whose items cost nothing to read
        for row in range(count):
            item = None
            try:
                item = self._dataset[row]
                label = _split(item)[1]
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's own code
                label = None
                if isinstance(error, TypeError) and item is not None:
                    wrong.append(error)
            if len(wrong) == row + 1 == (count if is_list else 1):
                raise DataError(f"the data set has no images. dataset[0]: {wrong[0]}.")
            if label is _NO_LABEL and not is_list and all(value is None for value in values):
                return [None] * count
            values.append(None if label is _NO_LABEL else label)
        return values


class _CheckedSource:
    """Wrapper of a user's own Source that checks its listing and states."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.read = source.read

    def listing(self) -> Listing:
        listing = self._source.listing()
        check_listing(listing)
        return listing

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Return the states of the source, or None if it has none."""
        if not isinstance(self._source, Stateful):
            return None
        states = self._source.states(keys)
        if states is not None and (states.shape, states.dtype) != (keys.shape, IMAGE_STATE):
            raise DataError(
                f"states(keys): expected an array {keys.shape} of featx.types.IMAGE_STATE, got "
                f"{states.shape} {states.dtype}."
            )
        return states


_NO_LABEL = object()


def _split(item: object) -> tuple[Any, object]:
    """Split an item into image and label.

    Returns (image, label), with _NO_LABEL if the item is the image alone.
    """
    if isinstance(item, Mapping):
        names = [name for name in item if isinstance(name, str)]
        image, path, label = (find_column(names, wanted) for wanted in ("image", "path", "label"))
        image = path if image is None else image
        if image is None:
            raise TypeError(
                f"the item is a {type(item).__name__} of {first_names(names, 5) or 'nothing'}; "
                "expected (image, label), or the keys image (or path) and label"
            )
        return item[image], _NO_LABEL if label is None else _label(item[label])
    if isinstance(item, tuple | list):
        if len(item) == 1:  # of a TensorDataset of images
            return item[0], _NO_LABEL
        if len(item) != 2:
            raise TypeError(f"the item has {len(item)} elements; expected (image, label)")
        return item[0], _label(item[1])
    return item, _NO_LABEL


def _note_on(columns: Collection[str]) -> str:
    """Return why the rows of a table have no labels, and which columns look like labels."""
    names = [name for name in columns if isinstance(name, str)]
    note = note_on_columns(names, find_column(names, "label"), option="")
    return note or "the column label has no values"


def _label(value: Any) -> object:
    """Return a label; of an array or list of one label, as MedMNIST has them, that label."""
    if isinstance(value, list | tuple) and len(value) == 1:
        return value[0]
    return value.item() if getattr(value, "shape", None) == (1,) else value


def _same(listed: Any, found: object) -> bool:
    """Return whether an item has the label that was listed; items without a label always match."""
    if found is _NO_LABEL or listed is found:
        return True
    are_nan = isinstance(listed, float | np.floating) and listed != listed and found != found
    return bool(listed == found or are_nan)


def _encode(image: Any) -> bytes | Path:
    """Encode an image without loss, or return the path of its file."""
    if isinstance(image, Image.Image):
        return encode_image(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        if b"\0" in os.fsencode(image) or image == "":
            raise ValueError(f"{image!r} is no path of a file")
        return Path(image)
    if hasattr(image, "__array__"):
        return encode_array(np.asarray(image))
    raise TypeError(
        f"the image is a {type(image).__name__}; expected a Pillow image, an array, bytes or a path"
    )


def _absolute(path: Path) -> bytes:
    """Return a path from the root, with its `..`, which depends on links."""
    return os.fsencode(path.absolute())


SOURCES.register(
    source_member(
        OBJECT_SOURCE,
        "A data set that a Python program passes as an object to featx.extract.",
        ObjectOptions,
        open_source,
    )
)
