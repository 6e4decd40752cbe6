"""Format of a statistics file, stats.h5 or a part of it.

/layers/<name>/count, mean, scatter, smallest, largest   moments of a layer, with its attributes
/layers/<name>/norms/mean, ..., largest, histogram       norms of its tokens, if it has any
/failures/row, key, status, error, message               images that were left out
/image_checksum                                          of the image of each row, as in a store
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.statistics.moments import NUM_BINS, Moments, PositionNorms
from featx.analysis.statistics.part_moments import StatsLayer
from featx.errors import LayerError, StoreError, nearest
from featx.storage import memory_mismatch_error
from featx.store import (
    damage_text,
    geometry_of,
    geometry_values,
    layout,
    open_metadata,
    open_plain_dataset,
)
from featx.types import Failure, Status, TokenGeometry

STATS_FORMAT = 1
"""Version of the format."""

STATS_FILE = "stats.h5"
"""File name in the folder `out`."""

STATS_IMAGES = "stats-images.h5"
"""File next to it with the states of the images, as images.h5 of a store."""

PARTS_FOLDER = "stats-parts"
"""Folder next to it, which exists during a run."""

_ARRAYS = ("mean", "scatter", "smallest", "largest")
"""Datasets of a layer other than `count`, and of its norms other than the histogram."""

_NORMS, _HISTOGRAM = "norms", "histogram"
"""Group of the norms below that of the layer, and its dataset of counts."""

_SEAL_BYTES = 512
"""Size of the HDF5 user block at the beginning of the file, which HDF5 ignores and which contains
the checksum."""


class DamagedError(StoreError):
    """A statistics file whose contents differ from what was written."""


@contextlib.contextmanager
def reading(path: Path, compare: bool = True) -> Iterator[h5py.File]:
    """Open a statistics file of a version that this featx reads."""
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
    """Build a file in memory, and verify it by reading it back.

    Returns:
        the bytes of the file.
    """
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=layout.LIBVER, userblock_size=_SEAL_BYTES) as file:
        file.attrs.update(root)
        group = file.create_group("layers", track_order=True)  # in the requested order
        for name, layer in layers.items():
            _write_layer(group.create_group(name), layer, moments[name])
        _write_failures(file.create_group(layout.FAILURES), failures)
        file.create_dataset(layout.IMAGE_CHECKSUM, data=checksums)
    path = Path(STATS_FILE)
    with h5py.File(buffer, "r") as file:
        for name in layers:
            read = _arrays_of(read_layer(file, path, name, root)[0])
            for key, array in _arrays_of(moments[name]).items():
                if not np.array_equal(read[key], array):
                    raise memory_mismatch_error(path, name)
        if len(read_failures(file, path, root)) != len(failures):
            raise memory_mismatch_error(path, layout.FAILURES)
        if not np.array_equal(read_checksums(file, path, root), checksums):
            raise memory_mismatch_error(path, layout.IMAGE_CHECKSUM)
    data = buffer.getbuffer()
    # The checksum is written last, into the user block, because it covers everything behind it.
    data[:_SEAL_BYTES] = _seal(zlib.crc32(data[_SEAL_BYTES:]))
    return data


def _arrays_of(moments: Moments) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a layer by the names of their datasets in its group."""
    arrays = {key: getattr(moments, key).cpu().numpy() for key in _ARRAYS}
    if (norms := moments.norms) is not None:
        for key in _ARRAYS:
            arrays[f"{_NORMS}/{key}"] = getattr(norms.positions, key).cpu().numpy()
        arrays[f"{_NORMS}/{_HISTOGRAM}"] = norms.histogram
    return arrays


def _write_layer(group: h5py.Group, layer: StatsLayer, moments: Moments) -> None:
    """Write /layers/<name>: count, arrays and attributes."""
    group.create_dataset("count", data=np.int64(moments.count))
    for key, array in _arrays_of(moments).items():
        group.create_dataset(key, data=array)
    group.attrs.update(layer.attributes)
    if moments.norms is not None:
        group[_NORMS].attrs.update(geometry_values(moments.norms.tokens))


def _write_failures(group: h5py.Group, failures: Sequence[Failure]) -> None:
    """Write /failures: one dataset per column of failures.csv."""
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
    """Read the images that were left out, in order of rows."""
    names = ("row", "key", "status", "error", "message")
    datasets = _plain_datasets(file, path, layout.FAILURES, names)
    columns = [datasets[name][()] for name in names]
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
    """Read the image checksums of a file's rows.

    Returns:
        (n,) uint64.
    """
    num_rows = root["stop"] - root["start"]
    dataset = open_plain_dataset(file, layout.IMAGE_CHECKSUM)
    if dataset.shape != (num_rows,) or dataset.dtype != np.uint64:
        raise DamagedError(f"{path}: /{layout.IMAGE_CHECKSUM} does not fit its {num_rows} rows.")
    checksums: npt.NDArray[np.uint64] = dataset[()]
    return checksums


def _seal(crc: int) -> bytes:
    """Return the first 512 bytes of a file, which are the same in every version of the format."""
    text = f"featx statistics; crc32 of the bytes from {_SEAL_BYTES} on: {crc:08x}\n"
    return text.encode().ljust(_SEAL_BYTES, b"\0")


