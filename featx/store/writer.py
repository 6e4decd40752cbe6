"""Rows -> one part: an HDF5 file built in memory, read back, and only then handed out."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.store import codecs, layout
from featx.types import Failure, LayerSpec, Listing, Part, Status, StoreHeader


class PartBuilder:
    """The rows of one part as they arrive, each put at its own place.

    Rows that never arrive keep the fill, NaN and status 255; `build` refuses a part that has any.
    """

    def __init__(self, part: Part, specs: Sequence[LayerSpec]) -> None:
        self.part = part
        self.failures: list[Failure] = []
        self._specs = {spec.name: spec for spec in specs}
        self._features = {
            spec.name: np.full((len(part), *spec.shape), np.nan, dtype=spec.dtype) for spec in specs
        }
        self._status = np.full(len(part), Status.ABSENT, dtype=np.uint8)

    def add(
        self,
        start: int,
        features: Mapping[str, npt.NDArray[Any]],
        failures: Sequence[Failure],
    ) -> None:
        """Put rows [start, start + n) of the listing in place.

        Args:
            start: the first row, counted in the listing.
            features: dataset name -> (n, ...), every dataset of the store.
            failures: the rows among them that failed; they become NaN in every dataset.
        """
        first = start - self.part.start
        count = len(next(iter(features.values())))
        assert first >= 0, "a batch begins before its part"
        assert first + count <= len(self.part), "a batch crosses a part"
        assert set(features) == set(self._features), "a layer is missing"
        assert (self._status[first : first + count] == Status.ABSENT).all(), "rows came twice"
        self._status[first : first + count] = Status.OK
        for name, rows in features.items():
            stored = self._features[name]
            # numpy would broadcast a row over the others, or cast 1e6 to infinity, without a word.
            assert rows.shape == (count, *stored.shape[1:]), f"{name} has shape {rows.shape}"
            assert rows.dtype == stored.dtype, f"{name} is {rows.dtype}"
            stored[first : first + count] = rows
        for failure in failures:
            row = failure.row - self.part.start
            assert first <= row < first + count, "a failure outside its batch"
            assert failure.status not in (Status.OK, Status.ABSENT), "a failure without a reason"
            self._status[row] = failure.status
            for stored in self._features.values():
                stored[row] = np.nan
        self.failures.extend(failures)

    def build(
        self, header: StoreHeader, listing: Listing, grid: layout.Grid, codec: str
    ) -> memoryview:
        """The part as the bytes of an HDF5 file, checked by reading them back.

        Args:
            header: root attributes.
            listing: of the whole run; this part's keys and labels are taken from it.
            grid: of the whole run.
            codec: filter of the feature datasets.
        """
        assert Status.ABSENT not in self._status, "a row of the part never arrived"
        buffer = io.BytesIO()
        rows = slice(self.part.start, self.part.stop)
        columns = {
            layout.KEY: listing.keys[rows],
            layout.LABEL: listing.labels[rows],
            layout.STATUS: self._status,
        }
        with h5py.File(buffer, "w", libver=layout.LIBVER) as file:
            file.attrs.update(layout.root_attributes(header, complete=False))
            file.attrs.update(part=self.part.index, start=self.part.start, codec=codec)
            make_groups(file)
            for name, values in columns.items():
                _write_rows(file, name, values, grid, grid.column_chunk_rows, {})
            for name, values in self._features.items():
                spec = self._specs[name]
                chunk = grid.chunk_rows(spec.row_bytes, codec != "none")
                path = f"{layout.FEATURES}/{name}"
                dataset = _write_rows(file, path, values, grid, chunk, codecs.filters(codec))
                dataset.attrs.update(layout.layer_attributes(spec))
            file[layout.STATUS].attrs["names"] = layout.status_names()
            write_classes(file, listing.classes)
            write_failures(file, self.failures)
        self._check(buffer, columns)
        return buffer.getbuffer()

    def _check(self, buffer: io.BytesIO, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        features = {f"{layout.FEATURES}/{name}": rows for name, rows in self._features.items()}
        with h5py.File(buffer, "r") as file:
            for path, values in {**columns, **features}.items():
                dataset = file[path]
                assert layout.chunk_checksums(dataset[:], dataset.chunks[0]).tolist() == (
                    file[f"{layout.CHECKSUMS}/{path}"][:].tolist()
                ), f"{path} reads back differently"
                assert dataset.shape == values.shape


def _write_rows(
    file: h5py.File,
    path: str,
    values: npt.NDArray[Any],
    grid: layout.Grid,
    chunk_rows: int,
    filters: Mapping[str, Any],
) -> h5py.Dataset:
    dataset = file.create_dataset(
        path,
        data=values,
        chunks=(chunk_rows, *values.shape[1:]),
        maxshape=(grid.slots, *values.shape[1:]),
        fillvalue=np.nan if values.dtype.kind == "f" else None,
        **filters,
    )
    file[f"{layout.CHECKSUMS}/{path}"] = layout.chunk_checksums(values, chunk_rows)
    return dataset


def make_groups(file: h5py.File) -> None:
    """The groups of the format; those HDF5 makes by itself would carry the time of day."""
    for name in (layout.FEATURES, layout.CHECKSUMS, f"{layout.CHECKSUMS}/{layout.FEATURES}"):
        file.create_group(name)


def write_classes(file: h5py.File, classes: Sequence[str]) -> None:
    """/classes: (C,) fixed-length UTF-8 bytes."""
    file[layout.CLASSES] = layout.text_array(classes)


def write_failures(file: h5py.File, failures: Iterable[Failure]) -> None:
    """/failures: the failed rows' position, exception name and message, in order of rows."""
    ordered = sorted(failures, key=lambda failure: failure.row)
    group = file.create_group(layout.FAILURES)
    group["row"] = np.array([f.row for f in ordered], dtype=np.int64)
    group["error"] = layout.text_array([f.error for f in ordered])
    printable = [f.message.encode("utf-8", "backslashreplace").decode() for f in ordered]
    group["message"] = layout.text_array(printable)


def read_failures(file: h5py.File) -> list[Failure]:
    """What `write_failures` wrote, joined with the keys and statuses of the same file."""
    group = file[layout.FAILURES]
    start = int(file.attrs.get("start", 0))
    keys, status = file[layout.KEY], file[layout.STATUS]
    return [
        Failure(
            row=int(row),
            key=bytes(keys[row - start]),
            status=Status(int(status[row - start])),
            error=error.decode("utf-8", "surrogateescape"),
            message=message.decode("utf-8", "surrogateescape"),
        )
        for row, error, message in zip(
            group["row"][:], group["error"][:], group["message"][:], strict=True
        )
    ]
