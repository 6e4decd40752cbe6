"""Files of statistics during a run: one per part, merged upwards along a fixed binary tree.

Any number of processes may commit parts at the same time. A merged file has the same bytes whoever
writes it, and exists before its two halves are deleted. If two processes merge the same halves, the
second changes nothing, and a half that was not deleted is covered by the larger file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import StatsLayer, cut_row, is_aligned
from featx.analysis.statistics.stats_file import (
    PARTS_FOLDER,
    STATS_FORMAT,
    DamagedError,
    attributes_of,
    file_bytes,
    read_checksums,
    read_failures,
    read_layer,
    reading,
)
from featx.base import differences, digest
from featx.errors import StoreError, StoreMismatchError, require
from featx.storage import AtomicFolder
from featx.store import layout
from featx.types import UNKNOWN_IMAGE, Failure, Part, StoreHeader


class _Contents(NamedTuple):
    """Contents of a file for a span of rows."""

    moments: Mapping[str, Moments]
    failures: Sequence[Failure]
    checksums: npt.NDArray[np.uint64]


class MomentsTree:
    """Files below stats-parts/, each with all layers over one span of rows.

    When both halves of an aligned span exist, they are merged into one file, so that only a few
    files exist at a time.

    Args:
        disk: folder that contains `path`.
        path: final file, stats.h5.
        header: header of the run; its fingerprint contains everything that changes values, layers
            included.
        num_rows: number of rows of the listing.
        layers: layers whose statistics are computed.
        threads: number of CPU threads that compute one batch, or None on other devices.
    """

    def __init__(
        self,
        disk: AtomicFolder,
        path: Path,
        header: StoreHeader,
        num_rows: int,
        layers: Sequence[StatsLayer],
        threads: int | None = None,
    ) -> None:
        self.disk = disk
        self.path = path
        self.folder = path.with_name(PARTS_FOLDER)
        self.num_rows = num_rows
        self._header = header
        self._threads = threads
        self._layers = {layer.spec.name: layer for layer in layers}

    def commit(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> Sequence[Failure]:
        """Commit the moments of a part; they are on disk when this returns.

        If another process has committed the part before, its file is kept.

        Returns:
            the failures of the part as committed.
        """
        require(set(moments) == set(self._layers), "a layer is missing")
        require(
            part.start % layout.power_of_two_at_least(len(part)) == 0, f"{part} is off the tree"
        )
        require(is_aligned(part.start, part.stop) or part.stop == self.num_rows, f"{part} is short")
        for name, layer in self._layers.items():
            expected = (len(part) - len(failures)) * layer.rows_per_image
            m = moments[name]
            require((m.count, m.dim, m.kind) == (expected, layer.dim, layer.kind), name)
        if checksums is None:
            checksums = np.full(len(part), UNKNOWN_IMAGE, dtype=np.uint64)
        require(len(checksums) == len(part), "a checksum is missing")
        sorted_failures = sorted(failures, key=lambda failure: failure.row)
        path = self.file(part.start, part.stop)
        contents = _Contents(moments, sorted_failures, checksums)
        # The failures of the file that exists are returned, because the other process may have
        # failed on other images. If that file is gone, it has been merged into a larger one.
        if not self._publish(path, part.start, part.stop, contents):
            try:
                sorted_failures = list(self.failures_in(path))
            except StoreError:
                if path.exists():
                    raise
        self._merge_upwards(part.start, part.stop)
        return sorted_failures

    def write(
        self,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        """Write the final file from the moments of all rows."""
        contents = _Contents(moments, failures, checksums)
        created = self._publish(self.path, 0, self.num_rows, contents)
        require(created, f"another process wrote {self.path} without the lock")

    def merge_all(self) -> tuple[Failure, ...]:
        """Merge all files into the final one.

        Returns:
            the images that were left out, in order of rows.
        """
        merged = self._merge_span(0, self.num_rows)
        self.write(merged.failures, merged.moments, merged.checksums)
        return tuple(merged.failures)

    def file(self, start: int, stop: int) -> Path:
        """Return the path of the file of a span, which need not exist."""
        return self.folder / f"rows-{start:010d}-{stop:010d}.h5"

    def check_file(self, path: Path, start: int, stop: int) -> tuple[Failure, ...]:
        """Check a file completely, and return the images that it left out."""
        with reading(path) as file:
            root = attributes_of(file)
            self._check(path, root, start, stop)
            for name in self._layers:
                read_layer(file, path, name, root)
            read_checksums(file, path, root)
            return read_failures(file, path, root)

    def failures_in(self, path: Path) -> tuple[Failure, ...]:
        """Return the images that an intact file left out, without checking its numbers."""
        with reading(path, compare=False) as file:
            return read_failures(file, path, attributes_of(file))

    def checksums_in(self, path: Path) -> npt.NDArray[np.uint64]:
        """Return the (n,) uint64 image checksums of an accepted file without checking its
        numbers."""
        with reading(path, compare=False) as file:
            return read_checksums(file, path, attributes_of(file))

    def _merge_upwards(self, start: int, stop: int) -> None:
        """Merge a span with its other half, then the result with its other half, while these
        exist."""
        while is_aligned(start, stop):
            size = stop - start
            lower, upper = sorted([start, start ^ size])
            halves = [self.file(lower, lower + size), self.file(upper, upper + size)]
            if not all(half.exists() for half in halves):
                return
            start, stop = lower, upper + size
            try:
                joined = self._merge_halves(start, stop)
            except StoreError:
                if all(half.exists() for half in halves):
                    raise
                return  # another process has merged them
            # The merged file is on disk before its halves are deleted, so a kill loses nothing.
            self._publish(self.file(start, stop), start, stop, joined)
            for half in halves:
                self.disk.remove(half)

    def _merge_span(self, start: int, stop: int) -> _Contents:
        """Return the contents of a span, from its file or from the files within it."""
        path = self.file(start, stop)
        if not path.exists():
            if stop - start == 1:
                raise StoreError(
                    f"no file in {self.folder} has row {start} any more. Give the same command "
                    "again to compute it."
                )
            return self._merge_halves(start, stop)
        with reading(path) as file:
            root = attributes_of(file)
            self._check(path, root, start, stop)
            moments = {name: read_layer(file, path, name, root)[0] for name in self._layers}
            failures, checksums = read_failures(file, path, root), read_checksums(file, path, root)
            return _Contents(moments, failures, checksums)

    def _merge_halves(self, start: int, stop: int) -> _Contents:
        """Merge the contents of the two halves of a span."""
        cut = cut_row(start, stop)
        lower, upper = self._merge_span(start, cut), self._merge_span(cut, stop)
        below, above = dict(lower.moments), dict(upper.moments)
        lower, upper = lower._replace(moments={}), upper._replace(moments={})
        # pop: the two matrices of a layer are freed as soon as their sum exists.
        moments = {name: below.pop(name).merge(above.pop(name)) for name in self._layers}
        return _Contents(
            moments,
            [*lower.failures, *upper.failures],
            np.concatenate([lower.checksums, upper.checksums]),
        )

    def _publish(self, path: Path, start: int, stop: int, contents: _Contents) -> bool:
        """Write a file unless it exists, and return whether it was written."""
        root = self._root(start, stop, len(contents.failures), complete=path == self.path)
        return self.disk.publish(path, file_bytes(root, self._layers, *contents))

    def _root(self, start: int, stop: int, num_failed: int, complete: bool) -> dict[str, Any]:
        """Return the root attributes: those of a store, with those of statistics."""
        identity = digest(self._header.fingerprint)
        attributes = layout.root_attributes(self._header, identity, complete)
        del attributes["featx_format"]  # featx.open must not open it as a store
        return {
            "featx_stats": STATS_FORMAT,
            **attributes,
            "settings": json.dumps(dict(self._header.fingerprint), sort_keys=True),
            **({} if self._threads is None else {"threads": self._threads}),
            "start": start,
            "stop": stop,
            "num_failed": num_failed,
        }

    def _check(self, path: Path, attributes: Mapping[str, Any], start: int, stop: int) -> None:
        """Check that a file belongs to this run and to these rows."""
        settings = dict(self._header.fingerprint)
        if attributes["fingerprint"] != digest(settings):
            stored = json.loads(attributes["settings"])
            changes = differences(stored, settings)
            lines = [f"{key}: {old!r}, now {new!r}" for key, old, new in changes]
            raise StoreMismatchError(
                f"{path} was made with other settings: {'; '.join(lines)}. Give those, choose "
                "another out=DIR, or overwrite=true."
            )
        if (attributes["start"], attributes["stop"]) != (start, stop):
            raise DamagedError(
                f"{path} holds rows {attributes['start']} to {attributes['stop']}, expected "
                f"{start} to {stop}."
            )


def spans_in(folder: Path) -> list[tuple[int, int]]:
    """Rows [start, stop) of each file of moments in a folder, the largest spans first."""
    spans = [_span_of(path) for path in sorted(folder.glob("rows-*.h5"))]
    return sorted(spans, key=lambda span: span[0] - span[1])


def _span_of(path: Path) -> tuple[int, int]:
    """Parse the rows from the name of a file."""
    try:
        _, start, stop = path.stem.split("-")
        return int(start), int(stop)
    except ValueError as error:
        raise StoreError(f"{path} is no file of featx; move it away.") from error