def _check_seal(path: Path) -> None:
    """Verify the checksum of a file."""
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
    """Return attributes as JSON types."""
    return {
        key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in item.attrs.items()
    }


def _plain_datasets(
    file: h5py.File, path: Path, group: str, names: Sequence[str]
) -> dict[str, h5py.Dataset]:
    """Return datasets of a group whose values are stored in this file."""
    try:
        return {name: open_plain_dataset(file, f"{group}/{name}") for name in names}
    except StoreError as error:
        raise DamagedError(f"{path} is damaged: /{group} is not what featx writes.") from error


def check_layer(file: h5py.File, path: Path, name: str) -> None:
    """Check that a file has statistics of a layer."""
    if name not in file["layers"]:
        names = list(file["layers"])
        raise LayerError(
            f"{path} has no statistics of {name!r}; it has {', '.join(names)}."
            f"{nearest(name, names)}"
        )


def read_layer(
    file: h5py.File, path: Path, name: str, root: Mapping[str, Any]
) -> tuple[Moments, dict[str, Any]]:
    """Read the moments and attributes of one layer, and check that they match."""
    check_layer(file, path, name)
    datasets = _plain_datasets(file, path, f"layers/{name}", ("count", *_ARRAYS))
    if sum(dataset.size for dataset in datasets.values()) * 8 > file.id.get_filesize():
        raise DamagedError(f"{path}: {name} claims more than the file holds.")
    arrays = {key: datasets[key][()] for key in _ARRAYS}
    attributes = attributes_of(file[f"layers/{name}"])
    if {array.dtype for array in arrays.values()} != {np.dtype(np.float64)}:
        raise DamagedError(f"{path}: the moments of {name} are not float64.")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    count, each = int(datasets["count"][()]), attributes["rows_per_image"]
    moments = Moments(count, **tensors, norms=_read_norms(file, path, name, count // each))
    if moments.kind != attributes["kind"] or set(moments.scatter.shape) != {moments.dim}:
        raise DamagedError(f"{path}: {name} has moments of shape {tuple(moments.scatter.shape)}.")
    images = root["stop"] - root["start"] - root["num_failed"]
    size = (moments.count, moments.dim * each)
    if size != (images * each, math.prod(attributes["shape"])):
        raise DamagedError(
            f"{path}: {name} counts {moments.count} rows of {moments.dim} features, which does "
            f"not fit {images} images of shape {attributes['shape']}."
        )
    if {tensors["smallest"].shape, tensors["largest"].shape} != {moments.mean.shape}:
        raise DamagedError(f"{path}: the extremes of {name} are not those of its features.")
    if moments.count and not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise DamagedError(f"{path}: the moments of {name} are not finite.")
    return moments, attributes


def _read_norms(file: h5py.File, path: Path, name: str, count: int) -> PositionNorms | None:
    """Read the norms of the tokens of a layer."""
    group = f"layers/{name}/{_NORMS}"
    if group not in file:
        return None
    try:
        datasets = _plain_datasets(file, path, group, (*_ARRAYS, _HISTOGRAM))
        return _norms_of(datasets, geometry_of(attributes_of(file[group])), count)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{path}: the norms of {name}: {error}.") from error


def _norms_of(
    datasets: Mapping[str, h5py.Dataset], tokens: TokenGeometry | None, count: int
) -> PositionNorms:
    """Return the norms in some datasets, which are checked."""
    if tokens is None:
        raise ValueError("the places of the tokens are missing")
    size = tokens.prefix_tokens + math.prod(tokens.grid)
    for key in _ARRAYS:
        if datasets[key].shape != (size,) or datasets[key].dtype != np.float64:
            raise ValueError(f"{key} does not have {size} float64 numbers")
    histogram = datasets[_HISTOGRAM][()]
    if histogram.shape != (NUM_BINS,) or histogram.dtype != np.int64:
        raise ValueError(f"the histogram does not have {NUM_BINS} int64 numbers")
    arrays = [torch.from_numpy(datasets[key][()]) for key in _ARRAYS]
    if count and not all(array.isfinite().all() for array in arrays):
        raise ValueError("a number is not finite")
    if int(histogram.sum()) != count * math.prod(tokens.grid):
        raise ValueError(f"the histogram is not that of {count} images")
    mean, scatter, smallest, largest = arrays
    return PositionNorms(Moments(count, mean, scatter, smallest, largest), histogram, tokens)


def stored_settings(root: Path) -> tuple[dict[str, Any], int | None] | None:
    """Return the settings of the statistics in a folder, or None if there are none.

    Returns:
        everything that changes their values, by option name; and the number of CPU threads that
        compute one batch, None on other devices.
    """
    parts = (root / PARTS_FOLDER).glob("rows-*.h5")
    for path in (root / STATS_FILE, *sorted(parts)):
        if not path.is_file():
            continue
        # Damaged files are set aside later, by the process that holds the lock.
        with contextlib.suppress(DamagedError), reading(path) as file:
            attributes = attributes_of(file)
            return json.loads(attributes["settings"]), attributes.get("threads")
    return None
