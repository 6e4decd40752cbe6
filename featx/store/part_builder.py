"""Builds the HDF5 file of a part in memory and checks it by reading it back."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.base import num_cpus
from featx.errors import require
from featx.storage import AtomicFolder, memory_mismatch_error
from featx.store import codecs, layout
from featx.store.attribute_checksums import check_texts, seal_texts
from featx.store.checksums import chunks_with_verdict
from featx.store.chunk_table import write_chunk_table
from featx.store.dtypes import hdf5_type, nan, raw_dtype, write_raw
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
        self._status = np.full(len(part), Status.ABSENT, dtype=np.uint8)
        self._checksums = np.full(len(part), UNKNOWN_IMAGE, dtype=np.uint64)
        self._features = self._empty_features()

    def _empty_features(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays for the rows of each dataset."""
        return {
            name: np.full((len(self.part), *spec.shape), nan(spec.dtype), raw_dtype(spec.dtype))
            for name, spec in self._specs.items()
        }

    def add(
        self,
        start: int,
        features: Mapping[str, npt.NDArray[Any]],
        failures: Sequence[Failure],
        checksums: npt.NDArray[np.uint64] | None = None,
        damaged: Collection[int] = (),
    ) -> None:
        """Add rows [start, start + n) of the listing.

        Args:
            start: first row in the listing.
            features: dataset name -> (n, ...) for every dataset of the run; bfloat16 as uint16
                bits.
            failures: failed rows among them; their values become NaN in every dataset.
            checksums: (n,) uint64 checksums of the encoded images, or None if unknown.
            damaged: rows whose images are damaged and were accepted.
        """
        first = start - self.part.start
        count = len(next(iter(features.values())))
        require(first >= 0, "a batch begins before its part")
        require(first + count <= len(self.part), "a batch crosses a part")
        require(set(features) == set(self._specs), "a layer is missing")
        require((self._status[first : first + count] == Status.ABSENT).all(), "rows came twice")
        self._status[first : first + count] = Status.OK
        for row in damaged:
            require(start <= row < start + count, "a damaged image outside its batch")
            self._status[row - self.part.start] = Status.IMAGE_DAMAGED
        if checksums is not None:
            self._checksums[first : first + count] = checksums
        for name, rows in features.items():
            spec = self._specs[name]
            # numpy would silently broadcast one row over the others, or cast 1e6 to infinity.
            require(rows.shape == (count, *spec.shape), f"{name} has shape {rows.shape}")
            require(rows.dtype == raw_dtype(spec.dtype), f"{name} is {rows.dtype}")
        for failure in failures:
            row = failure.row - self.part.start
            require(first <= row < first + count, "a failure outside its batch")
            is_reason = not failure.status.has_features and failure.status != Status.ABSENT
            require(is_reason, "a failure without a reason")
            self._status[row] = failure.status
        failed = [failure.row - self.part.start - first for failure in failures]
        for name, rows in features.items():
            self._put(name, first, rows, failed)
        self.failures.extend(failures)

    def _put(self, name: str, first: int, rows: npt.NDArray[Any], failed: list[int]) -> None:
        """Keep rows of a dataset."""
        stored = self._features[name]
        stored[first : first + len(rows)] = rows
        for index in failed:
            stored[first + index] = nan(self._specs[name].dtype)

    def publish(
        self, disk: AtomicFolder, path: Path, run: Run, listing: Listing, manifest: bytes
    ) -> bool:
        """Commit the part under its final name.

        Args:
            disk: writes to the store.
            path: final name.
            run: run that the part belongs to.
            listing: listing of the whole store.
            manifest: content of featx.json.

        Returns:
            whether the file was created. If not, the name was taken, and the existing file is kept.

        Raises:
            RunError: the disk is full or fails, or the file reads back differently.
        """
        return disk.publish(path, self.build(run, listing, manifest))

    def discard(self) -> None:
        """Delete the temporary files of a part that is not published."""

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
        self._require_all_rows()
        buffer = io.BytesIO()
        columns = self._columns(listing)
        self._fill(buffer, columns, run, listing, manifest)
        with h5py.File(buffer, "r") as file:
            check_texts(file, lambda size, start: bytes(buffer.getbuffer()[start : start + size]))
            for path, length in self._shapes(columns).items():
                self._check_chunks(file, path, length)
        return buffer.getbuffer()

    def _require_all_rows(self) -> None:
        require(Status.ABSENT not in self._status, "a row of the part never arrived")

    def _columns(self, listing: Listing) -> dict[str, npt.NDArray[Any]]:
        """Dataset path -> values of the part, for all datasets but the layers."""
        rows = slice(self.part.start, self.part.stop)
        return {
            **{path: values[rows] for path, values in row_values(listing).items()},
            layout.STATUS: self._status,
            layout.IMAGE_CHECKSUM: self._checksums,
        }

    def _fill(
        self,
        buffer: io.RawIOBase | io.BytesIO,
        columns: Mapping[str, npt.NDArray[Any]],
        run: Run,
        listing: Listing,
        manifest: bytes,
    ) -> None:
        """Write the HDF5 file into a file object in memory."""
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
                tokens = run.tokens.get(spec.name)
                create_layer(file, spec, replace(extent, chunk_rows=chunk_rows), run.codec, tokens)
            # All texts are in the file now, and no rows yet, which could be mistaken for heaps.
            seal_texts(file, buffer)
            write_columns(file, columns)
            for name in self._specs:
                sums = self._write_layer(file[f"{layout.FEATURES}/{name}"], name)
                file[f"{layout.CHECKSUMS}/{layout.FEATURES}/{name}"] = sums
            file.attrs[layout.MANIFEST_COPY] = np.bytes_(manifest)
            write_classes(file, listing.classes)
            write_failures(file, self.failures)
            write_chunk_table(file, run.digest, 1, self.part.start)

    def _write_layer(self, dataset: h5py.Dataset, name: str) -> npt.NDArray[np.uint32]:
        """Write all rows of a layer; return the checksums of its chunks."""
        values = self._features[name]
        write_rows(dataset, values)
        return layout.chunk_checksums(values, dataset.chunks[0])

    def _shapes(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
        """Dataset path -> shape that it must have."""
        layers = {f"{layout.FEATURES}/{name}": rows for name, rows in self._features.items()}
        return {path: values.shape for path, values in {**columns, **layers}.items()}

    def _check_chunks(self, file: h5py.File, path: str, shape: tuple[int, ...]) -> None:
        """Read a dataset back, chunk by chunk, and compare it with its checksums."""
        is_good = all(good for _, _, good in chunks_with_verdict(file, path))
        if file[path].shape != shape or not is_good:
            name = layout.part_name(self.part.index)
            raise memory_mismatch_error(f"{layout.PARTS}/{name}", path)


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
    """Create an empty dataset for the rows of a layer, with its attributes."""
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


def write_rows(dataset: h5py.Dataset, rows: npt.NDArray[Any]) -> None:
    """Fill a dataset; chunks are compressed in several threads.

    h5py compresses under one lock; without it, two threads write half as fast again.
    """
    pipeline = Pipeline.of(dataset)
    step = dataset.chunks[0]
    if dataset.id.get_create_plist().get_nfilters() == 0 or not pipeline.is_supported:
        write_raw(dataset, 0, rows)
        return

    def encode(start: int) -> bytes:
        chunk = rows[start : start + step]
        if len(chunk) < step:  # HDF5 stores whole chunks; the padding is never read
            rest = np.zeros((step - len(chunk), *rows.shape[1:]), rows.dtype)
            chunk = np.concatenate([chunk, rest])
        return pipeline.encode(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))

    starts = range(0, len(rows), step)
    rest = (0,) * (rows.ndim - 1)
    with ThreadPoolExecutor(num_cpus()) as threads:
        for start, data in zip(starts, threads.map(encode, starts), strict=True):
            dataset.id.write_direct_chunk((start, *rest), data)


def create_columns(
    file: h5py.File, columns: Mapping[str, npt.NDArray[Any]], extent: Extent
) -> None:
    """Create /key, /label, /status, /image_checksum and /columns without values."""
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
