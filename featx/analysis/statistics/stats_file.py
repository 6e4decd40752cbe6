"""A file of statistics, stats.h5 or a part of one: its format, and how it is read.

/layers/<name>/count, mean, scatter, smallest, largest   of a layer, with its attributes
/failures/row, key, status, error, message               the images that were left out
/image_checksum                                          of the image of each row, as in a store
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import StatsLayer
from featx.errors import LayerError, StoreError, nearest
from featx.storage.local_folder import reads_back_differently
from featx.store import layout
from featx.store.hdf5_files import check_plain, damage_text, open_metadata
from featx.types import Failure, Status

STATS_FORMAT = 1

STATS_FILE = "stats.h5"
"""Its name in the folder `out`."""

STATS_IMAGES = "stats-images.h5"
"""Beside it: the states of the images, as in images.h5 of a store."""

PARTS_FOLDER = "stats-parts"
"""Beside it, while a run goes on."""

_ARRAYS = ("mean", "scatter", "smallest", "largest")

_SEAL_BYTES = 512
"""HDF5's user block: what lies before the file proper, and is none of HDF5's business."""


class DamagedError(StoreError):
    """A file of statistics whose contents are not what was written."""


@contextlib.contextmanager
def reading(path: Path, compare: bool = True) -> Iterator[h5py.File]:
    """A file of statistics, of a version that this featx reads.

    Args:
        path: of the file.
        compare: it with its checksum; not needed where that was done and nothing has changed.

    Raises:
        StoreError: the system cannot read it now, or it is newer.
        DamagedError: it is damaged.
    """
    if compare:
        _check_seal(path)
    try:
        with open_metadata(path) as file:
            version = file.attrs.get("featx_stats")
            if version is None:
                raise DamagedError(f"{path} is no file of featx statistics.")
            if version > STATS_FORMAT:
                raise StoreError(
                    f"{path} has statistics format {version}, this featx reads up to "
                    f"{STATS_FORMAT}. Upgrade featx: pip install -U featx."
                )
            yield file
    except (StoreError, LayerError):
        raise
    except layout.UNREADABLE as error:
        raise DamagedError(f"{path} is damaged: {damage_text(path, error)}.") from error


def file_bytes(
    root: Mapping[str, Any],
    layers: Mapping[str, StatsLayer],
    moments: Mapping[str, Moments],
    failures: Sequence[Failure],
    checksums: npt.NDArray[np.uint64],
) -> memoryview:
    """The bytes of a file, built in memory and read back.

    Args:
        root: its own attributes.
        layers, moments: by the layer's name.
        failures: the images that were left out, in order of rows.
        checksums: (n,) of the images of all its rows.
    """
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=layout.LIBVER, userblock_size=_SEAL_BYTES) as file:
        file.attrs.update(root)
        group = file.create_group("layers", track_order=True)  # as they were asked for
        for name, layer in layers.items():
            _write_layer(group.create_group(name), layer, moments[name])
        _write_failures(file.create_group(layout.FAILURES), failures)
        file.create_dataset(layout.IMAGE_CHECKSUM, data=checksums)
    path = Path(STATS_FILE)
    with h5py.File(buffer, "r") as file:
        for name in layers:
            read = read_layer(file, path, name, root)[0]
            for key in _ARRAYS:
                if not torch.equal(getattr(read, key), getattr(moments[name], key).cpu()):
                    raise reads_back_differently(path, name)
        if len(read_failures(file, path, root)) != len(failures):
            raise reads_back_differently(path, layout.FAILURES)
        if not np.array_equal(read_checksums(file, path, root), checksums):
            raise reads_back_differently(path, layout.IMAGE_CHECKSUM)
    data = buffer.getbuffer()
    data[:_SEAL_BYTES] = _seal(zlib.crc32(data[_SEAL_BYTES:]))
    return data


def _write_layer(group: h5py.Group, layer: StatsLayer, moments: Moments) -> None:
    """/layers/<name>: count and the arrays, with the layer's attributes."""
    group.create_dataset("count", data=np.int64(moments.count))
    for key in _ARRAYS:
        group.create_dataset(key, data=getattr(moments, key).cpu().numpy())
    group.attrs.update(layer.attributes)


def _write_failures(group: h5py.Group, failures: Sequence[Failure]) -> None:
    """/failures: a dataset for each column of failures.csv."""
    texts = {
        "key": [failure.key.decode("utf-8", "surrogateescape") for failure in failures],
        "error": [failure.error for failure in failures],
        "message": [f.message.encode("utf-8", "backslashreplace").decode() for f in failures],
    }
    group["row"] = np.array([failure.row for failure in failures], dtype=np.int64)
    group["status"] = np.array([int(failure.status) for failure in failures], dtype=np.uint8)
    for name, values in texts.items():
        group[name] = layout.text_array(values)


