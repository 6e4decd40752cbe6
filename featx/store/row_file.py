"""Files with rows [start, stop) of some layers: what they hold, and the builder of a part."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import require
from featx.store import codecs, layout
from featx.store.chunk_file import ChunkFile
from featx.store.chunk_table import write_chunk_table
from featx.store.dtypes import NAN, hdf5_type, memory_dtype, raw_dtype
from featx.store.hdf5_files import write_attributes, write_values
from featx.store.layout import geometry_values
from featx.store.listing import make_groups, row_values, write_classes
from featx.store.manifest import Manifest, Run
from featx.store.result_files import write_failures
from featx.types import UNKNOWN_IMAGE, Array, Failure, LayerSpec, Listing, Part, Status


@dataclass(frozen=True)
class RowFile:
    """File of a store with rows: a part, or features.h5, whose part is None."""

    start: int
    stop: int
    fingerprint_sha256: str
    runs: tuple[Run, ...]
    part: int | None

    @classmethod
    def of_part(cls, run: Run, part: Part) -> RowFile:
        return cls(part.start, part.stop, run.digest, (run,), part.index)

    @classmethod
    def packed(cls, manifest: Manifest, num_runs: int) -> RowFile:
        runs = manifest.runs[:num_runs]
        stop = max(run.grid.stop_row for run in runs)
        return cls(0, stop, manifest.digest_of(num_runs), runs, None)

    def __len__(self) -> int:
        return self.stop - self.start

    @cached_property
    def layers(self) -> dict[str, tuple[LayerSpec, Run]]:
        """Dataset name -> description, and the first run that computed it."""
        return {spec.name: (spec, run) for run in reversed(self.runs) for spec in run.layers}

    @property
    def attributes(self) -> dict[str, Any]:
        """Root attributes by which the file is recognised, and that describe its rows."""
        is_whole = self.part is None
        part = {} if is_whole else {"part": self.part, "start": self.start}
        header = layout.root_attributes(self.runs[0].header, self.fingerprint_sha256, is_whole)
        return {**header, "codec": self.runs[0].codec, **part}

    def problem(self, file: h5py.File) -> str | None:
        """Reason why, by its attributes, shapes and dtypes, a file is not this one, or None.

        The fingerprint covers listing and layers, so what remains to check is which rows the file
        holds and whether it is complete.
        """
        attrs = file.attrs  # h5py opens the root group at every access
        if attrs["fingerprint"] != self.fingerprint_sha256:
            return "it belongs to another run"
        if int(attrs.get("start", 0)) != self.start:
            return "it holds the rows of another part"
        if self.part is None and ("part" in attrs or not attrs["complete"]):
            return "it is not complete"
        expected: dict[str, tuple[tuple[int, ...], np.dtype[np.generic] | None]]
        expected = dict.fromkeys((layout.KEY, layout.LABEL, layout.STATUS), ((len(self),), None))
        for name, (spec, _) in self.layers.items():
            shape = (len(self), *spec.shape)
            expected[f"{layout.FEATURES}/{name}"] = shape, memory_dtype(spec.dtype)
        for path, (shape, dtype) in expected.items():
            # The low-level interface takes a third of the time, and a store may have 10,000 parts.
            dataset = h5py.h5d.open(file.id, path.encode())
            if dataset.shape != shape or dtype not in (None, dataset.dtype):
                found = f"{dataset.shape} {dataset.dtype}"
                return f"dataset {path} is {found}, expected {shape} {dtype or ''}"
        return None

    def create(self, file: ChunkFile, listing: Listing) -> None:
        """Create all datasets with one entry per row, with their attributes."""
        write_attributes(file.hdf5, self.attributes)
        make_groups(file.hdf5, listing)
        for name in (layout.FEATURES, f"{layout.CHECKSUMS}/{layout.FEATURES}"):
            file.hdf5.create_group(name)

        grid, max_rows = self._grid(self.runs[0])
        types = {path: values.dtype for path, values in row_values(listing).items()}
        types |= {layout.STATUS: np.dtype("u1"), layout.IMAGE_CHECKSUM: np.dtype("<u8")}
        for path, dtype in types.items():
            file.create(path, (len(self),), dtype, grid.column_chunk_rows, max_rows)
        names = json.dumps({int(status): status.label for status in Status})
        write_attributes(file.hdf5[layout.STATUS], {"names": names})

        for spec, run in self.layers.values():
            grid, max_rows = self._grid(run)
            dataset = file.create(
                f"{layout.FEATURES}/{spec.name}",
                (len(self), *spec.shape),
                h5py.Datatype(hdf5_type(spec.dtype)),
                grid.chunk_rows(spec.row_bytes, run.codec != "none"),
                max_rows,
                fillvalue=np.nan,
                **codecs.filters(run.codec),
            )
            tokens = geometry_values(run.tokens.get(spec.name))
            write_attributes(dataset, {**layout.layer_attributes(spec), **tokens})

        file.seal()

    def _grid(self, run: Run) -> tuple[layout.Grid, int]:
        """Division of the rows of a run, and the rows that its datasets can hold."""
        if self.part is not None:
            return run.grid, run.grid.slots
        grid = layout.Grid(self.stop, run.grid.part_rows)
        return grid, len(grid) * grid.slots

    def finish(
        self, file: ChunkFile, listing: Listing, failures: Collection[Failure], manifest: bytes
    ) -> None:
        """Write what describes the rows, all of which are in the file."""
        for path, chunks in file.chunked.items():
            require(chunks.stop == chunks.shape[0], f"rows of {path} never arrived")
            write_values(file.hdf5, f"{layout.CHECKSUMS}/{path}", chunks.sums)
        file.hdf5.attrs[layout.MANIFEST_COPY] = np.bytes_(manifest)
        write_attributes(file.hdf5, {"num_failures": len(failures)})
        write_classes(file.hdf5, listing.classes)
        write_failures(file.hdf5, failures)
        about = self.fingerprint_sha256, len(self.runs), self.start
        write_chunk_table(file.hdf5, file.chunked, *about)


class PartBuilder:
    """Rows of one part, collected batch by batch.

    Rows that were never added keep NaN and status 255; such a part is refused in the end.

    Args:
        part: rows of the part.
        specs: datasets of the part.
        file: file on the disk with all datasets of the part, to which the rows of the layers are
            written as they come, in order; None holds them in memory.
    """

    def __init__(
        self, part: Part, specs: Sequence[LayerSpec], file: ChunkFile | None = None
    ) -> None:
        self.part = part
        self.failures: list[Failure] = []
        self.file = file
        self._specs = {spec.name: spec for spec in specs}
        self._status = np.full(len(part), Status.ABSENT, dtype=np.uint8)
        self._checksums = np.full(len(part), UNKNOWN_IMAGE, dtype=np.uint64)
        self._features: dict[str, Array] = {}
        if file is None:
            self._features = {
                spec.name: np.full((len(part), *spec.shape), NAN[spec.dtype], raw_dtype(spec.dtype))
                for spec in specs
            }

    def add(
        self,
        start: int,
        features: Mapping[str, Array],
        failures: Sequence[Failure],
        checksums: npt.NDArray[np.uint64] | None = None,
        damaged: Collection[int] = (),
    ) -> None:
        """Add rows [start, start + n) of the listing.

        `features` are (n, ...) for every dataset of the run, bfloat16 as uint16 bits; rows that
        failed become NaN. `checksums` are (n,) uint64 of the encoded images, or None if unknown,
        and `damaged` rows whose images are damaged and were accepted.
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
            if self.file is None:
                kept = self._features[name][first : first + count]
                kept[:] = rows
            else:
                kept = rows.copy() if failed else rows
            if failed:
                kept[failed] = NAN[self._specs[name].dtype]
            if self.file is not None:
                self.file.append(f"{layout.FEATURES}/{name}", first, kept)
        self.failures.extend(failures)

    def discard(self) -> None:
        """Delete the temporary file of a part that is not committed."""
        if self.file is not None:
            self.file.discard()

    def build(self, run: Run, listing: Listing, manifest: bytes) -> bytes:
        """Build the HDF5 file in memory; raise RunError if it reads back differently.

        Every part carries a copy of featx.json, the manifest, for a store that loses it.
        """
        with ChunkFile(Path(layout.PARTS, layout.part_name(self.part.index))) as file:
            RowFile.of_part(run, self.part).create(file, listing)
            self.finish(file, run, listing, manifest)
            return file.content()

    def finish(self, file: ChunkFile, run: Run, listing: Listing, manifest: bytes) -> None:
        """Write all that is not in the file of the part yet."""
        require(Status.ABSENT not in self._status, "a row of the part never arrived")
        rows = slice(self.part.start, self.part.stop)
        for path, values in row_values(listing).items():
            file.append(path, 0, values[rows])
        file.append(layout.STATUS, 0, self._status)
        file.append(layout.IMAGE_CHECKSUM, 0, self._checksums)
        for name, values in self._features.items():
            file.append(f"{layout.FEATURES}/{name}", 0, values)
        RowFile.of_part(run, self.part).finish(file, listing, self.failures, manifest)
