"""Rows -> one part: an HDF5 file built in memory, read back, and only then handed out."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.base.machine import num_cpus
from featx.errors import require
from featx.storage.local_folder import reads_back_differently
from featx.store import codecs, layout
from featx.store.attribute_checksums import check_texts, seal_texts
from featx.store.chunk_table import write_chunk_table
from featx.store.dtypes import hdf5_type, nan, raw_dtype, read_raw, write_raw
from featx.store.failures import write_failures
from featx.store.filter_pipeline import Pipeline
from featx.store.listing import make_groups, row_values, write_classes
from featx.store.manifest import Run
from featx.types import UNKNOWN_IMAGE, Failure, LayerSpec, Listing, Part, Status


class PartBuilder:
    """The rows of one part as they arrive, each put at its own place.

    Rows that never arrive keep the fill, NaN and status 255; `build` refuses a part that has any.
    """

    def __init__(self, part: Part, specs: Sequence[LayerSpec]) -> None:
        self.part = part
        self.failures: list[Failure] = []
        self._specs = {spec.name: spec for spec in specs}
        self._features = {
            spec.name: np.full(
                (len(part), *spec.shape), nan(spec.dtype), dtype=raw_dtype(spec.dtype)
            )
            for spec in specs
        }
        self._status = np.full(len(part), Status.ABSENT, dtype=np.uint8)
        self._checksums = np.full(len(part), UNKNOWN_IMAGE, dtype=np.uint64)

    def add(
        self,
        start: int,
        features: Mapping[str, npt.NDArray[Any]],
        failures: Sequence[Failure],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Put rows [start, start + n) of the listing in place.

        Args:
            start: the first row, counted in the listing.
            features: dataset name -> (n, ...), every dataset of the run; bfloat16 as uint16.
            failures: the rows among them that failed; they become NaN in every dataset.
            checksums: (n,) of the encoded images they were computed from; None where not known.
        """
        first = start - self.part.start
        count = len(next(iter(features.values())))
        require(first >= 0, "a batch begins before its part")
        require(first + count <= len(self.part), "a batch crosses a part")
        require(set(features) == set(self._features), "a layer is missing")
        require((self._status[first : first + count] == Status.ABSENT).all(), "rows came twice")
        self._status[first : first + count] = Status.OK
        if checksums is not None:
            self._checksums[first : first + count] = checksums
        for name, rows in features.items():
            stored = self._features[name]
            # numpy would broadcast a row over the others, or cast 1e6 to infinity, without a word.
            require(rows.shape == (count, *stored.shape[1:]), f"{name} has shape {rows.shape}")
            require(rows.dtype == stored.dtype, f"{name} is {rows.dtype}")
            stored[first : first + count] = rows
        for failure in failures:
            row = failure.row - self.part.start
            require(first <= row < first + count, "a failure outside its batch")
            require(failure.status not in (Status.OK, Status.ABSENT), "a failure without a reason")
            self._status[row] = failure.status
            for name, stored in self._features.items():
                stored[row] = nan(self._specs[name].dtype)
        self.failures.extend(failures)

    def build(self, run: Run, listing: Listing, manifest: bytes) -> memoryview:
        """The part as the bytes of an HDF5 file, checked by reading them back.

        Args:
            run: that the part belongs to.
            listing: of the whole store; this part's keys, labels and columns are taken from it.
            manifest: a copy of featx.json, from which a lost one can be put back.

        Raises:
            RunError: it reads back differently.
        """
        require(Status.ABSENT not in self._status, "a row of the part never arrived")
        buffer = io.BytesIO()
        rows = slice(self.part.start, self.part.stop)
        columns = {
            **{path: values[rows] for path, values in row_values(listing).items()},
            layout.STATUS: self._status,
            layout.IMAGE_CHECKSUM: self._checksums,
        }
        with h5py.File(buffer, "w", libver=layout.LIBVER) as file:
            file.attrs.update(layout.root_attributes(run.header, run.digest, complete=False))
            file.attrs.update(part=self.part.index, start=self.part.start, codec=run.codec)
            file.attrs["num_failures"] = len(self.failures)
            make_groups(file, listing)
            make_feature_groups(file)
            extent = Extent(len(self.part), run.grid.slots, run.grid.column_chunk_rows)
            create_columns(file, columns, extent)
            for spec in self._specs.values():
                chunk_rows = run.grid.chunk_rows(spec.row_bytes, run.codec != "none")
                create_layer(file, spec, replace(extent, chunk_rows=chunk_rows), run.codec)
            seal_texts(file, buffer)
            write_columns(file, columns)
            for name, values in self._features.items():
                dataset = file[f"{layout.FEATURES}/{name}"]
                _write_rows(dataset, values)
                sums = layout.chunk_checksums(values, dataset.chunks[0])
                file[f"{layout.CHECKSUMS}/{layout.FEATURES}/{name}"] = sums
            file.attrs[layout.MANIFEST] = np.bytes_(manifest)
            write_classes(file, listing.classes)
            write_failures(file, self.failures)
            write_chunk_table(file, run.digest, 1, self.part.start)
        self._check(buffer, columns)
        return buffer.getbuffer()

    def _check(self, buffer: io.BytesIO, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        features = {f"{layout.FEATURES}/{name}": rows for name, rows in self._features.items()}
        with h5py.File(buffer, "r") as file:
            check_texts(file, lambda size, at: bytes(buffer.getbuffer()[at : at + size]))
            for path, values in {**columns, **features}.items():
                dataset = file[path]
                found = read_raw(dataset, 0, len(dataset))
                sums = layout.chunk_checksums(found, dataset.chunks[0])
                stored = file[f"{layout.CHECKSUMS}/{path}"][:]
                if dataset.shape != values.shape or sums.tolist() != stored.tolist():
                    name = layout.part_name(self.part.index)
                    raise reads_back_differently(f"{layout.PARTS}/{name}", path)


@dataclass(frozen=True)
class Extent:
    """How long a dataset is: its rows, the rows there is room for, and the rows of a chunk."""

    num_rows: int
    max_rows: int
    chunk_rows: int


def create_layer(file: h5py.File, spec: LayerSpec, extent: Extent, codec: str) -> None:
    """An empty dataset for the rows of one layer, with its attributes."""
    dataset = file.create_dataset(
        f"{layout.FEATURES}/{spec.name}",
        shape=(extent.num_rows, *spec.shape),
        dtype=h5py.Datatype(hdf5_type(spec.dtype)),
        chunks=(extent.chunk_rows, *spec.shape),
        maxshape=(extent.max_rows, *spec.shape),
        fillvalue=np.nan,
        **codecs.filters(codec),
    )
    dataset.attrs.update(layout.layer_attributes(spec))


def _write_rows(dataset: h5py.Dataset, rows: npt.NDArray[Any]) -> None:
    """Fill a dataset with its rows; chunks are compressed in threads of our own.

    h5py does it under one lock: two threads write half as fast again without it.
    """
    pipeline = Pipeline.of(dataset)
    step = dataset.chunks[0]
    if dataset.id.get_create_plist().get_nfilters() == 0 or not pipeline.supported:
        write_raw(dataset, 0, rows)
        return

    def encoded(start: int) -> bytes:
        chunk = rows[start : start + step]
        if len(chunk) < step:  # HDF5 stores whole chunks; what is beyond the rows is never read
            rest = np.zeros((step - len(chunk), *rows.shape[1:]), rows.dtype)
            chunk = np.concatenate([chunk, rest])
        return pipeline.encode(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))

    starts = range(0, len(rows), step)
    rest = (0,) * (rows.ndim - 1)
    with ThreadPoolExecutor(num_cpus()) as threads:
        for start, data in zip(starts, threads.map(encoded, starts), strict=True):
            dataset.id.write_direct_chunk((start, *rest), data)


def create_columns(
    file: h5py.File, columns: Mapping[str, npt.NDArray[Any]], extent: Extent
) -> None:
    """/key, /label, /status, /image_checksum and /columns, empty, for values of these types."""
    for name, values in columns.items():
        file.create_dataset(
            name,
            shape=(extent.num_rows,),
            dtype=values.dtype,
            chunks=(extent.chunk_rows,),
            maxshape=(extent.max_rows,),
        )
    file[layout.STATUS].attrs["names"] = layout.status_names()


def write_columns(file: h5py.File, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Fill what `create_columns` made, each with its checksums."""
    for name, values in columns.items():
        file[name][:] = values
        sums = layout.chunk_checksums(values, file[name].chunks[0])
        file[f"{layout.CHECKSUMS}/{name}"] = sums


def make_feature_groups(file: h5py.File) -> None:
    """The groups of a file with features, beside those of its listing."""
    for name in (layout.FEATURES, f"{layout.CHECKSUMS}/{layout.FEATURES}"):
        file.create_group(name)