def read_failures(file: h5py.File, path: Path, root: Mapping[str, Any]) -> tuple[Failure, ...]:
    """The images that were left out, in order of rows.

    Args:
        file: open.
        path: of the file, for messages.
        root: the file's own attributes.

    Raises:
        DamagedError: they do not fit what the file says of itself.
    """
    names = ("row", "key", "status", "error", "message")
    found = _plain(file, path, layout.FAILURES, names)
    columns = [found[name][()] for name in names]
    if {len(column) for column in columns} != {root["num_failed"]}:
        raise DamagedError(f"{path}: it does not list the {root['num_failed']} images left out.")
    return tuple(
        Failure(
            row=int(row),
            key=bytes(key),
            status=Status(int(status)),
            error=error.decode("utf-8", "surrogateescape"),
            message=message.decode("utf-8", "surrogateescape"),
        )
        for row, key, status, error, message in zip(*columns, strict=True)
    )


def read_checksums(file: h5py.File, path: Path, root: Mapping[str, Any]) -> npt.NDArray[np.uint64]:
    """(n,) uint64 checksums of the images of a file's rows.

    Args:
        file: open.
        path: of the file, for messages.
        root: the file's own attributes.

    Raises:
        DamagedError: they do not fit what the file says of itself.
    """
    num_rows = root["stop"] - root["start"]
    dataset = check_plain(file, layout.IMAGE_CHECKSUM)
    if dataset.shape != (num_rows,) or dataset.dtype != np.uint64:
        raise DamagedError(f"{path}: /{layout.IMAGE_CHECKSUM} does not fit its {num_rows} rows.")
    found: npt.NDArray[np.uint64] = dataset[()]
    return found


def _seal(crc: int) -> bytes:
    """The first 512 bytes of a file; the same in every version of the format."""
    text = f"featx statistics; crc32 of the bytes from {_SEAL_BYTES} on: {crc:08x}\n"
    return text.encode().ljust(_SEAL_BYTES, b"\0")


def _check_seal(path: Path) -> None:
    """Raise DamagedError where a file is not what was written, before HDF5 looks at it.

    HDF5's own checksums leave out what strings are kept in: one flipped bit there, and opening
    the file never ends.
    """
    crc = 0
    try:
        with path.open("rb") as file:
            head = file.read(_SEAL_BYTES)
            while data := file.read(1 << 20):
                crc = zlib.crc32(data, crc)
    except OSError as error:
        raise DamagedError(f"{path}: {damage_text(path, error)}.") from error
    if head != _seal(crc):
        raise DamagedError(f"{path} is damaged: it differs from its checksum.")


def attributes_of(item: h5py.Group) -> dict[str, Any]:
    """Attributes as JSON types."""
    return {
        key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in item.attrs.items()
    }


def _plain(
    file: h5py.File, path: Path, group: str, names: Sequence[str]
) -> dict[str, h5py.Dataset]:
    """Datasets of a group, whose values lie in this file."""
    try:
        return {name: check_plain(file, f"{group}/{name}") for name in names}
    except StoreError as error:
        raise DamagedError(f"{path} is damaged: /{group} is not what featx writes.") from error


def check_layer(file: h5py.File, path: Path, name: str) -> None:
    """Raise LayerError where a file has no statistics of a layer."""
    if name not in file["layers"]:
        known = list(file["layers"])
        raise LayerError(
            f"{path} has no statistics of {name!r}; it has {', '.join(known)}."
            f"{nearest(name, known)}"
        )


def read_layer(
    file: h5py.File, path: Path, name: str, root: Mapping[str, Any]
) -> tuple[Moments, dict[str, Any]]:
    """The moments of one layer with its attributes, found to fit each other.

    Args:
        file: open.
        path: of the file, for messages.
        name: of the layer.
        root: the file's own attributes.
    """
    check_layer(file, path, name)
    datasets = _plain(file, path, f"layers/{name}", ("count", *_ARRAYS))
    if sum(dataset.size for dataset in datasets.values()) * 8 > file.id.get_filesize():
        raise DamagedError(f"{path}: {name} claims more than the file holds.")
    arrays = {key: datasets[key][()] for key in _ARRAYS}
    attributes = attributes_of(file[f"layers/{name}"])
    if {array.dtype for array in arrays.values()} != {np.dtype(np.float64)}:
        raise DamagedError(f"{path}: the moments of {name} are not float64.")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    moments = Moments(int(datasets["count"][()]), **tensors)
    if moments.kind != attributes["kind"] or set(moments.scatter.shape) != {moments.dim}:
        raise DamagedError(f"{path}: {name} has moments of shape {tuple(moments.scatter.shape)}.")
    images = root["stop"] - root["start"] - root["num_failed"]
    each = attributes["rows_per_image"]
    found = (moments.count, moments.dim * each)
    if found != (images * each, math.prod(attributes["shape"])):
        raise DamagedError(
            f"{path}: {name} counts {moments.count} rows of {moments.dim} features, which does "
            f"not fit {images} images of shape {attributes['shape']}."
        )
    if {tensors["smallest"].shape, tensors["largest"].shape} != {moments.mean.shape}:
        raise DamagedError(f"{path}: the extremes of {name} are not those of its features.")
    if moments.count and not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise DamagedError(f"{path}: the moments of {name} are not finite.")
    return moments, attributes


