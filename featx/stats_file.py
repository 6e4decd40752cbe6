"""Statistics on disk: the parts of a run as files, merged in one fixed order -> stats.h5."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from featx.errors import (
    LayerError,
    StoreError,
    StoreMismatchError,
    nearest,
)
from featx.fingerprint import differences, digest
from featx.moments import Moments, StatsLayer, cut_row, is_aligned
from featx.store import layout
from featx.store.commit import TEMPORARY, Disk
from featx.store.files import check_plain, damage_text, open_for_a_look
from featx.types import Part, StoreHeader

logger = logging.getLogger(__name__)

STATS_FORMAT = 1

_ARRAYS = ("count", "mean", "scatter")

_SEAL_BYTES = 512
"""HDF5's user block: what lies before the file proper, and is none of HDF5's business."""


class MomentsOfParts:
    """The moments of a run while it goes on: small files below PATH-parts/, in the end one PATH.

    A file holds all layers over one span of rows, begins as one part, and is named for its rows.
    As soon as both halves of an aligned span are there they are merged into one file, so that
    a handful of files stay, not one a part. One process at a time may use it: the one that holds
    the store's lock.

    Args:
        disk: of the folder of `path`.
        path: of the file that is wanted, stats.h5.
        header: of the run; its fingerprint holds whatever changes values, the layers included.
        num_rows: of the listing.
        layers: whose statistics are taken.

    Attributes:
        complete: whether the one file is there, made by this run; known after `survey`.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        header: StoreHeader,
        num_rows: int,
        layers: Sequence[StatsLayer],
    ) -> None:
        self.disk = disk
        self.path = path
        self.folder = path.with_name(f"{path.stem}-parts")
        self._header = header
        self._num_rows = num_rows
        self._layers = {layer.spec.name: layer for layer in layers}
        self._spans: dict[tuple[int, int], int] = {}
        self._surveyed = False
        self.complete = False

    @property
    def num_failed(self) -> int:
        """Images left out of the rows that are done."""
        return sum(self._spans.values())

    def survey(self) -> None:
        """Find what is done. What is damaged is set aside, to be done again; leftovers go.

        Raises:
            StoreMismatchError: a file is there that other settings made.
            StoreError: a file cannot be read now.
        """
        self._spans = {}
        self._surveyed = True
        self.disk.make_folder(self.path.parent)  # what a killed process put there becomes durable
        if self.path.exists():
            num_failed = self._accepted(self.path, 0, self._num_rows)
            self.complete = num_failed is not None
            if num_failed is not None:
                self._spans[0, self._num_rows] = num_failed
                self.disk.remove(self.folder)
                return
        self.disk.make_folder(self.folder)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            self.disk.remove(leftover)
        found = [_span_of(path) for path in sorted(self.folder.glob("rows-*.h5"))]
        for start, stop in sorted(found, key=lambda span: span[0] - span[1]):
            path = self._file(start, stop)
            if self._covered(start, stop):
                self.disk.remove(path)  # merged into a larger one, and then the process was killed
            else:
                num_failed = self._accepted(path, start, stop)
                if num_failed is not None:
                    self._spans[start, stop] = num_failed

    def has(self, part: Part) -> bool:
        """Whether the rows of a part are done."""
        return self._covered(part.start, part.stop)

    def commit(self, part: Part, num_failed: int, moments: Mapping[str, Moments]) -> None:
        """Keep the moments of a part, durably when this returns.

        Args:
            part: of a grid whose parts are a power of two of rows.
            num_failed: images of the part that were left out.
            moments: name -> moments, all layers of the run.

        Raises:
            RunError: the disk is full or fails; the part is as good as not done.
        """
        assert self._surveyed, "what is there already was not looked for"
        assert set(moments) == set(self._layers), "a layer is missing"
        assert part.start % layout.power_of_two_at_least(len(part)) == 0, f"{part} is off the tree"
        assert is_aligned(part.start, part.stop) or part.stop == self._num_rows, f"{part} is short"
        for name, layer in self._layers.items():
            expected = (len(part) - num_failed) * layer.rows_per_image
            found = moments[name]
            assert (found.count, found.dim, found.kind) == (expected, layer.dim, layer.kind), name
        if not self.has(part):
            self._publish(part.start, part.stop, num_failed, moments)
            self._merge_upwards(part.start, part.stop)

    def finish(self) -> None:
        """Merge all parts into the one file, and remove them.

        Raises:
            StoreError: rows are missing, or a file is damaged; `survey` sets it aside.
            RunError: the disk is full or fails; the same call goes on.
        """
        assert self._surveyed, "what is there already was not looked for"
        if not self.complete:
            nodes = sorted(self._spans)
            edges = [0, *(stop for _, stop in nodes)]
            if [start for start, _ in nodes] + [self._num_rows] != edges:
                raise StoreError(
                    f"{self.folder} does not hold all {self._num_rows} rows yet; give the same "
                    "command again."
                )
            moments = self._merged(0, self._num_rows)
            root = self._root(0, self._num_rows, self.num_failed, complete=True)
            created = self.disk.publish(self.path, self._file_of(root, moments))
            assert created, f"somebody else wrote {self.path} without the lock"
            self._spans = {(0, self._num_rows): self.num_failed}
            self.complete = True
        self.disk.remove(self.folder)

    def _merge_upwards(self, start: int, stop: int) -> None:
        """Merge a span with its other half, and so on, as long as that is there and whole."""
        while is_aligned(start, stop):
            size = stop - start
            other = (start ^ size, (start ^ size) + size)
            if other not in self._spans:
                return
            halves = sorted([(start, stop), other])
            start, stop = halves[0][0], halves[1][1]
            num_failed = sum(self._spans[half] for half in halves)
            self._publish(start, stop, num_failed, self._merged(start, stop))
            for half in halves:
                self.disk.remove(self._file(*half))
                del self._spans[half]

    def _merged(self, start: int, stop: int) -> dict[str, Moments]:
        """The moments of a span, from its file or, by the tree, from those within it."""
        if (start, stop) in self._spans:
            path = self._file(start, stop)
            with _reading(path) as file:
                root = _attributes(file)
                self._check(path, root, start, stop)
                return {name: _read_layer(file, path, name, root)[0] for name in self._layers}
        assert stop - start > 1, "a span with rows that no file holds"
        cut = cut_row(start, stop)
        lower, upper = self._merged(start, cut), self._merged(cut, stop)
        return {name: lower.pop(name).merge(upper.pop(name)) for name in self._layers}

    def _publish(
        self, start: int, stop: int, num_failed: int, moments: Mapping[str, Moments]
    ) -> None:
        data = self._file_of(self._root(start, stop, num_failed, complete=False), moments)
        self.disk.publish(self._file(start, stop), data)
        self._spans[start, stop] = num_failed

    def _file_of(self, root: Mapping[str, Any], moments: Mapping[str, Moments]) -> memoryview:
        """The bytes of a file, built in memory and read back."""
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", libver=layout.LIBVER, userblock_size=_SEAL_BYTES) as file:
            file.attrs.update(root)
            group = file.create_group("layers")
            for name, layer in self._layers.items():
                _write_layer(group.create_group(name), layer, moments[name])
        with h5py.File(buffer, "r") as file:
            for name in self._layers:
                read = _read_layer(file, self.path, name, root)[0]
                assert torch.equal(read.scatter, moments[name].scatter.cpu()), name
                assert torch.equal(read.mean, moments[name].mean.cpu()), name
        data = buffer.getbuffer()
        data[:_SEAL_BYTES] = _seal(zlib.crc32(data[_SEAL_BYTES:]))
        return data

    def _root(self, start: int, stop: int, num_failed: int, complete: bool) -> dict[str, Any]:
        """Root attributes: the store's, with those of statistics."""
        identity = digest(self._header.fingerprint)
        attributes = layout.root_attributes(self._header, identity, complete)
        del attributes["featx_format"]  # no store: featx.open must not take it for one
        return {
            "featx_stats": STATS_FORMAT,
            **attributes,
            "settings": json.dumps(dict(self._header.fingerprint), sort_keys=True),
            "start": start,
            "stop": stop,
            "num_failed": num_failed,
        }

    def _file(self, start: int, stop: int) -> Path:
        return self.folder / f"rows-{start:010d}-{stop:010d}.h5"

    def _covered(self, start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in self._spans)

    def _accepted(self, path: Path, start: int, stop: int) -> int | None:
        """How many images a file of this run left out; None where it was damaged and set aside."""
        try:
            with _reading(path) as file:
                root = _attributes(file)
                self._check(path, root, start, stop)
                for name in self._layers:
                    _read_layer(file, path, name, root)
                return int(root["num_failed"])
        except (_DamagedError, LayerError) as error:  # a run's own file has all its layers
            target = self.disk.set_aside(path, self.path.parent / layout.QUARANTINE)
            logger.warning("%s Moved to %s; its rows are done again.", error, target)
            return None

    def _check(self, path: Path, attributes: Mapping[str, Any], start: int, stop: int) -> None:
        """Raise where a file belongs to another run or to other rows."""
        asked = dict(self._header.fingerprint)
        if attributes["fingerprint"] != digest(asked):
            made = json.loads(attributes["settings"])
            lines = [f"{key}: {old!r}, now {new!r}" for key, old, new in differences(made, asked)]
            raise StoreMismatchError(
                f"{path} was made with other settings: {'; '.join(lines)}. Give those, choose "
                "another out=DIR, or overwrite=true."
            )
        if (attributes["start"], attributes["stop"]) != (start, stop):
            raise _DamagedError(
                f"{path} holds rows {attributes['start']} to {attributes['stop']}, expected "
                f"{start} to {stop}."
            )


