"""The committed parts of a store: found and checked when a session begins, then kept up to date."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py

from featx.storage import TEMPORARY_PREFIX, AtomicFolder
from featx.store import layout
from featx.store.hdf5_files import damage_text, open_metadata
from featx.store.manifest import Manifest, Run, num_runs_of
from featx.store.part_files import (
    Pieces,
    inspect_part,
    inspect_parts,
    part_names,
    part_path,
    shape_problem,
)
from featx.store.repair import matches_manifest, repair_part, unpack_good_rows
from featx.store.result_files import read_failures
from featx.types import Failure, Listing, Part

logger = logging.getLogger(__name__)


class CommittedParts:
    """Content of a store: committed parts, pieces of repaired parts, and failed rows.

    Args:
        disk: performs every write to the store.

    Attributes:
        indices: indices of the committed parts.
        pieces: pieces of parts that are not committed.
        num_packed_runs: number of runs that features.h5 holds.
    """

    def __init__(self, disk: AtomicFolder) -> None:
        self.indices: set[int] = set()
        self.pieces = Pieces()
        self.num_packed_runs = 0
        self._disk = disk
        self._root = disk.root
        self._failed: dict[int, Failure] = {}

    @property
    def failures(self) -> list[Failure]:
        """Failed rows known so far, in ascending order."""
        return [self._failed[row] for row in sorted(self._failed)]

    @property
    def num_failed(self) -> int:
        """Number of failed rows known so far."""
        return len(self._failed)

    def add_failures(self, failures: Sequence[Failure]) -> list[Failure]:
        """Add failures; for a row that failed in several runs, the first failure is kept.

        Returns:
            The failures of rows that had none before.
        """
        new = [failure for failure in failures if failure.row not in self._failed]
        for failure in failures:
            self._failed.setdefault(failure.row, failure)
        return new

    def missing_parts(self, run: Run) -> list[Part]:
        """Parts of a run that are not committed."""
        first = run.grid.first_part
        missing = (i for i in range(len(run.grid)) if first + i not in self.indices)
        return [run.grid.part(i) for i in missing]

    def survey(self, manifest: Manifest, listing: Listing) -> None:
        """Find the committed parts and read their failures; move invalid files to quarantine."""
        self._failed.clear()
        self.indices.clear()
        packed = self._root / layout.PACKED
        if packed.exists():
            self._survey_packed(packed, manifest, listing)
        if self.num_packed_runs == len(manifest.runs):
            remove_parts(self._disk)
            return
        known = {
            layout.part_name(part.index): part for run in manifest.runs for part in run.parts()
        }
        present = []
        folder = self._root / layout.PARTS
        for name in sorted(part_names(self._root)):
            part = known.get(name)
            if part is None:
                quarantine_invalid(self._disk, folder / name, "this run has no such part")
            elif part.index in self.indices:
                # features.h5 holds it: killed before it was deleted
                self._disk.remove(folder / name)
            else:
                present.append(part)
        for part, problem, failures in inspect_parts(self._root, manifest, present):
            self.add_failures(failures)
            is_intact = problem is None
            if problem is not None:
                path = part_path(self._root, part.index)
                is_intact = self._replace_damaged(path, part, problem, manifest, listing)
            if is_intact:
                self.indices.add(part.index)
        self._survey_pieces(manifest, listing)

    def _survey_pieces(self, manifest: Manifest, listing: Listing) -> None:
        """Find the pieces of parts and compare all of their chunks, as pieces are few."""
        for path in sorted((self._root / layout.PARTS).glob(layout.PIECE_GLOB)):
            piece = layout.parse_piece_name(path.name)
            if piece is None or manifest.part_of(piece) is None:
                quarantine_invalid(self._disk, path, "this run has no such part")
            elif piece.index in self.indices:
                self._disk.remove(path)  # its part is complete: killed before it was deleted
            else:
                run = manifest.run_of(piece)
                problem, failures = inspect_part(path, piece, run, compare=True)
                self.add_failures(failures)
                if problem is not None:
                    self._replace_damaged(path, piece, problem, manifest, listing)
        self.pieces = Pieces.in_store(self._root)

    def _survey_packed(self, path: Path, manifest: Manifest, listing: Listing) -> None:
        """Check features.h5 and record its runs; turn its good rows into parts if it is damaged."""
        num_runs, failures, problem = _inspect_packed(path, manifest)
        if problem is not None:
            if (known := _stored_listing(manifest, listing)) is not None:
                unpack_good_rows(self._disk, path, manifest, known)
            quarantine_invalid(self._disk, path, problem)
            return
        self.num_packed_runs = num_runs
        self.add_failures(failures)
        for run in manifest.runs[:num_runs]:
            self.indices.update(part.index for part in run.parts())

    def _replace_damaged(
        self, path: Path, part: Part, problem: str, manifest: Manifest, listing: Listing
    ) -> bool:
        """Move a damaged part or piece to quarantine and write its good rows to new files."""
        result = repair_part(self._disk, path, manifest, part, _stored_listing(manifest, listing))
        logger.warning("%s is not valid: %s. It was %s.", path, problem, result)
        if result.is_complete:
            _, failures = inspect_part(path, part, manifest.run_of(part))
            self.add_failures(failures)
        return result.is_complete


def _stored_listing(manifest: Manifest, listing: Listing) -> Listing | None:
    """Listing with which the store was started, or None if this run has another one."""
    known = listing.head(manifest.num_rows)
    return known if matches_manifest(known, manifest) else None


@dataclass(frozen=True)
class PackedRows:
    """Content of a features.h5 with all rows of a store.

    Attributes:
        failures: failed rows, in ascending order.
        num_bytes: size of the file.
    """

    failures: list[Failure]
    num_bytes: int


def read_packed(root: Path, manifest: Manifest) -> PackedRows | None:
    """Describe the content of features.h5; None unless it holds all rows of all runs.

    Args:
        root: folder of the store.
        manifest: manifest of the store.
    """
    path = root / layout.PACKED
    if not path.exists():
        return None
    num_runs, failures, problem = _inspect_packed(path, manifest)
    if problem is not None or num_runs != len(manifest.runs):
        return None
    return PackedRows(sorted(failures, key=lambda failure: failure.row), path.stat().st_size)


def _inspect_packed(path: Path, manifest: Manifest) -> tuple[int, list[Failure], str | None]:
    """Return the number of runs in features.h5, their failures, and what is wrong, or None."""
    try:
        with open_metadata(path) as file:
            num_runs = num_runs_of(file)
            problem = _packed_problem(file, manifest, num_runs)
            return num_runs, [] if problem else read_failures(file), problem
    except layout.UNREADABLE as error:
        return 0, [], damage_text(path, error)


def _packed_problem(file: h5py.File, manifest: Manifest, num_runs: int) -> str | None:
    """Reason why features.h5 does not hold the first runs of the store, or None if it does."""
    runs = manifest.runs[:num_runs]
    if len(runs) < num_runs or file.attrs["fingerprint"] != manifest.digest_of(num_runs):
        return "it belongs to another run"
    if "part" in file.attrs or not file.attrs["complete"]:
        return "it is not complete"
    num_rows = max(run.grid.stop_row for run in runs)
    specs = {spec.name: spec for run in runs for spec in run.layers}
    return shape_problem(file, num_rows, list(specs.values()))


def quarantine_invalid(disk: AtomicFolder, path: Path, problem: str) -> None:
    """Move a file of a store to quarantine and log the reason."""
    quarantined = disk.quarantine(path, disk.root / layout.QUARANTINE)
    logger.warning("%s is not valid: %s. It was moved to %s.", path, problem, quarantined)


def remove_parts(disk: AtomicFolder) -> None:
    """Delete the parts and pieces of a store, and their folder if it is empty."""
    parts = disk.root / layout.PARTS
    for pattern in (layout.PART_GLOB, layout.PIECE_GLOB, f"{TEMPORARY_PREFIX}*"):
        for path in parts.glob(pattern):
            disk.remove(path)
    with contextlib.suppress(OSError):  # it holds other files, or does not exist
        parts.rmdir()