class Statistics(Mapping[str, Moments]):
    """A finished stats.h5: layer -> Moments, read from the file whenever it is asked for.

        stats = featx.open_stats("runs/photos")
        stats["avgpool"].mean           # (D,) float64; .covariance(), .second_moment, .count

    Args:
        path: the file, or the folder it lies in.

    Attributes:
        path: of the file.
        attributes: what it says of itself: model, weights_sha256, transform, num_failed, ...
        settings: everything that changed its values, by the names of the keys.

    Raises:
        StoreError: it is not there, not finished, damaged, or newer than this featx.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        self.path = path / STATS_FILE if path.is_dir() else path
        if not self.path.is_file():
            raise StoreError(f"there is no statistics file {self.path}. job=stats makes one.")
        self._stamp = _stamp_of(self.path)
        with reading(self.path) as file:
            self.attributes = attributes_of(file)
            self._layers = tuple(file["layers"])
            _check_complete(self.path, self.attributes)
            self.settings: dict[str, Any] = json.loads(self.attributes["settings"])

    def __getitem__(self, layer: str) -> Moments:
        return self.layer(layer)[0]

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Statistics({str(self.path)!r}, layers: {', '.join(self._layers)})"

    def layer(self, name: str) -> tuple[Moments, dict[str, Any]]:
        """The moments of a layer, and `about` it.

        Raises:
            LayerError: it has no such layer.
            StoreError: the file was changed meanwhile.
        """
        with self._reading() as file:
            moments, attributes = read_layer(file, self.path, name, self.attributes)
            return moments, self._joined(attributes)

    def about(self, name: str) -> dict[str, Any]:
        """What the file says of itself and of a layer: capture, reduce, shape, row, kind, ...

        Raises:
            LayerError: it has no such layer.
        """
        with self._reading() as file:
            check_layer(file, self.path, name)
            return self._joined(attributes_of(file[f"layers/{name}"]))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[h5py.File]:
        """The file that was compared with its checksum when it was opened, and no other."""
        if _stamp_of(self.path) != self._stamp:
            raise StoreError(f"{self.path} has changed since it was opened; open it again.")
        with reading(self.path, compare=False) as file:
            yield file

    def _joined(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """What the file says of a layer and of itself; the target, where gradients were taken."""
        return {"target": self.settings.get("target"), **self.attributes, **attributes}


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written to or replaced; None where it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def open_stats(path: str | Path) -> Statistics:
    """Open the statistics that job=stats made: a stats.h5, or the folder it lies in."""
    return Statistics(path)


@dataclass(frozen=True)
class StatsResumeState:
    """How the statistics in a folder were begun.

    Attributes:
        settings: everything that changes their values.
        threads: of the CPU that computed; None where another device did.
    """

    settings: dict[str, Any]
    threads: int | None


def statistics_begun(root: Path) -> StatsResumeState | None:
    """How the statistics below a folder were begun, None where there are none.

    Raises:
        StoreError: a file is newer than this featx, or cannot be read now.
    """
    parts = (root / PARTS_FOLDER).glob("rows-*.h5")
    for path in (root / STATS_FILE, *sorted(parts)):
        if not path.is_file():
            continue
        # What is damaged is set aside later, by whoever holds the lock.
        with contextlib.suppress(DamagedError), reading(path) as file:
            attributes = attributes_of(file)
            return StatsResumeState(json.loads(attributes["settings"]), attributes.get("threads"))
    return None


def _check_complete(path: Path, root: Mapping[str, Any]) -> None:
    if not root["complete"]:
        raise StoreError(
            f"{path} holds rows {root['start']} to {root['stop']} of a run that goes on; its "
            "statistics are in the file beside the folder when it is complete."
        )
