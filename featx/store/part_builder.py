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
from featx.store.checksums import chunks_with_verdict
from featx.store.chunk_table import write_chunk_table
from featx.store.dtypes import hdf5_type, nan, raw_dtype
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import check_texts, seal_texts
from featx.store.layout import geometry_values
from featx.store.listing import make_groups, row_values, write_classes
from featx.store.manifest import Run
from featx.store.result_files import write_failures
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
            layers = {f"{layout.FEATURES}/{name}": v for name, v in self._features.items()}
            for path, values in {**columns, **layers}.items():
                self._check_chunks(file, path, values)
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

    def _write_layer(self, dataset: h5py.Dataset, name: str) -> npt.NDArray[np.uint64]:
        """Write all rows of a layer; return the checksums of its chunks."""
        return write_chunks(dataset, self._features[name])

    def _check_chunks(self, file: h5py.File, path: str, values: npt.NDArray[Any]) -> None:
        """Read a dataset back, chunk by chunk, and compare it with its checksums and values."""
        is_same = file[path].shape == values.shape and all(
            good and layout.checksum(rows) == layout.checksum(values[start : start + len(rows)])
            for start, rows, good in chunks_with_verdict(file, path)
        )
        if not is_same:
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


def write_chunks(dataset: h5py.Dataset, values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Fill a dataset; return the checksums of its chunks, which several threads encode.

    h5py compresses under one lock; without it, two threads write half as fast again.
    """
    pipeline, step, rest = Pipeline.of(dataset), dataset.chunks[0], (0,) * (dataset.ndim - 1)
    starts = range(0, len(values), step)

    def encode(start: int) -> tuple[bytes, int]:
        data = pipeline.encode(whole_chunk(values[start : start + step], step))
        return data, layout.checksum(data)

    with ThreadPoolExecutor(num_cpus()) as threads:
        encoded = threads.map(encode, starts) if len(pipeline) else map(encode, starts)
        sums = []
        for start, (data, checksum) in zip(starts, encoded, strict=True):
            dataset.id.write_direct_chunk((start, *rest), data)
            sums.append(checksum)
    return np.array(sums, np.uint64)


def whole_chunk(rows: npt.NDArray[Any], step: int) -> npt.NDArray[Any]:
    """Rows as HDF5 stores them in chunks of `step` rows: zeros follow, which are never read."""
    if len(rows) < step:
        rows = np.concatenate([rows, np.zeros((step - len(rows), *rows.shape[1:]), rows.dtype)])
    return np.ascontiguousarray(rows)


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
        file[f"{layout.CHECKSUMS}/{name}"] = write_chunks(file[name], values)


def make_feature_groups(file: h5py.File) -> None:
    """Create the groups for features and their checksums."""
    for name in (layout.FEATURES, f"{layout.CHECKSUMS}/{layout.FEATURES}"):
        file.create_group(name)
