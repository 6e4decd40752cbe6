"""Builds the HDF5 file of a part: in memory, or on the disk as its rows come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.errors import require
from featx.store import layout
from featx.store.chunk_file import ChunkFile
from featx.store.dtypes import nan, raw_dtype
from featx.store.listing import row_values
from featx.store.manifest import Run
from featx.store.row_file import RowFile
from featx.types import UNKNOWN_IMAGE, Array, Failure, LayerSpec, Listing, Part, Status


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
                spec.name: np.full((len(part), *spec.shape), nan(spec.dtype), raw_dtype(spec.dtype))
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

    def _put(self, name: str, first: int, rows: Array, failed: list[int]) -> None:
        """Write rows of a dataset, or keep them."""
        if self.file is None:
            kept = self._features[name][first : first + len(rows)]
            kept[:] = rows
            kept[failed] = nan(self._specs[name].dtype)
            return
        if failed:
            rows = rows.copy()
            rows[failed] = nan(self._specs[name].dtype)
        self.file.append(f"{layout.FEATURES}/{name}", first, rows)

    def discard(self) -> None:
        """Delete the temporary file of a part that is not published."""
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
