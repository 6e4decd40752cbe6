"""Builds the HDF5 file of a part in memory and checks it by reading it back."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.base import num_cpus
from featx.errors import require
from featx.storage import reads_back_differently
from featx.store import codecs, layout
from featx.store.attribute_checksums import check_texts, seal_texts
from featx.store.chunk_table import write_chunk_table
from featx.store.dtypes import hdf5_type, nan, raw_dtype, read_raw, write_raw
from featx.store.failures import write_failures
from featx.store.filter_pipeline import Pipeline
from featx.store.listing import make_groups, row_values, write_classes
from featx.store.manifest import Run
from featx.store.token_geometry import geometry_values
from featx.types import UNKNOWN_IMAGE, Failure, LayerSpec, Listing, Part, Status, TokenGeometry


class PartBuilder:
    """Rows of one part, collected batch by batch.

    Rows that were never added keep NaN and status 255; `build` refuses such a part.

    Args:
        part: rows of the part.
        specs: datasets of the part.

    Attributes:
        part: rows of the part.
        failures: failed rows added so far.
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
        """Add rows [start, start + n) of the listing.

        Args:
            start: first row in the listing.
            features: dataset name -> (n, ...) for every dataset of the run; bfloat16 as uint16
                bits.
            failures: failed rows among them; their values become NaN in every dataset.
            checksums: (n,) uint64 checksums of the encoded images, or None if unknown.
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
            # numpy would silently broadcast one row over the others, or cast 1e6 to infinity.
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
        """Build the HDF5 file in memory and check it.

        Args:
            run: run that the part belongs to.
            listing: listing of the whole store; the part gets its keys, labels and columns.
            manifest: content of featx.json; every part carries a copy, for a store that loses it.

        Returns:
            bytes of the file.

        Raises:
            RunError: the file reads back differently.
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
                places = run.tokens.get(spec.name)
                create_layer(file, spec, replace(extent, chunk_rows=chunk_rows), run.codec, places)
            # All texts are in the file now, and no rows yet, which could be mistaken for heaps.
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
        """Read the file back and compare every dataset with what was written."""
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
    """Length of a dataset.

    Attributes:
        num_rows: number of rows.
        max_rows: largest number of rows that it can be resized to.
        chunk_rows: rows per chunk.
    """

    num_rows: int
    max_rows: int
    chunk_rows: int


def create_layer(
    file: h5py.File,
    spec: LayerSpec,
    extent: Extent,
    codec: str,
    tokens: TokenGeometry | None = None,
) -> None:
    """Create an empty dataset for the rows of a layer, with its attributes.

    Args:
        file: file open for writing.
        spec: description of the dataset.
        extent: its length.
        codec: codec of the run.
        tokens: places of its tokens, if it has any.
    """
    dataset = file.create_dataset(
        f"{layout.FEATURES}/{spec.name}",
        shape=(extent.num_rows, *spec.shape),
        dtype=h5py.Datatype(hdf5_type(spec.dtype)),
        chunks=(extent.chunk_rows, *spec.shape),
        maxshape=(extent.max_rows, *spec.shape),
        fillvalue=np.nan,
        **codecs.filters(codec),
    )
    dataset.attrs.update({**layout.layer_attributes(spec), **geometry_values(tokens)})


def _write_rows(dataset: h5py.Dataset, rows: npt.NDArray[Any]) -> None:
    """Fill a dataset; chunks are compressed in several threads.

    h5py compresses under one lock; without it, two threads write half as fast again.
    """
    pipeline = Pipeline.of(dataset)
    step = dataset.chunks[0]
    if dataset.id.get_create_plist().get_nfilters() == 0 or not pipeline.supported:
        write_raw(dataset, 0, rows)
        return

    def encoded(start: int) -> bytes:
        chunk = rows[start : start + step]
        if len(chunk) < step:  # HDF5 stores whole chunks; the padding is never read
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
    """Create /key, /label, /status, /image_checksum and /columns without values.

    Args:
        file: file open for writing.
        columns: dataset path -> values, of which only the dtypes are used.
        extent: length of the datasets.
    """
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
    """Write the values and checksums of the datasets made by `create_columns`."""
    for name, values in columns.items():
        file[name][:] = values
        sums = layout.chunk_checksums(values, file[name].chunks[0])
        file[f"{layout.CHECKSUMS}/{name}"] = sums


def make_feature_groups(file: h5py.File) -> None:
    """Create the groups for features and their checksums."""
    for name in (layout.FEATURES, f"{layout.CHECKSUMS}/{layout.FEATURES}"):
        file.create_group(name)
