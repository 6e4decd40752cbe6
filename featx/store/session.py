"""Write session of a store: started or resumed, extended part by part, until it is complete.

The manifest (featx.json) is written first and fixes the run: its settings, datasets and rows per
part. The existence of the file of a part records that the part is committed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from featx.errors import RunError, StoreError, StoreLockedError
from featx.storage import open_folder
from featx.store import layout
from featx.store.chunk_file import STREAMED_BYTES
from featx.store.committed_parts import CommittedParts, remove_parts
from featx.store.compatibility import merge_manifest
from featx.store.heartbeat import (
    SILENT_S,
    HeartbeatRecord,
    clear_heartbeats,
    refuse_other_writers,
    report_lost_work,
)
from featx.store.listing import compare_listing, write_listing
from featx.store.manifest import Manifest, Run, load_manifest, read_manifest
from featx.store.part_files import (
    DamageRecord,
    begin_part,
    clear_leftovers,
    commit_part,
    inspect_parts,
    part_names,
    part_path,
)
from featx.store.result_files import csv_rows, failures_csv, read_result, result_json
from featx.store.row_file import PartBuilder
from featx.store.sound_rows import SoundRows
from featx.types import Failure, Json, LayerSpec, Listing, Part

logger = logging.getLogger(__name__)


class StoreSession:
    """Period in which one process writes to a store, under an exclusive lock.

    Args:
        requested: all rows and the requested layers, as a run of their own.
        listing: all rows; rows that the store has are in the store's order.
        grow: whether new rows may be added to the store.
        recompute: whether rows of a finished run may be computed again while others lack parts.

    Attributes:
        disk: performs every write to the store.
        lock: file descriptor that holds the lock, within `hold`.
        manifest: manifest of the store, including this run.
    """

    def __init__(
        self,
        root: Path,
        requested: Run,
        listing: Listing,
        grow: bool = False,
        recompute: bool = False,
    ) -> None:
        self.root = root
        self.listing = listing
        self.disk = open_folder(root)
        self._parts = CommittedParts(self.disk)
        self._grow, self._recompute = grow, recompute
        self._requested = requested
        self.manifest = Manifest((requested,))
        self._uncommitted: set[PartBuilder] = set()
        self._manifest_before = b""  # featx.json as it was read, for compare_and_swap

    @contextlib.contextmanager
    def hold(
        self, overwrite: bool = False, check_before_adding: Callable[[], None] | None = None
    ) -> Iterator[StoreSession]:
        """Lock the store, start it or check that the runs match, and find the committed parts.

        With `overwrite`, the existing store is deleted first. `check_before_adding` is called
        before layers or rows are added to a store, with its runs in `manifest`; what it raises
        leaves them as they are. Raises StoreLockedError if another process is writing to the store,
        and StoreMismatchError if it was started with other settings.
        """
        self.disk.make_folder(self.root)
        with self.disk.lock(self.root / layout.LOCK) as self.lock:
            # Slurm tasks without a driver, and writers in a bucket, hold no lock: ask heartbeats.
            others = refuse_other_writers(self.root)
            if others and not self.disk.has_locks:
                self._report_other_driver(others[0], overwrite)
            if overwrite:
                self._clear()

            path = self.root / layout.MANIFEST
            with contextlib.suppress(OSError):  # load_manifest reports errors
                self._manifest_before = path.read_bytes()
            before, is_intact = load_manifest(self.root)
            if before is not None and not is_intact:
                logger.warning("%s is missing or damaged; the copy in a part replaces it.", path)
                self.disk.replace(path, before.to_json())
            self.manifest = before or self.manifest

            report_lost_work(self.root)
            # Only the holder of the store may delete what other processes have left.
            clear_heartbeats(self.disk)
            clear_leftovers(self.disk)

            if before is not None:
                self._parts.survey(before, self.listing)
                unfinished = self.unfinished_runs()
                merged = merge_manifest(
                    self.root, before, self._requested, unfinished, self._grow, self._recompute
                )
                if merged.runs != before.runs and check_before_adding is not None:
                    check_before_adding()
                self.manifest = merged

            self._write_manifest_and_listing(before)
            if not self.is_packed:
                self.disk.make_folder(self.root / layout.PARTS)
            self.write_failures()  # a killed run may have lost lines, as `append` does not sync

            try:
                yield self
            finally:
                for builder in self._uncommitted:
                    builder.discard()
                self._uncommitted.clear()

    @property
    def is_packed(self) -> bool:
        """Whether features.h5 holds every run."""
        return self._parts.num_packed_runs == len(self.manifest.runs)

    @property
    def failures(self) -> list[Failure]:
        """Failed rows known so far, in ascending order."""
        return self._parts.failures

    @property
    def num_failed(self) -> int:
        """Number of failed rows known so far."""
        return len(self._parts.failed)

    def missing(self) -> list[Part]:
        """Parts of the requested layers that are still to be computed, in order."""
        known = self._parts.indices | self._parts.lost.keys()
        parts = [part for run in self._requested_runs for part in run.parts()]
        return [part for part in parts if part.index not in known]

    def unfinished_runs(self) -> list[Run]:
        """Runs of the store that lack rows."""
        return [run for run in self.manifest.runs if self._parts.num_lacking(run)]

    @property
    def is_complete(self) -> bool:
        """Whether every part of every run is committed."""
        return not self.unfinished_runs()

    @property
    def num_committed(self) -> int:
        """Number of rows of which the requested layers are stored."""
        runs = self._runs_with_requested_layers()
        return self.num_rows - sum(map(self._parts.num_lacking, runs))

    @property
    def num_rows(self) -> int:
        """Number of rows that the requested layers have in the end."""
        return max((run.grid.stop_row for run in self._runs_with_requested_layers()), default=0)

    def _runs_with_requested_layers(self) -> list[Run]:
        """Runs that computed any of the requested layers."""
        return [run for run in self.manifest.runs if run.names & self._requested.names]

    def lost_rows(self) -> list[int]:
        """Rows of the requested layers that were lost with damaged chunks."""
        parts = [part for run in self._requested_runs for part in run.parts()]
        return [row for part in parts for row in self._parts.lost_rows(part)]

    def lost_rows_of(self, part: Part) -> list[int]:
        """Rows that a part has lost with damaged chunks."""
        return self._parts.lost_rows(part)

    def begin_part(
        self, part: Part, specs: Sequence[LayerSpec], streamed_bytes: int = STREAMED_BYTES
    ) -> PartBuilder:
        """Begin a part of the store; see `part_files.begin_part`.

        A part that is not committed when the store is released is given up.
        """
        builder = begin_part(self.disk, part, specs, self.manifest, self.listing, streamed_bytes)
        self._uncommitted.add(builder)
        return builder

    def commit(self, builder: PartBuilder) -> Sequence[Failure]:
        """Commit a part; return the failures of the part that the store holds then."""
        # A second signal may end `hold` while a thread commits, whose file must not be closed.
        self._uncommitted.discard(builder)
        try:
            failures = commit_part(self.disk, builder, self.manifest, self.listing)
        finally:
            builder.discard()
        self.record_commit(builder.part, failures)
        return failures

    def record_commit(self, part: Part, failures: Sequence[Failure]) -> None:
        """Record that a part is committed, by this process or a worker, and its failures."""
        self._parts.set_committed(part)
        if new := self._parts.add_failures(failures):
            rows = csv_rows(sorted(new, key=lambda failure: failure.row))
            self.disk.append(self.root / layout.FAILURES_CSV, rows)

    def committed_by_others(
        self, parts: Sequence[Part]
    ) -> Iterator[tuple[Part, Sequence[Failure]]]:
        """Yield the parts that other processes have committed, each with its failures.

        Raises RunError if the file of a part is not valid.
        """
        names = part_names(self.root)
        present = [part for part in parts if layout.part_name(part.index) in names]
        for part, problem, failures in inspect_parts(self.root, self.manifest, present):
            if problem is not None:
                raise RunError(
                    f"{part_path(self.root, part.index)} is not a valid part: {problem}. Give the "
                    "same command again to compute it."
                )
            yield part, failures

    def unpack(self) -> None:
        """Turn the rows of features.h5 into parts again, if it exists.

        Raises StoreError if it is damaged; it stays if the disk is full or fails (RunError).
        """
        if self._parts.num_packed_runs:
            self._parts.unpack(self.manifest, self.listing)

    def has_requested_layers(self, run: Run) -> bool:
        """Return whether a run of the store computed exactly the requested layers."""
        return run.names == self._requested.names

    @property
    def _requested_runs(self) -> list[Run]:
        """Runs that computed exactly the requested layers."""
        return [run for run in self.manifest.runs if self.has_requested_layers(run)]

    def parts_with(self, rows: Iterable[int]) -> list[Part]:
        """Parts of the requested layers with any of some rows, committed or damaged."""
        grids = [run.grid for run in self._requested_runs]
        parts = {grid.part_of(row) for grid in grids for row in rows if grid.holds(row)}
        known = self._parts.indices | self._parts.lost.keys()
        stored = [part for part in parts if part.index in known]
        return sorted(stored, key=lambda part: part.index)

    def read_part(self, part: Part) -> SoundRows:
        """Read a part; rows that it has lost have no meaning.

        Raises StoreError if a part that has lost no rows so far is damaged.
        """
        rows = self._parts.sound_rows(part, self.manifest, self.listing)
        if part.index in self._parts.indices and not rows.good.all():
            raise StoreError(
                f"{part_path(self.root, part.index)} is damaged. "
                f"{layout.repair_command(self.root)} rebuilds it."
            )
        return rows

    def etag(self, part: Part) -> str | None:
        """Entity tag of the file of a part in a bucket, for `replace`; None on a disk."""
        return self.disk.etag(part_path(self.root, part.index))

    def replace(self, builder: PartBuilder, etag: str | None) -> None:
        """Replace a part; a crash leaves either the old or the new rows.

        Raises RunError if the part is in a bucket and has no longer the entity tag.
        """
        run = self.manifest.run_of(builder.part)
        data = builder.build(run, self.listing, self.manifest.to_json())
        self.disk.replace(part_path(self.root, builder.part.index), data, etag)
        if builder.part.index not in self._parts.indices:
            self.record_commit(builder.part, builder.failures)

    def survey_again(self) -> None:
        """Find the parts and their failures again, after some parts were replaced."""
        self._parts.survey(self.manifest, self.listing)
        self.write_failures()

    def write_summary(self, entry: Json) -> None:
        """Write summary.json: the results of this run, and those of all runs under `runs`."""
        path = self.root / layout.SUMMARY
        try:
            runs = list(read_result(path)["runs"])
        except (OSError, ValueError, LookupError, TypeError):
            runs = []
        self.disk.replace(path, result_json({**entry, "runs": [*runs, dict(entry)]}, indent=2))

    def write_config(self, yaml_text: str) -> None:
        """Write .hydra/config.yaml with the config of the last run."""
        folder = self.root / ".hydra"
        self.disk.make_folder(folder)
        self.disk.replace(folder / "config.yaml", yaml_text.encode())

    def write_failures(self) -> None:
        """Write failures.csv from the failures in the parts, in ascending order of rows."""
        self.disk.replace(self.root / layout.FAILURES_CSV, failures_csv(self.failures))

    def stored_bytes(self) -> int:
        """Bytes of features.h5 and of all committed parts."""
        committed = {layout.part_name(index) for index in self._parts.indices}
        parts = (self.root / layout.PARTS).glob(layout.PART_GLOB)
        paths = [path for path in parts if path.name in committed]
        if self._parts.num_packed_runs:
            paths.append(self.root / layout.PACKED)
        return sum(path.stat().st_size for path in paths)

    def finish_packing(self) -> None:
        """Record that all runs are packed; delete the parts, and their folder if it is empty.

        Must be called only after a features.h5 with all of them has been published.
        """
        self._parts.num_packed_runs = len(self.manifest.runs)
        remove_parts(self.disk)
        DamageRecord().write(self.disk, DamageRecord.read(self.root))

    def _report_other_driver(self, other: HeartbeatRecord, overwrite: bool) -> None:
        """Warn about another driver on a store without locks; raise with overwrite=true."""
        if overwrite:
            raise StoreLockedError(
                f"{self.root} is being written by {other.name}; its last heartbeat is "
                f"{max(0, other.age_s):.0f} s old. Stop it, wait {SILENT_S:.0f} s and give this "
                "command again, or choose another out=DIR."
            )
        logger.warning(
            "%s is also being written by %s: the rows will be right, but both processes compute "
            "the missing ones.",
            self.root,
            other.name,
        )

    def _write_manifest_and_listing(self, before: Manifest | None) -> None:
        """Write the manifest and the listing if they have changed.

        A first run starts with its manifest. A store that grows gets its longer listing first,
        since rows beyond those that the manifest counts are ignored.
        """
        manifest, listing = self.root / layout.MANIFEST, self.root / layout.LISTING
        is_taken = before is None and not self.disk.publish(manifest, self.manifest.to_json())
        # Equal content may come from a driver with the same choices, or from our own request.
        if is_taken and (self.disk.has_locks or read_manifest(self.root) != self.manifest):
            raise StoreError(
                f"{manifest} was created by another process, which started this store at the "
                "same time. Give the same command again to resume it, or choose another out=DIR."
            )
        there = listing.exists()
        num_rows, problem = compare_listing(listing, self.listing) if there else (None, None)
        if problem or num_rows != len(self.listing):
            write_listing(self.disk, listing, self.listing)
        if problem:
            logger.warning(
                "%s is not valid: %s. It was written again from the listing of this run.",
                listing,
                problem,
            )
        if before is not None and before.runs != self.manifest.runs:
            data = self.manifest.to_json()
            if not self.disk.compare_and_swap(manifest, self._manifest_before, data):
                raise StoreError(
                    f"{manifest} was changed by another process, which adds to this store. Give "
                    "the same command again when that process has ended."
                )

    def _clear(self) -> None:
        """Delete the store; do nothing in a folder that is no store.

        The manifest goes last, so that a folder that is only half deleted still counts as a store.
        """
        essential = (layout.MANIFEST, layout.LISTING, layout.PACKED)
        if not any((self.root / name).exists() for name in essential):
            return
        remove_parts(self.disk)
        for sheet in list((self.root / layout.SHEETS).glob("*.png")):
            self.disk.remove(sheet)
        files = (layout.PACKED, layout.FAILURES_CSV, layout.IMAGES, layout.LISTING, layout.DAMAGED)
        folders = (layout.PROBE_HEADS, layout.ZEROSHOT_HEADS, layout.TENSORBOARD, ".hydra")
        last = (layout.OVERWRITE_MARKER, layout.MANIFEST)
        for name in (*files, *layout.RESULTS, *folders, *last):
            self.disk.remove(self.root / name)
