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
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.statistics.moments import Moments, PositionNorms
from featx.analysis.statistics.part_moments import StatsLayer
from featx.errors import LayerError, StoreError, nearest
from featx.storage import memory_mismatch_error, paths_in
from featx.store import (
    damage_text,
    geometry_of,
    geometry_values,
    layout,
    open_metadata,
    open_plain_dataset,
)
from featx.types import Array, Failure, Status

STATS_FORMAT = 2
"""Version of the format."""

STATS_FILE = "stats.h5"
"""File name in the folder `out`."""

STATS_IMAGES = "stats-images.h5"
"""File next to it with the states of the images, as images.h5 of a store."""

RESOLVED = ("threads", "response")
"""Entries of `Run.resolved` that are attributes of a file, and not among its settings, which are
compared exactly."""

PARTS_FOLDER = "stats-parts"
"""Folder next to it, which exists during a run."""

_ARRAYS = ("mean", "scatter", "smallest", "largest")
"""Datasets of a layer other than `count`, and of its norms other than the histogram; fields of
`Moments` in their order."""

_NORMS, _HISTOGRAM = "norms", "histogram"
"""Group of the norms below that of the layer, and its dataset of counts."""

_FAILURE_COLUMNS = ("row", "key", "status", "error", "message")

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
            layout.check_version(path, int(version), "statistics", STATS_FORMAT)
            yield file
    except (StoreError, LayerError):
        raise
    except layout.UNREADABLE as error:
        raise DamagedError(f"{path} is damaged: {damage_text(path, error)}.") from error


class Contents(NamedTuple):
    """Contents of a file: moments by layer, images left out, and (n,) image checksums."""

    moments: dict[str, Moments]
    failures: Sequence[Failure]
    checksums: npt.NDArray[np.uint64]


def file_bytes(
    root: Mapping[str, object], layers: Mapping[str, StatsLayer], contents: Contents
) -> bytes:
    """Build a file in memory, and verify it by reading it back."""
    buffer = io.BytesIO()
    datasets = _datasets(contents)
    with h5py.File(buffer, "w", libver=layout.LIBVER, userblock_size=_SEAL_BYTES) as file:
        file.attrs.update(root)
        group = file.create_group("layers", track_order=True)  # in the requested order
        for name, layer in layers.items():
            group.create_group(name).attrs.update(layer.attributes)
            if (norms := contents.moments[name].norms) is not None:
                group.create_group(f"{name}/{_NORMS}").attrs.update(geometry_values(norms.tokens))
        file.create_group(layout.FAILURES)  # groups that h5py adds itself get the time
        for path, values in datasets.items():
            file[path] = values
    with h5py.File(buffer, "r") as file:
        for path, values in datasets.items():
            if not np.array_equal(file[path][()], values):
                raise memory_mismatch_error(STATS_FILE, path)
    with buffer.getbuffer() as data:
        # The checksum is written last, into the user block, because it covers everything behind it.
        data[:_SEAL_BYTES] = seal(zlib.crc32(data[_SEAL_BYTES:]))
    return buffer.getvalue()


def _datasets(contents: Contents) -> dict[str, Array]:
    datasets: dict[str, Array] = {}
    for name, moments in contents.moments.items():
        datasets[f"layers/{name}/count"] = np.array(moments.count)
        for key in _ARRAYS:
            datasets[f"layers/{name}/{key}"] = getattr(moments, key).cpu().numpy()
        if (norms := moments.norms) is not None:
            for key in _ARRAYS:
                array = getattr(norms.positions, key).cpu().numpy()
                datasets[f"layers/{name}/{_NORMS}/{key}"] = array
            datasets[f"layers/{name}/{_NORMS}/{_HISTOGRAM}"] = norms.histogram
    failures = contents.failures
    keys = [failure.key.decode("utf-8", "surrogateescape") for failure in failures]
    messages = [f.message.encode("utf-8", "backslashreplace").decode() for f in failures]
    columns: tuple[Array, ...] = (
        np.array([failure.row for failure in failures], np.int64),
        layout.text_array(keys),
        np.array([failure.status for failure in failures], np.uint8),
        layout.text_array([failure.error for failure in failures]),
        layout.text_array(messages),
    )
    paths = (f"{layout.FAILURES}/{name}" for name in _FAILURE_COLUMNS)
    datasets.update(zip(paths, columns, strict=True))
    datasets[layout.IMAGE_CHECKSUM] = contents.checksums
    return datasets


