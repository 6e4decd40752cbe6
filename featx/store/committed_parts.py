"""The committed parts of a store: found when a session begins, repaired, and kept up to date.

A damaged file stays in its place, and its sound rows can be read, until a file with all rows
replaces it. `damaged.json` names such files, so that the next run computes the lost rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from featx.errors import StoreError
from featx.storage import TEMPORARY_PREFIX, AtomicFolder, is_url, open_folder
from featx.store import layout
from featx.store.file_checks import DamageReport
from featx.store.hdf5_files import check_chunks, damage_text, open_metadata
from featx.store.listing import matches_manifest, read_listing, write_listing
from featx.store.manifest import Manifest, Run, num_runs_of, require_manifest
from featx.store.part_files import (
    DamageRecord,
    clear_leftovers,
    inspect_parts,
    part_names,
    part_path,
)
from featx.store.result_files import failures_csv, read_failures
from featx.store.row_file import RowFile
from featx.store.sound_rows import SoundRows, open_damaged, sound_rows, sound_rows_of_part
from featx.types import Failure, Listing, Part

logger = logging.getLogger(__name__)


class CommittedParts:
    """Content of a store: committed parts, parts with lost rows, and failed rows.

    With `is_dry`, `survey` writes nothing.

    Attributes:
        indices: indices of the committed parts.
        lost: index of a damaged part -> ranges of the rows that it has lost.
        failed: row -> its failure, of all failed rows known so far.
        num_packed_runs: number of runs that features.h5 holds.
    """

    _manifest: Manifest
    """Manifest of the last survey."""
    _listing: Listing | None
    """Listing with which the store was started, or None if no file has it."""

    def __init__(self, disk: AtomicFolder, is_dry: bool = False) -> None:
        self.indices: set[int] = set()
        self.lost: dict[int, list[tuple[int, int]]] = {}
        self.failed: dict[int, Failure] = {}
        self.num_packed_runs = 0
        self._sources: dict[int, Path] = {}  # damaged part -> file with its sound rows
        self._record = DamageRecord()
        self._suspects: set[str] = set()
        self._disk = disk
        self._is_dry = is_dry
        self._root = disk.root

    @property
    def failures(self) -> list[Failure]:
        """Failed rows known so far, in ascending order."""
        return [self.failed[row] for row in sorted(self.failed)]

    def add_failures(self, failures: Sequence[Failure]) -> list[Failure]:
        """Add failures, and return those of rows that had none before.

        For a row that failed in several runs, the first failure is kept.
        """
        new = [failure for failure in failures if failure.row not in self.failed]
        for failure in failures:
            self.failed.setdefault(failure.row, failure)
        return new

    def lost_rows(self, part: Part) -> list[int]:
        """Rows that a damaged part has lost; none for other parts."""
        return [row for start, stop in self.lost.get(part.index, ()) for row in range(start, stop)]

    def num_lacking(self, run: Run) -> int:
        """Number of rows of a run that no file holds."""
        count = 0
        for part in run.parts():
            if part.index in self.lost:
                count += _count(self.lost[part.index])
            elif part.index not in self.indices:
                count += len(part)
        return count

    def sound_rows(self, part: Part, manifest: Manifest, listing: Listing) -> SoundRows:
        """Rows of a part that are there, compared with their checksums."""
        is_packed = manifest.run_of(part) in manifest.runs[: self.num_packed_runs]
        own = self._root / layout.PACKED if is_packed else part_path(self._root, part.index)
        return sound_rows_of_part(self._sources.get(part.index, own), manifest, part, listing)

    def set_committed(self, part: Part) -> None:
        """Record that a file with all rows of a part exists."""
        self.indices.add(part.index)
        if self.lost.pop(part.index, None) is not None:
            self._sources.pop(part.index)
            # The next survey would say that this part is damaged. Another driver may have repaired
            # other parts meanwhile.
            before = DamageRecord.read(self._root)
            files = before.files - {layout.part_name(part.index)}
            lost = {index: rows for index, rows in before.lost.items() if index != part.index}
            DamageRecord(files, lost).write(self._disk, before)

    def unpack(self, manifest: Manifest, listing: Listing) -> None:
        """Write all rows of features.h5 as parts again, and delete the file."""
        packed = self._root / layout.PACKED
        try:
            with open_metadata(packed) as metadata:
                check_chunks(metadata)
        except layout.UNREADABLE as error:
            raise StoreError(
                f"{packed}: {damage_text(packed, error)}. {layout.repair_command(self._root)} "
                "rebuilds what is damaged."
            ) from error
        self._disk.make_folder(self._root / layout.PARTS)
        with open_damaged(packed) as file:
            for run in manifest.runs[: self.num_packed_runs]:
                for part in run.parts():
                    rows = sound_rows(file, run, part, listing)
                    if not rows.good.all():
                        name = layout.part_name(part.index)
                        raise StoreError(
                            f"{packed} does not say why some rows failed ({name}). "
                            f"{layout.repair_command(self._root)} extracts them again."
                        )
                    data = rows.build(run, listing, manifest)
                    self._disk.publish(part_path(self._root, part.index), data)
        self._disk.remove(packed)
        self.num_packed_runs = 0

    def survey(
        self, manifest: Manifest, listing: Listing | None, suspects: Collection[str] = ()
    ) -> None:
        """Find the committed parts, and the rows that damaged files have lost.

        A damaged part of which all rows are sound is written again at once. The rows of a damaged
        features.h5 become parts, and it is deleted when all of them exist. `listing` is None if no
        file has all rows; `suspects` are damaged files besides those of damaged.json.
        """
        for known in (self.failed, self.indices, self._sources, self.lost):
            known.clear()
        self._record = DamageRecord.read(self._root)
        self._suspects = {*suspects, *map(layout.part_name, self._record.lost)}
        if self._record.lost:
            self._suspects |= self._record.files & {layout.PACKED}
        self._manifest = manifest
        stored = None if listing is None else listing.head(manifest.num_rows)
        self._listing = stored if matches_manifest(stored, manifest) else None

        packed, problem = self._root / layout.PACKED, None
        self.num_packed_runs = 0
        if packed.exists():
            num_runs, failures, problem = _inspect_packed(packed, manifest)
            problem = problem or self._recorded_problem(packed)
            if problem is None:
                self.num_packed_runs = num_runs
                self.add_failures(failures)
                for run in manifest.runs[:num_runs]:
                    self.indices.update(part.index for part in run.parts())

        if self.num_packed_runs < len(manifest.runs):
            self._survey_parts()
        elif not self._is_dry:
            remove_parts(self._disk)
        if problem is not None:
            self._keep_packed_rows(packed, problem)

        # features.h5 stays in the record until it is there again, so that a repair packs the store;
        # an object store is not packed.
        awaits_packing = layout.PACKED in self._record.files and not self.num_packed_runs
        files = {layout.part_name(index) for index in self.lost}
        if (problem is not None or awaits_packing) and (packed.exists() or not is_url(packed)):
            files.add(layout.PACKED)
        if not self._is_dry:
            record = DamageRecord(frozenset(files), self.lost)
            record.write(self._disk, self._record)

    def _survey_parts(self) -> None:
        """Find the parts that features.h5 does not hold."""
        runs = self._manifest.runs
        parts = {layout.part_name(part.index): part for run in runs for part in run.parts()}
        present = []
        for name in sorted(part_names(self._root)):
            path, part = self._root / layout.PARTS / name, parts.get(name)
            if part is None:
                # Without locks, it may be of a run that another process has just added.
                if not self._is_dry and (self._disk.has_locks or name in self._suspects):
                    aside = self._disk.set_aside(path, self._root)
                    logger.warning(
                        "%s: this run has no such part; it was moved to %s.", path, aside
                    )
            elif part.index not in self.indices:
                present.append(part)
            elif not self._is_dry:
                self._disk.remove(path)  # killed before it was deleted
        for part, problem, failures in inspect_parts(self._root, self._manifest, present):
            path = part_path(self._root, part.index)
            problem = problem or self._recorded_problem(path)
            if problem is None:
                self.add_failures(failures)
                self.indices.add(part.index)
            elif not is_url(path) and path.is_dir():
                if not self._is_dry:  # no file can take its name
                    aside = self._disk.set_aside(path, self._root)
                    logger.warning("%s is not valid: it is a folder, moved to %s.", path, aside)
            else:
                etag = self._disk.etag(path)
                rows = sound_rows_of_part(path, self._manifest, part, self._listing)
                self._keep(path, part, rows, problem, etag)

    def _recorded_problem(self, path: Path) -> str | None:
        """Say what is wrong with a file that is known or recorded to be damaged, or None."""
        if path.name in self._suspects:
            return "it is damaged"
        try:
            if path.name in self._record.files:
                with open_metadata(path) as file:
                    check_chunks(file)
        except (StoreError, *layout.UNREADABLE) as error:
            return damage_text(path, error)
        return None

    def _keep_packed_rows(self, path: Path, problem: str) -> None:
        """Write the sound rows of a damaged features.h5 as parts."""
        manifest, listing = self._manifest, self._listing
        if listing is None:
            return
        runs: Sequence[Run] = ()
        with contextlib.suppress(IsADirectoryError), open_damaged(path) as file:
            count = file.num_runs
            if count <= len(manifest.runs) and file.fingerprint_sha256 == manifest.digest_of(count):
                runs = manifest.runs[:count]
            if runs and not self._is_dry:
                self._disk.make_folder(self._root / layout.PARTS)
            for run in runs:
                for part in run.parts():
                    if part.index in self.indices:
                        continue
                    rows = sound_rows(file, run, part, listing)
                    # A part of its own may have been left by a killed repair, damaged as well.
                    if _count(rows.lost) < _count(self.lost.get(part.index, [(0, len(part) + 1)])):
                        self._keep(path, part, rows, problem)
        if self._is_dry:
            return
        if not runs:  # an orphan of an earlier run may have given its file this name
            aside = self._disk.set_aside(path, self._root)
            logger.warning("%s has no row of this store. It was moved to %s.", path, aside)
        elif all(part.index in self.indices for run in runs for part in run.parts()):
            self._disk.remove(path)

    def _keep(
        self, path: Path, part: Part, rows: SoundRows, problem: str, etag: str | None = None
    ) -> None:
        """Write a part of which all rows are sound, or record those that are lost."""
        num_sound = int(rows.good.sum())
        if not self._is_dry:
            logger.warning(
                "%s is not valid: %s. %d of the %d rows of part %d are sound.",
                path, problem, num_sound, len(part), part.index,
            )  # fmt: skip
        self.add_failures(rows.failures)
        if self._listing is not None and num_sound == len(part):
            if not self._is_dry:
                data = rows.build(self._manifest.run_of(part), self._listing, self._manifest)
                self._disk.replace(part_path(self._root, part.index), data, etag)
            self.indices.add(part.index)
            self.lost.pop(part.index, None)
        else:
            self._sources[part.index] = path
            self.lost[part.index] = rows.lost


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def read_packed(root: Path, manifest: Manifest) -> tuple[list[Failure], int] | None:
    """Failed rows and size in bytes of a features.h5 that holds all rows of all runs, or None."""
    path = root / layout.PACKED
    if not path.exists() or layout.PACKED in DamageRecord.read(root).files:
        return None
    num_runs, failures, problem = _inspect_packed(path, manifest)
    if problem is not None or num_runs != len(manifest.runs):
        return None
    return sorted(failures, key=lambda failure: failure.row), path.stat().st_size


def _inspect_packed(path: Path, manifest: Manifest) -> tuple[int, Sequence[Failure], str | None]:
    """Return the number of runs in features.h5, their failures, and what is wrong, or None."""
    try:
        with open_metadata(path) as file:
            num_runs = num_runs_of(file)
            if num_runs > len(manifest.runs):
                return num_runs, (), "it belongs to another run"
            problem = RowFile.packed(manifest, num_runs).problem(file)
            return num_runs, () if problem else read_failures(file), problem
    except layout.UNREADABLE as error:
        return 0, (), damage_text(path, error)


def remove_parts(disk: AtomicFolder) -> None:
    """Delete the parts of a store, and their folder if it is empty."""
    parts = disk.root / layout.PARTS
    for pattern in (layout.PART_GLOB, f"{TEMPORARY_PREFIX}*"):
        for path in parts.glob(pattern):
            disk.remove(path)
    with contextlib.suppress(OSError):  # it holds other files, or does not exist
        parts.rmdir()


def runs_to_extract(report: DamageReport) -> list[Run]:
    """Runs of which rows have to be extracted to repair a store; writes nothing.

    Raises StoreError if there is no store, or a file cannot be read now.
    """
    manifest, listing = _manifest_and_listing(report.root)
    lost = _survey(CommittedParts(open_folder(report.root), True), report, manifest, listing)
    # Without a copy of the listing, the images are listed again.
    return lost or ([] if matches_manifest(listing, manifest) else [manifest.runs[-1]])


def repair_files(report: DamageReport) -> list[Run]:
    """Write again what other files of a store have, too: manifest, listing, columns of parts.

    Returns:
        runs of which rows have to be extracted.

    Raises:
        StoreError: there is no store, or a file cannot be read now.
        StoreLockedError: another process is writing to the store.
        RunError: the disk is full or fails; every sound row is still there.
    """
    root, disk = report.root, open_folder(report.root)
    with disk.lock(root / layout.LOCK):
        if disk.has_locks:
            clear_leftovers(disk)
        damaged = {damage.path for damage in report.damages}
        manifest, listing = _manifest_and_listing(root)
        if root / layout.MANIFEST in damaged:
            disk.replace(root / layout.MANIFEST, manifest.to_json())
        if root / layout.LISTING in damaged and matches_manifest(listing, manifest):
            write_listing(disk, root / layout.LISTING, listing)
        for name in layout.RESULTS:
            # The job that made it writes it again.
            if (path := root / name) in damaged and path.exists():
                disk.set_aside(path, root)
        parts, path = CommittedParts(disk), root / layout.FAILURES_CSV
        lost = _survey(parts, report, manifest, listing)
        if not lost:  # otherwise the run that extracts these rows writes it
            data = failures_csv(parts.failures)
            if not path.exists() or path.read_bytes() != data:
                disk.replace(path, data)
        return lost


def _manifest_and_listing(root: Path) -> tuple[Manifest, Listing | None]:
    manifest = require_manifest(root)
    return manifest, read_listing(root, manifest.num_rows, manifest.listing_identity)


def _survey(
    parts: CommittedParts, report: DamageReport, manifest: Manifest, listing: Listing | None
) -> list[Run]:
    """Find the sound rows of the damaged files; return the runs that lack rows."""
    known = listing if matches_manifest(listing, manifest) else None
    parts.survey(manifest, known, {damage.path.name for damage in report.damages})
    return [run for run in manifest.runs if parts.num_lacking(run)]