def _span_of(path: Path) -> tuple[int, int]:
    """The rows a file is named for."""
    try:
        _, start, stop = path.stem.split("-")
        return int(start), int(stop)
    except ValueError as error:
        raise StoreError(f"{path} is no file of featx; move it away.") from error


class _DamagedError(StoreError):
    """A file of statistics whose contents are not what was written."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    """A file of statistics, of a version that this featx reads.

    Raises:
        StoreError: the system cannot read it now, or it is newer.
        _DamagedError: it is damaged.
    """
    _check_seal(path)
    try:
        with open_for_a_look(path) as file:
            version = file.attrs.get("featx_stats")
            if version is None:
                raise _DamagedError(f"{path} is no file of featx statistics.")
            if version > STATS_FORMAT:
                raise StoreError(
                    f"{path} has statistics format {version}, this featx reads up to "
                    f"{STATS_FORMAT}. Upgrade featx: pip install -U featx."
                )
            yield file
    except (StoreError, LayerError):
        raise
    except layout.UNREADABLE as error:
        raise _DamagedError(f"{path} is damaged: {damage_text(path, error)}.") from error


def _write_layer(group: h5py.Group, layer: StatsLayer, moments: Moments) -> None:
    """/layers/<name>: count, mean and scatter, with the layer's attributes."""
    group.create_dataset("count", data=np.int64(moments.count))
    group.create_dataset("mean", data=moments.mean.cpu().numpy())
    group.create_dataset("scatter", data=moments.scatter.cpu().numpy())
    group.attrs.update(layer.attributes)


