"""Write session of statistics: complete and missing parts, until the final file is merged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.moments_tree import MomentsTree, spans_in
from featx.analysis.statistics.stats_file import DamagedError
from featx.errors import LayerError, StoreError
from featx.storage import TEMPORARY_PREFIX
from featx.store import Grid, failures_csv
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
        self._is_done = np.zeros(tree.num_rows, np.bool_)
        self._failures: dict[int, Failure] = {}
        self.complete = False

    @property
    def failures(self) -> list[Failure]:
        """Images that were left out of the complete rows, in order of rows."""
        return [self._failures[row] for row in sorted(self._failures)]

    def survey(self) -> None:
        """Find complete parts, set damaged files aside, delete leftovers of killed processes."""
        self.disk.make_folder(self.path.parent)  # a killed process may not have synced it
        if self.path.exists() and self._check_file(self.path, 0, self.num_rows):
            self.complete = True
            self.disk.remove(self.folder)
            return
        self.disk.make_folder(self.folder)
        for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            self.disk.remove(leftover)
        for start, stop in spans_in(self.folder):
            path = self.tree.file(start, stop)
            if self._is_done[start:stop].all():
                self.disk.remove(path)  # a kill between the merge and the deletion left it
            else:
                self._check_file(path, start, stop)

    @property
    def num_failed(self) -> int:
        """Number of images that were left out."""
        return len(self._failures)

    @property
    def num_committed(self) -> int:
        """Number of rows in complete parts."""
        return int(self._is_done.sum())

    def missing(self) -> list[Part]:
        """Return the parts that are not complete, in order."""
        return [part for part in self._parts if not self._is_done[part.start : part.stop].all()]

    def commit(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> Sequence[Failure]:
        """Commit the moments of a part, as `MomentsTree.commit` does, unless it is complete."""
        if self._is_done[part.start : part.stop].all():
            return [f for f in self.failures if part.start <= f.row < part.stop]
        committed_failures = self.tree.commit(part, failures, moments, checksums)
        self.record_commit(part, committed_failures)
        return committed_failures

    def record_commit(self, part: Part, failures: Sequence[Failure]) -> None:
        """Record a part that this process or a worker has committed, and its failures."""
        self._is_done[part.start : part.stop] = True
        self._failures |= {failure.row: failure for failure in failures}
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
        for start, stop, path in self._files():
            checksums[start:stop] = self.tree.checksums_in(path)
        return checksums, self._is_done.copy()

    def discard(self, rows: Iterable[int]) -> None:
        """Delete the files that contain any of some rows.

        A row cannot be subtracted from a sum exactly, so the whole span is computed again.
        """
        rows = list(rows)
        for start, stop, path in self._files():
            if any(start <= row < stop for row in rows):
                self.disk.make_folder(self.folder)
                self.disk.remove(path)
                self._is_done[start:stop] = False
                for row in range(start, stop):
                    self._failures.pop(row, None)
                self.complete = False

    def finish(self) -> None:
        """Merge all parts into the final file, and remove them."""
        if not self.complete:
            if not self._is_done.all():
                raise StoreError(
                    f"{self.folder} does not hold all {self.num_rows} rows yet; give the same "
                    "command again."
                )
            self._failures = {failure.row: failure for failure in self.tree.merge_all()}
            self.complete = True
        # The final file is on disk. `survey` removes the parts if a kill prevents it here.
        self.disk.remove(self.folder)

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return the first row, the end and the path of each file of complete rows."""
        if self.complete:
            return [(0, self.num_rows, self.path)]
        return [(*span, self.tree.file(*span)) for span in spans_in(self.folder)]

    def _check_file(self, path: Path, start: int, stop: int) -> bool:
        """Record a complete file, or set a damaged one aside and return False."""
        try:
            failures = self.tree.check_file(path, start, stop)
        except (DamagedError, LayerError) as error:  # LayerError: a file of this run has all layers
            target = self.disk.set_aside(path, self.path.parent)
            logger.warning("%s Moved to %s; its rows are done again.", error, target)
            return False
        self._is_done[start:stop] = True
        self._failures |= {failure.row: failure for failure in failures}
        return True
