"""Write session of statistics: complete and missing parts, until the final file is merged."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.moments_tree import MomentsTree, spans_in
from featx.analysis.statistics.part_moments import is_aligned
from featx.analysis.statistics.stats_file import DamagedError
from featx.errors import LayerError, StoreError
from featx.storage import TEMPORARY_PREFIX
from featx.store import Grid, failures_csv, layout
from featx.types import UNKNOWN_IMAGE, Failure, Part

logger = logging.getLogger(__name__)


FAILURES_CSV = "stats-failures.csv"
"""File name of the list of failures, apart from that of a store."""


class StatsSession:
    """Parts of a run that are complete, and the final file.

    Only the process that holds the lock of the folder may use it. Other processes commit to the
    same tree and report their parts.

    Args:
        tree: files of the parts.
        part_rows: rows per part.
        lock: file descriptor that holds the lock.

    Attributes:
        root: folder of the statistics.
        disk: the same folder, for atomic writes.
        lock: as given.
        num_rows: number of rows of the run.
        complete: whether the final file of this run exists; known after `survey`.
    """

    def __init__(self, tree: MomentsTree, part_rows: int, lock: int = -1) -> None:
        self.tree = tree
        self.root = tree.path.parent
        self.disk = tree.disk
        self.lock = lock
        self.path = tree.path
        self.folder = tree.folder
        self.num_rows = tree.num_rows
        grid = Grid(tree.num_rows, part_rows)
        self._parts = [grid.part(index) for index in range(len(grid))]
        self._spans: dict[tuple[int, int], tuple[Failure, ...]] = {}
        self.complete = False

    @property
    def failures(self) -> list[Failure]:
        """Images that were left out of the complete rows, in order of rows."""
        return [failure for span in sorted(self._spans) for failure in self._spans[span]]

    def survey(self) -> None:
        """Find complete parts, quarantine damaged files, delete leftovers of killed processes."""
        self._spans = {}
        self.disk.make_folder(self.path.parent)  # a killed process may not have synced it
        if self.path.exists():
            failures = self._check_file(self.path, 0, self.num_rows)
            self.complete = failures is not None
            if failures is not None:
                self._spans[0, self.num_rows] = failures
                self.disk.remove(self.folder)
                return
        self.disk.make_folder(self.folder)
        for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            self.disk.remove(leftover)
        for start, stop in spans_in(self.folder):
            path = self.tree.file(start, stop)
            if self._covered(start, stop):
                self.disk.remove(path)  # a kill between the merge and the deletion left it
            else:
                failures = self._check_file(path, start, stop)
                if failures is not None:
                    self._spans[start, stop] = failures

    @property
    def num_failed(self) -> int:
        """Number of images that were left out."""
        return len(self.failures)

    @property
    def num_committed(self) -> int:
        """Number of rows in complete parts."""
        return self.num_rows - sum(map(len, self.missing()))

    def missing(self) -> list[Part]:
        """Return the parts that are not complete, in order."""
        spans = sorted(self._spans)
        starts = [start for start, _ in spans]

        def is_done(part: Part) -> bool:
            place = bisect.bisect_right(starts, part.start) - 1
            return place >= 0 and part.stop <= spans[place][1]

        return [part for part in self._parts if not is_done(part)]

    def commit(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> Sequence[Failure]:
        """Commit the moments of a part, as `MomentsTree.commit` does, unless it is complete."""
        if self._covered(part.start, part.stop):
            return [f for f in self.failures if part.start <= f.row < part.stop]
        committed_failures = self.tree.commit(part, failures, moments, checksums)
        self.record_commit(part, committed_failures)
        return committed_failures

    def record_commit(self, part: Part, failures: Sequence[Failure]) -> None:
        """Record a part that this process or a worker has committed, and its failures."""
        start, stop = part.start, part.stop
        span_failures = tuple(failures)
        while is_aligned(start, stop):  # as the files are merged
            size = stop - start
            other_span = (start ^ size, (start ^ size) + size)
            if other_span not in self._spans:
                break
            other_failures = self._spans.pop(other_span)
            if other_span[0] < start:
                span_failures = other_failures + span_failures
            else:
                span_failures += other_failures
            start, stop = min(start, other_span[0]), max(stop, other_span[1])
        self._spans[start, stop] = span_failures
        if failures:
            self.write_failures()

    def write_failures(self) -> None:
        """Write the list of failures next to the statistics."""
        self.disk.replace(self.root / FAILURES_CSV, failures_csv(self.failures))

    def committed_by_others(
        self, parts: Sequence[Part]
    ) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Yield those of some parts that other processes have committed, with their failures."""
        remaining = list(parts)
        for start, stop in spans_in(self.folder):
            covered = [part for part in remaining if start <= part.start and part.stop <= stop]
            path = self.tree.file(start, stop)
            if not covered:
                continue
            try:
                failures = self.tree.failures_in(path)
            except StoreError:
                if path.exists():
                    raise
                continue  # merged meanwhile; the next call finds the larger file
            for part in covered:
                yield part, [f for f in failures if part.start <= f.row < part.stop]
            remaining = [part for part in remaining if part not in covered]

    def image_checksums(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Image checksums of all rows, (N,) uint64, and which rows are complete, (N,) bool."""
        checksums = np.full(self.num_rows, UNKNOWN_IMAGE, dtype=np.uint64)
        is_done = np.zeros(self.num_rows, np.bool_)
        for start, stop in self._spans:
            checksums[start:stop] = self.tree.checksums_in(self._file(start, stop))
            is_done[start:stop] = True
        return checksums, is_done

    def discard(self, rows: Iterable[int]) -> None:
        """Delete the files that contain any of some rows.

        A row cannot be subtracted from a sum exactly, so the whole span is computed again.
        """
        rows = list(rows)
        for start, stop in list(self._spans):
            if any(start <= row < stop for row in rows):
                self.disk.make_folder(self.folder)
                self.disk.remove(self._file(start, stop))
                del self._spans[start, stop]
                self.complete = False

    def finish(self) -> None:
        """Merge all parts into the final file, and remove them."""
        if not self.complete:
            nodes = sorted(self._spans)
            edges = [0, *(stop for _, stop in nodes)]
            if [start for start, _ in nodes] + [self.num_rows] != edges:
                raise StoreError(
                    f"{self.folder} does not hold all {self.num_rows} rows yet; give the same "
                    "command again."
                )
            self._spans = {(0, self.num_rows): self.tree.merge_all()}
            self.complete = True
        # The final file is on disk. `survey` removes the parts if a kill prevents it here.
        self.disk.remove(self.folder)

    def _file(self, start: int, stop: int) -> Path:
        """Return the file that contains a span."""
        return self.path if self.complete else self.tree.file(start, stop)

    def _covered(self, start: int, stop: int) -> bool:
        """Return whether one complete span contains the rows [start, stop)."""
        return any(first <= start and stop <= last for first, last in self._spans)

    def _check_file(self, path: Path, start: int, stop: int) -> tuple[Failure, ...] | None:
        """Return the images that a file left out, or None if it was damaged and is quarantined."""
        try:
            return self.tree.check_file(path, start, stop)
        except (DamagedError, LayerError) as error:  # LayerError: a file of this run has all layers
            target = self.disk.quarantine(path, self.path.parent / layout.QUARANTINE)
            logger.warning("%s Moved to %s; its rows are done again.", error, target)
            return None