def _seal(crc: int) -> bytes:
    """The first 512 bytes of a file; the same in every version of the format."""
    text = f"featx statistics; crc32 of the bytes from {_SEAL_BYTES} on: {crc:08x}\n"
    return text.encode().ljust(_SEAL_BYTES, b"\0")


def _check_seal(path: Path) -> None:
    """Raise _DamagedError where a file is not what was written, before HDF5 looks at it.

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
        raise _DamagedError(f"{path}: {damage_text(path, error)}.") from error
    if head != _seal(crc):
        raise _DamagedError(f"{path} is damaged: it differs from its checksum.")


def _attributes(item: h5py.Group) -> dict[str, Any]:
    """Attributes as JSON types."""
    return {
        key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in item.attrs.items()
    }


def _read_layer(
    file: h5py.File, path: Path, name: str, root: Mapping[str, Any]
) -> tuple[Moments, dict[str, Any]]:
    """The moments of one layer with its attributes, found to fit each other.

    Args:
        file: open.
        path: of the file, for messages.
        name: of the layer.
        root: the file's own attributes.
    """
    if name not in file["layers"]:
        known = list(file["layers"])
        raise LayerError(
            f"{path} has no statistics of {name!r}; it has {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    try:
        datasets = {key: check_plain(file, f"layers/{name}/{key}") for key in _ARRAYS}
    except StoreError as error:
        raise _DamagedError(str(error)) from error
    if sum(dataset.size for dataset in datasets.values()) * 8 > file.id.get_filesize():
        raise _DamagedError(f"{path}: {name} claims more than the file holds.")
    arrays = {key: dataset[()] for key, dataset in datasets.items()}
    attributes = _attributes(file[f"layers/{name}"])
    if not arrays["mean"].dtype == arrays["scatter"].dtype == np.float64:
        raise _DamagedError(f"{path}: the moments of {name} are not float64.")
    moments = Moments(
        int(arrays["count"]), torch.from_numpy(arrays["mean"]), torch.from_numpy(arrays["scatter"])
    )
    if moments.kind != attributes["kind"] or set(moments.scatter.shape) != {moments.dim}:
        raise _DamagedError(f"{path}: {name} has moments of shape {tuple(moments.scatter.shape)}.")
    images = root["stop"] - root["start"] - root["num_failed"]
    each = attributes["rows_per_image"]
    found = (moments.count, moments.dim * each)
    if found != (images * each, math.prod(attributes["shape"])):
        raise _DamagedError(
            f"{path}: {name} counts {moments.count} rows of {moments.dim} features, which does "
            f"not fit {images} images of shape {attributes['shape']}."
        )
    if not (moments.mean.isfinite().all() and moments.scatter.isfinite().all()):
        raise _DamagedError(f"{path}: the moments of {name} are not finite.")
    return moments, attributes


def load_moments(path: Path, layer: str) -> Moments:
    """The moments of one layer from a finished stats.h5, compared with its checksum.

    Raises:
        StoreError: it is not there, not finished, damaged, or newer than this featx.
        LayerError: it has no such layer.
    """
    return load_layer(path, layer)[0]


def load_layer(path: Path, layer: str) -> tuple[Moments, dict[str, Any]]:
    """As `load_moments`, with what the file says of itself and of the layer.

    Returns:
        the moments, and the root attributes joined with the layer's.
    """
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"there is no statistics file {path}. job=stats makes one.")
    with _reading(path) as file:
        root = _attributes(file)
        moments, attributes = _read_layer(file, path, layer, root)
        if not root["complete"]:
            raise StoreError(
                f"{path} holds rows {root['start']} to {root['stop']} of a run that goes on; its "
                "statistics are in the file beside the folder when it is complete."
            )
    return moments, {**root, **attributes}