def read_failures(file: h5py.File) -> list[Failure]:
    """Read the images that were left out, in order of rows."""
    columns = [read_array(file, f"{layout.FAILURES}/{name}") for name in _FAILURE_COLUMNS]
    return [
        Failure(
            row=int(row),
            key=bytes(key),
            status=Status(int(status)),
            error=error.decode("utf-8", "surrogateescape"),
            message=message.decode("utf-8", "surrogateescape"),
        )
        for row, key, status, error, message in zip(*columns, strict=True)
    ]


def read_array(file: h5py.File, path: str) -> Array:
    """Read a dataset whose values are stored in this file."""
    values: Array = open_plain_dataset(file, path)[()]
    return values


def seal(crc: int) -> bytes:
    """Return the first 512 bytes of a file, which are the same in every version of the format."""
    text = f"featx statistics; crc32 of the bytes from {_SEAL_BYTES} on: {crc:08x}\n"
    return text.encode().ljust(_SEAL_BYTES, b"\0")


def _check_seal(path: Path) -> None:
    crc = 0
    try:
        with path.open("rb") as file:
            head = file.read(_SEAL_BYTES)
            while data := file.read(1 << 20):
                crc = zlib.crc32(data, crc)
    except OSError as error:
        raise DamagedError(f"{path}: {damage_text(path, error)}.") from error
    if head != seal(crc):
        raise DamagedError(f"{path} is damaged: it differs from its checksum.")


def attributes_of(item: h5py.Group) -> dict[str, Any]:
    """Return attributes as JSON types."""
    return {
        key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in item.attrs.items()
    }


def check_layer(file: h5py.File, path: Path, name: str) -> None:
    """Check that a file has statistics of a layer."""
    if not isinstance(name, str) or name not in file["layers"]:
        names = list(file["layers"])
        raise LayerError(
            f"{path} has no statistics of {name!r}; it has {', '.join(names)}."
            f"{nearest(str(name), names)}"
        )


def read_layer(file: h5py.File, path: Path, name: str) -> tuple[Moments, dict[str, Any]]:
    """Read the moments and attributes of one layer."""
    check_layer(file, path, name)
    attributes = attributes_of(file[f"layers/{name}"])
    count, group = int(read_array(file, f"layers/{name}/count")), f"layers/{name}/{_NORMS}"
    moments = _read_moments(file, f"layers/{name}", count)
    if group in file:
        tokens = geometry_of(attributes_of(file[group]))
        if tokens is None:
            raise DamagedError(f"{path}: the places of the tokens of {name} are missing.")
        positions = _read_moments(file, group, count // attributes["rows_per_image"])
        moments.norms = PositionNorms(positions, read_array(file, f"{group}/{_HISTOGRAM}"), tokens)
    return moments, attributes


def _read_moments(file: h5py.File, group: str, count: int) -> Moments:
    arrays = (torch.from_numpy(read_array(file, f"{group}/{key}")) for key in _ARRAYS)
    mean, scatter, smallest, largest = arrays
    return Moments(count, mean, scatter, smallest, largest)


def stored_settings(root: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return everything that changes the values of the statistics in a folder, by option name, and
    those of `RESOLVED` that are known; None without statistics.
    """
    for path in (root / STATS_FILE, *paths_in(root / PARTS_FOLDER, "rows-*.h5")):
        if not path.is_file():
            continue
        # Damaged files are set aside later, by the process that holds the lock.
        with contextlib.suppress(DamagedError), reading(path) as file:
            attributes = attributes_of(file)
            resolved = {key: attributes[key] for key in RESOLVED if key in attributes}
            return json.loads(attributes["settings"]), resolved
    return None
