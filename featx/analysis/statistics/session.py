"""The folder of statistics while they are computed: parts done and missing."""

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
from featx.errors import LayerError, StoreError, require
from featx.storage.local_folder import TEMPORARY
from featx.store import layout
from featx.store.failures import failures_csv
from featx.store.layout import LISTING, Grid
from featx.store.listing import listing_file
from featx.types import UNKNOWN_IMAGE, Failure, Listing, Part

logger = logging.getLogger(__name__)


class MomentsOfParts:
    """The moments of a run while it goes on: which rows are done, and in the end one file of all.

    One process at a time may use it: the one that holds the store's lock. Others commit to the
    same tree, and it is told.

    Args:
        tree: of files, where the parts are kept.

    Attributes:
        complete: whether the one file is there, made by this run; known after `survey`.
    """

    def __init__(self, tree: MomentsTree) -> None:
        self.tree = tree
        self.disk = tree.disk
        self.path = tree.path
        self.folder = tree.folder
        self._num_rows = tree.num_rows
        self._spans: dict[tuple[int, int], tuple[Failure, ...]] = {}
        self._surveyed = False
        self.complete = False

    @property
    def failures(self) -> list[Failure]:
        """The images left out of the rows that are done, in order of rows."""
        return [failure for span in sorted(self._spans) for failure in self._spans[span]]

    def survey(self) -> None:
        """Find what is done. What is damaged is set aside, to be done again; leftovers go.

        Raises:
            StoreMismatchError: a file is there that other settings made.
            StoreError: a file cannot be read now.
        """
        self._spans = {}
        self._surveyed = True
        self.disk.make_folder(self.path.parent)  # what a killed process put there becomes durable
        if self.path.exists():
            failures = self._accepted(self.path, 0, self._num_rows)
            self.complete = failures is not None
            if failures is not None:
                self._spans[0, self._num_rows] = failures
                self.disk.remove(self.folder)
                return
        self.disk.make_folder(self.folder)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            self.disk.remove(leftover)
        for start, stop in spans_in(self.folder):
            path = self.tree.file(start, stop)
            if self._covered(start, stop):
                self.disk.remove(path)  # merged into a larger one, and then the process was killed
            else:
                failures = self._accepted(path, start, stop)
                if failures is not None:
                    self._spans[start, stop] = failures

    def has(self, part: Part) -> bool:
        """Whether the rows of a part are done."""
        return self._covered(part.start, part.stop)

    def missing(self, parts: Sequence[Part]) -> list[Part]:
        """Those of some parts, in order of rows, that are not done."""
        spans = sorted(self._spans)
        starts = [start for start, _ in spans]

        def done(part: Part) -> bool:
            place = bisect.bisect_right(starts, part.start) - 1
            return place >= 0 and part.stop <= spans[place][1]

        return [part for part in parts if not done(part)]

    def commit(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> Sequence[Failure]:
        """Keep the moments of a part, durably when this returns, as `MomentsTree.commit` does."""
        require(self._surveyed, "what is there already was not looked for")
        if self.has(part):
            return [f for f in self.failures if part.start <= f.row < part.stop]
        there = self.tree.commit(part, failures, moments, checksums)
        self.committed(part, there)
        return there

    def committed(self, part: Part, failures: Sequence[Failure]) -> None:
        """A part is durable, by this process or by a worker; its failures are noted."""
        start, stop = part.start, part.stop
        found = tuple(failures)
        while is_aligned(start, stop):  # as the files merge, so that few spans stay
            size = stop - start
            other = (start ^ size, (start ^ size) + size)
            if other not in self._spans:
                break
            before = self._spans.pop(other)
            found = before + found if other[0] < start else found + before
            start, stop = min(start, other[0]), max(stop, other[1])
        self._spans[start, stop] = found

    def arrived(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Those of some parts that other processes have committed, with their failures.

        Raises:
            DamagedError: a file is not what was written.
        """
        left = list(parts)
        for start, stop in spans_in(self.folder):
            inside = [part for part in left if start <= part.start and part.stop <= stop]
            path = self.tree.file(start, stop)
            if not inside:
                continue
            try:
                failures = self.tree.failures_in(path)
            except DamagedError:
                if path.exists():
                    raise
                continue  # merged meanwhile: the next look finds the larger one
            for part in inside:
                yield part, [f for f in failures if part.start <= f.row < part.stop]
            left = [part for part in left if part not in inside]

    def image_checksums(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """(N,) checksums of the images of all rows, and (N,) which rows are done.

        Raises:
            StoreError: a file cannot be read now.
        """
        checksums = np.full(self._num_rows, UNKNOWN_IMAGE, dtype=np.uint64)
        done = np.zeros(self._num_rows, np.bool_)
        for start, stop in self._spans:
            checksums[start:stop] = self.tree.checksums_in(self._file(start, stop))
            done[start:stop] = True
        return checksums, done

    def discard(self, rows: Iterable[int]) -> None:
        """Delete the files that hold any of some rows: sums do not lose a single row."""
        rows = list(rows)
        for start, stop in list(self._spans):
            if any(start <= row < stop for row in rows):
                self.disk.make_folder(self.folder)
                self.disk.remove(self._file(start, stop))
                del self._spans[start, stop]
                self.complete = False

    def finish(self) -> None:
        """Merge all parts into the one file, and remove them.

        Raises:
            StoreError: rows are missing, or a file is damaged; `survey` sets it aside.
            RunError: the disk is full or fails; the same call goes on.
        """
        require(self._surveyed, "what is there already was not looked for")
        if not self.complete:
            nodes = sorted(self._spans)
            edges = [0, *(stop for _, stop in nodes)]
            if [start for start, _ in nodes] + [self._num_rows] != edges:
                raise StoreError(
                    f"{self.folder} does not hold all {self._num_rows} rows yet; give the same "
                    "command again."
                )
            self._spans = {(0, self._num_rows): self.tree.merge_all()}
            self.complete = True
        self.disk.remove(self.folder)

    def _file(self, start: int, stop: int) -> Path:
        """Where the moments of a span lie."""
        return self.path if self.complete else self.tree.file(start, stop)

    def _covered(self, start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in self._spans)

    def _accepted(self, path: Path, start: int, stop: int) -> tuple[Failure, ...] | None:
        """The images that a file of this run left out; None where it was damaged and set aside."""
        try:
            return self.tree.accepted(path, start, stop)
        except (DamagedError, LayerError) as error:  # a run's own file has all its layers
            target = self.disk.set_aside(path, self.path.parent / layout.QUARANTINE)
            logger.warning("%s Moved to %s; its rows are done again.", error, target)
            return None


FAILURES_CSV = "stats-failures.csv"


class StatsSession:
    """Statistics being taken, under the folder's lock: what is there and what is missing.

    Args:
        parts: of the run, surveyed.
        grid: of its rows.
        lock: the descriptor that holds the folder.
    """

    def __init__(self, parts: MomentsOfParts, grid: Grid, lock: int) -> None:
        self.root = parts.path.parent
        self.disk = parts.disk
        self.lock = lock
        self.rows_asked = grid.num_rows
        self._parts = parts
        self._grid = [grid.part(index) for index in range(len(grid))]
        self.write_failures()

    @property
    def rows_done(self) -> int:
        return self.rows_asked - sum(len(part) for part in self.missing())

    @property
    def num_failed(self) -> int:
        return len(self._parts.failures)

    def missing(self) -> list[Part]:
        """The parts that are still to be done, in order."""
        return self._parts.missing(self._grid)

    def commit(
        self,
        part: Part,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> Sequence[Failure]:
        """Make one part durable. Returns its failures."""
        there = self._parts.commit(part, failures, moments, checksums)
        if there:
            self.write_failures()
        return there

    def committed(self, part: Part, failures: Sequence[Failure]) -> None:
        """A worker has made a part durable; its failures are noted."""
        self._parts.committed(part, failures)
        if failures:
            self.write_failures()

    def arrived(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Those of some parts that other processes have committed, with their failures."""
        return self._parts.arrived(parts)

    def write_failures(self) -> None:
        """The list beside the file, from what the parts hold; apart from that of a store."""
        self.disk.replace(self.root / FAILURES_CSV, failures_csv(self._parts.failures))

    def write_listing(self, listing: Listing) -> None:
        """The rows for workers, who list nothing themselves; goes with the parts."""
        self.disk.replace(self._parts.folder / LISTING, listing_file(listing))
