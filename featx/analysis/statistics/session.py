"""Write session of statistics: files of complete parts, merged along a fixed binary tree.

Any number of processes may publish parts at the same time; only the process that holds the lock of
the folder merges them. When both halves of an aligned span of rows are complete, their files are
merged into one, so that only a few files exist at a time. A merged file exists before its two
halves are deleted, so a kill loses nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import StatsLayer, cut_row, is_aligned
from featx.analysis.statistics.stats_file import (
    PARTS_FOLDER,
    STATS_FILE,
    STATS_FORMAT,
    STATS_IMAGES,
    Contents,
    DamagedError,
    attributes_of,
    file_bytes,
    read_array,
    read_failures,
    read_layer,
    reading,
)
from featx.base import differences, digest
from featx.errors import LayerError, StoreError, StoreMismatchError, require
from featx.storage import TEMPORARY_PREFIX, AtomicFolder
from featx.store import Grid, clear_job_folders, csv_rows, failures_csv, layout
from featx.types import UNKNOWN_IMAGE, Failure, Json, Part, StoreHeader

logger = logging.getLogger(__name__)

FAILURES_CSV = "stats-failures.csv"
"""File name of the list of failures, apart from that of a store."""


class StatsSession:
    """Files of the statistics of a run: those of complete parts, and the final one.

    Workers call `publish` only. The process of the command, which holds the lock of the folder,
    calls `survey` first.

    Args:
        lock: file descriptor that holds the lock.
        header: header of the run; its fingerprint contains everything that changes values, layers
            included.
        resolved: entries of `Run.resolved` that are no settings, `RESOLVED`.

    Attributes:
        complete: whether the final file of this run exists; known after `survey`.
        is_done: (N,) bool, whether a row is in a complete part.
        checksums: (N,) uint64 image checksums of the rows that `survey` found.
    """

    def __init__(
        self,
        disk: AtomicFolder,
        header: StoreHeader,
        grid: Grid,
        layers: Sequence[StatsLayer],
        resolved: Json = MappingProxyType({}),
        lock: int = -1,
    ) -> None:
        self.root = disk.root
        self.disk = disk
        self.lock = lock
        self.path = disk.root / STATS_FILE
        self.folder = disk.root / PARTS_FOLDER
        self.num_rows = grid.num_rows
        self.complete = False
        self.is_done = np.zeros(grid.num_rows, np.bool_)
        self.checksums = np.full(grid.num_rows, UNKNOWN_IMAGE, np.uint64)
        self._grid = grid
        self._failures: dict[int, Failure] = {}
        self._header = header
        self._layers = {layer.spec.name: layer for layer in layers}
        self._resolved = resolved

    @property
    def failures(self) -> list[Failure]:
        """Images that were left out of the complete rows, in order of rows."""
        return [self._failures[row] for row in sorted(self._failures)]

    @property
    def num_failed(self) -> int:
        """Number of images that were left out."""
        return len(self._failures)

    @property
    def num_committed(self) -> int:
        """Number of rows in complete parts."""
        return int(self.is_done.sum())

    def survey(self) -> None:
        """Find complete parts, set damaged files aside, delete leftovers of killed processes."""
        self.disk.make_folder(self.root)  # a killed process may not have synced it
        if self.path.exists() and self._record_file(self.path, 0, self.num_rows):
            self.complete = True
            self.disk.remove(self.folder)
            return
        self.disk.make_folder(self.folder)
        for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            self.disk.remove(leftover)
        for start, stop in spans_in(self.folder):
            path = self.file(start, stop)
            if self.is_done[start:stop].all():
                self.disk.remove(path)  # a kill between the merge and the deletion left it
            else:
                self._record_file(path, start, stop)

    def missing(self) -> list[Part]:
        """Return the parts that are not complete, in order."""
        parts = map(self._grid.part, range(len(self._grid)))
        return [part for part in parts if not self.is_done[part.start : part.stop].all()]

    def publish(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: dict[str, Moments],
        checksums: npt.NDArray[np.uint64],
    ) -> Sequence[Failure]:
        """Write the moments of a part; they are on disk when this returns.

        If another process has written the part before, its file is kept. Return the failures of the
        part as written.
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
        require(len(checksums) == len(part), "a checksum is missing")
        failures = sorted(failures, key=lambda failure: failure.row)
        path = self.file(part.start, part.stop)
        if self._write(path, part.start, part.stop, Contents(moments, failures, checksums)):
            return failures
        return _failures_in(path)  # the other process may have failed on other images

    def record_commit(self, part: Part, failures: Sequence[Failure]) -> None:
        """Record a part that this process or a worker has published, and merge its file."""
        if self.is_done[part.start : part.stop].all():
            return
        self.is_done[part.start : part.stop] = True
        self._failures |= {failure.row: failure for failure in failures}
        start, size = part.start, len(part)
        while is_aligned(start, start + size):
            halves = self.file(start, start + size), self.file(start ^ size, (start ^ size) + size)
            start, size = min(start, start ^ size), 2 * size
            if start + size > self.num_rows or not self.is_done[start : start + size].all():
                break
            joined = self._merge_halves(start, start + size)
            self._write(self.file(start, start + size), start, start + size, joined)
            for half in halves:
                self.disk.remove(half)
        if failures:
            self.disk.append(self.root / FAILURES_CSV, csv_rows(failures))

    def write_failures(self) -> None:
        """Write the list of failures next to the statistics, in ascending order of rows."""
        self.disk.replace(self.root / FAILURES_CSV, failures_csv(self.failures))

    def committed_by_others(
        self, parts: Sequence[Part]
    ) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Yield those of some parts that other processes have published, with their failures."""
        for part in parts:
            path = self.file(part.start, part.stop)
            if path.exists():
                yield part, _failures_in(path)

    def discard(self, rows: Iterable[int]) -> None:
        """Delete the files that contain any of some rows.

        A row cannot be subtracted from a sum exactly, so the whole span is computed again.
        """
        rows = list(rows)
        files = [(*span, self.file(*span)) for span in spans_in(self.folder)]
        for start, stop, path in [(0, self.num_rows, self.path)] if self.complete else files:
            if any(start <= row < stop for row in rows):
                self.disk.make_folder(self.folder)
                self.disk.remove(path)
                self.is_done[start:stop] = False
                for row in range(start, stop):
                    self._failures.pop(row, None)
                self.complete = False

    def finish(self) -> None:
        """Merge all parts into the final file, and remove them."""
        if not self.complete:
            if not self.is_done.all():
                raise StoreError(
                    f"{self.folder} does not hold all {self.num_rows} rows yet; give the same "
                    "command again."
                )
            self.write(self._merge_span(0, self.num_rows))
        # The final file is on disk. `survey` removes the parts if a kill prevents it here.
        self.disk.remove(self.folder)

    def write(self, contents: Contents) -> None:
        """Write the final file from the moments of all rows."""
        created = self._write(self.path, 0, self.num_rows, contents)
        require(created, f"another process wrote {self.path} without the lock")
        self._failures = {failure.row: failure for failure in contents.failures}
        self.checksums = contents.checksums
        self.complete = True

    def read(self, path: Path, start: int, stop: int) -> Contents:
        """Read a file, and check that it belongs to this run and to rows [start, stop)."""
        settings = dict(self._header.fingerprint)
        with reading(path) as file:
            root = attributes_of(file)
            if root["fingerprint"] != digest(settings):
                changes = differences(json.loads(root["settings"]), settings)
                lines = [f"{key}: {old!r}, now {new!r}" for key, old, new in changes]
                raise StoreMismatchError(
                    f"{path} was made with other settings: {'; '.join(lines)}. Give those, or "
                    "overwrite=true; statistics of images can also go to another out=DIR."
                )
            if (root["start"], root["stop"]) != (start, stop):
                raise DamagedError(
                    f"{path} holds rows {root['start']} to {root['stop']}, expected {start} to "
                    f"{stop}."
                )
            moments = {name: read_layer(file, path, name)[0] for name in self._layers}
            checksums = read_array(file, layout.IMAGE_CHECKSUM)
            return Contents(moments, read_failures(file), checksums)

    def file(self, start: int, stop: int) -> Path:
        """Return the path of the file of a span, which need not exist."""
        return self.folder / f"rows-{start:010d}-{stop:010d}.h5"

    def _record_file(self, path: Path, start: int, stop: int) -> bool:
        """Record a complete file, or set a damaged one aside and return False."""
        try:
            contents = self.read(path, start, stop)
        except (DamagedError, LayerError) as error:  # LayerError: a file of this run has all layers
            target = self.disk.set_aside(path, self.root)
            logger.warning("%s Moved to %s; its rows are done again.", error, target)
            return False
        self.is_done[start:stop] = True
        self.checksums[start:stop] = contents.checksums
        self._failures |= {failure.row: failure for failure in contents.failures}
        return True

    def _merge_span(self, start: int, stop: int) -> Contents:
        """Return the contents of a span, from its file or from the files within it."""
        path = self.file(start, stop)
        if path.exists():
            return self.read(path, start, stop)
        if stop - start == 1:
            raise StoreError(
                f"no file in {self.folder} has row {start} any more. Give the same command "
                "again to compute it."
            )
        return self._merge_halves(start, stop)

    def _merge_halves(self, start: int, stop: int) -> Contents:
        cut = cut_row(start, stop)
        lower, upper = self._merge_span(start, cut), self._merge_span(cut, stop)
        # pop: the two matrices of a layer are freed as soon as their sum exists.
        moments = {
            name: lower.moments.pop(name).merge(upper.moments.pop(name)) for name in self._layers
        }
        return Contents(
            moments,
            [*lower.failures, *upper.failures],
            np.concatenate([lower.checksums, upper.checksums]),
        )

    def _write(self, path: Path, start: int, stop: int, contents: Contents) -> bool:
        """Write a file unless it exists, and return whether it was written."""
        identity = digest(self._header.fingerprint)
        attributes = layout.root_attributes(self._header, identity, complete=path == self.path)
        del attributes["featx_format"]  # featx.open must not open it as a store
        root = {
            "featx_stats": STATS_FORMAT,
            **attributes,
            "settings": json.dumps(dict(self._header.fingerprint), sort_keys=True),
            **self._resolved,
            "start": start,
            "stop": stop,
            "num_failed": len(contents.failures),
        }
        return self.disk.publish(path, file_bytes(root, self._layers, contents))


def spans_in(folder: Path) -> list[tuple[int, int]]:
    """Rows [start, stop) of each file of moments in a folder, the largest spans first."""
    spans = []
    for path in sorted(folder.glob("rows-*.h5")):
        try:
            _, start, stop = path.stem.split("-")
            spans.append((int(start), int(stop)))
        except ValueError as error:
            raise StoreError(f"{path} is no file of featx; move it away.") from error
    return sorted(spans, key=lambda span: span[0] - span[1])


def _failures_in(path: Path) -> list[Failure]:
    """Return the images that an intact file left out, without checking its numbers."""
    with reading(path, compare=False) as file:
        return read_failures(file)


def clear_files(disk: AtomicFolder, overwrite: bool) -> None:
    """Delete unfinished files of killed processes; with overwrite, all statistics."""
    names = (STATS_FILE, FAILURES_CSV, STATS_IMAGES, layout.STATS_OVERWRITE_MARKER, layout.TRACE)
    for pattern in (
        *(f"{TEMPORARY_PREFIX}{name}.*" for name in names),
        f"{layout.WORKERS}/{TEMPORARY_PREFIX}*",
    ):
        for leftover in disk.root.glob(pattern):
            disk.remove(leftover)
    clear_job_folders(disk)
    if overwrite:
        for name in (PARTS_FOLDER, FAILURES_CSV, STATS_FILE, STATS_IMAGES):
            disk.remove(disk.root / name)
