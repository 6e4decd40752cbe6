"""Files of parts: committing them, their validity, the record of damage, and temporary files."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from featx.errors import RunError, StoreError
from featx.storage import TEMPORARY_PREFIX, AtomicFolder, S3File, S3Path, is_url, prefetch_files
from featx.store import layout
from featx.store.chunk_file import STREAMED_BYTES, ChunkFile
from featx.store.chunk_table import find_table
from featx.store.hdf5_files import ErrorRecordingFile, damage_text, open_metadata
from featx.store.heartbeat import read_heartbeats
from featx.store.manifest import Manifest, Run, num_runs_of
from featx.store.result_files import parse_result, read_failures, result_json
from featx.store.row_file import PartBuilder, RowFile
from featx.types import Failure, LayerSpec, Listing, Part

T = TypeVar("T")
R = TypeVar("R")

MANY_FILES = 1000
"""Number of files of a store from which on their chunk tables are read in place of HDF5."""

_NUM_THREADS, _GROUP_FILES = 4, 256
"""Threads, whose reads wait for a disk together, and files that a thread reads in one call."""

_MAX_CPU_SHARE = 0.8
"""Share of the time of a group below which its reads wait for the disk. From the page cache it is 1
on a machine with nothing else running; from a disk 0.7, as the kernel also works for such reads."""

_NUM_THREADED_GROUPS = 128
"""Groups that threads read before it is measured again whether reads wait for the disk."""

_END_OF_FILE = 28
"""Address of the size of the file in the superblock of HDF5 1.10, versions 2 and 3."""


def part_path(root: Path, index: int) -> Path:
    return root / layout.PARTS / layout.part_name(index)


def part_names(root: Path) -> set[str]:
    """File names of the parts in a store."""
    folder = root / layout.PARTS
    if is_url(root):
        return {path.name for path in folder.glob(layout.PART_GLOB)}
    try:
        return set(fnmatch.filter(os.listdir(folder), layout.PART_GLOB))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def is_streamed(
    root: Path, codec: str, num_bytes: int, streamed_bytes: int = STREAMED_BYTES
) -> bool:
    """Return whether the rows of a part are written as they come instead of being held in memory.

    Parts in an object store are built in memory, as are compressed ones, whose layout depends on
    the sizes of all chunks.
    """
    return codec == "none" and num_bytes >= streamed_bytes and not is_url(root)


def begin_part(
    disk: AtomicFolder,
    part: Part,
    specs: Sequence[LayerSpec],
    manifest: Manifest,
    listing: Listing,
    streamed_bytes: int = STREAMED_BYTES,
) -> PartBuilder:
    """Begin a part, to which rows are added in order; `is_streamed` tells where they are held.

    Raises RunError if the disk is full or fails.
    """
    run = manifest.run_of(part)
    num_bytes = len(part) * sum(spec.row_bytes for spec in specs)
    if not is_streamed(disk.root, run.codec, num_bytes, streamed_bytes):
        return PartBuilder(part, specs)
    path = part_path(disk.root, part.index)
    file = ChunkFile(path, disk.begin_file(path))
    try:
        RowFile.of_part(run, part).create(file, listing)
    except BaseException:
        file.discard()
        raise
    return PartBuilder(part, specs, file)


def commit_part(
    disk: AtomicFolder, builder: PartBuilder, manifest: Manifest, listing: Listing
) -> Sequence[Failure]:
    """Commit a part; a part that another process has committed first is kept.

    Return the failures of the part that the store holds then. Raises RunError if the disk is full
    or fails, and StoreError if the file of the other process is not valid.
    """
    run = manifest.run_of(builder.part)
    path = part_path(disk.root, builder.part.index)
    if builder.file is None:
        is_new = disk.publish(path, builder.build(run, listing, manifest.to_json()))
    else:
        builder.finish(builder.file, run, listing, manifest.to_json())
        is_new = builder.file.save()
    if is_new:
        return builder.failures
    problem, failures = inspect_file(path, RowFile.of_part(run, builder.part))
    if problem is not None:
        raise StoreError(f"{path} was written by another process and is not valid: {problem}.")
    return failures


def inspect_parts(
    root: Path, manifest: Manifest, parts: Sequence[Part], min_parts: int = MANY_FILES
) -> Iterator[tuple[Part, str | None, Sequence[Failure]]]:
    """Yield `inspect_file` of several parts, in order; files in a bucket are prefetched.

    Of many parts on a disk only the chunk tables are read, which takes a tenth of the time; parts
    with failures, and those that their table does not describe as they should be, are opened.
    """
    if len(parts) < min_parts or is_url(root):
        paths = [part_path(root, part.index) for part in parts]
        for part, path, opened in zip(parts, paths, prefetch_files(paths), strict=True):
            yield part, *inspect_file(path, RowFile.of_part(manifest.run_of(part), part), opened)
        return
    folder = os.fspath(root / layout.PARTS)

    def is_complete(part: Part) -> bool:
        path = os.path.join(folder, layout.part_name(part.index))  # a Path takes 15 us
        return _is_complete_by_table(path, part, manifest.run_of(part))

    for part, is_valid in zip(parts, map_in_threads(is_complete, parts), strict=True):
        if is_valid:
            yield part, None, ()
        else:
            path = part_path(root, part.index)
            yield part, *inspect_file(path, RowFile.of_part(manifest.run_of(part), part))


def _is_complete_by_table(path: str, part: Part, run: Run) -> bool:
    """Return whether the chunk table of a file describes the part without failures."""
    try:
        with ErrorRecordingFile(path) as raw:
            table = find_table(raw)
            # What HDF5 wrote behind the table may be cut off; its superblock has the whole size.
            if raw.size != int.from_bytes(raw.pread(8, _END_OF_FILE), "little"):
                return False
        header = {} if table is None else table.header
        if (header["fingerprint"], header["start"]) != (run.digest, part.start):
            return False
        entries = {about["path"]: (about["shape"], about["dtype"]) for about in header["datasets"]}
    except (OSError, LookupError, TypeError):
        return False  # `inspect_file` says what it is
    rows = [entries.get(path, ([], ""))[0] for path in (layout.KEY, layout.LABEL, layout.STATUS)]
    failed = entries.get(f"{layout.FAILURES}/row")
    return (
        rows == [[len(part)]] * len(rows)
        and failed is not None
        and failed[0] == [0]
        and all(
            entries.get(f"{layout.FEATURES}/{spec.name}") == ([len(part), *spec.shape], spec.dtype)
            for spec in run.layers
        )
    )


def inspect_file(
    path: Path, expected: RowFile, opened: Callable[[], S3File] | None = None
) -> tuple[str | None, Sequence[Failure]]:
    """Reason why a file is not valid by what it says of itself, or None, and its failures.

    Flipped bits are found by verifying and packing.
    """
    try:
        with open_metadata(path, opened) as file:
            problem = expected.problem(file)
            return problem, () if problem else read_failures(file)
    except layout.UNREADABLE as error:
        return damage_text(path, error), ()


def map_in_threads(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield work(item) for each of very many items, in order.

    Threads are used while reads wait for the disk. From the page cache a single thread is twice as
    fast, because the others pass the interpreter's lock at every system call.
    """

    def work_on(group: Sequence[T]) -> list[R]:
        return [work(item) for item in group]

    groups = (items[i : i + _GROUP_FILES] for i in range(0, len(items), _GROUP_FILES))
    threads = ThreadPoolExecutor(_NUM_THREADS, "featx-files")
    try:
        for group in groups:
            started_at, used_before_s = time.perf_counter(), time.thread_time()
            results = work_on(group)
            elapsed_s, used_s = time.perf_counter() - started_at, time.thread_time() - used_before_s
            yield from results
            if used_s < _MAX_CPU_SHARE * elapsed_s:
                for results in threads.map(work_on, itertools.islice(groups, _NUM_THREADED_GROUPS)):
                    yield from results
    finally:
        threads.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class DamageRecord:
    """Content of damaged.json: what is to be repaired in a store, until it is.

    Attributes:
        files: names of damaged files, whose chunks the next run compares; features.h5 stays among
            them until the store is packed again.
        lost: index of a part -> ranges of its rows that no file holds, each (start, stop).
        content: bytes of the file from which the record was read; none if there was no file.
    """

    files: frozenset[str] = frozenset()
    lost: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    content: bytes = field(default=b"", compare=False)

    @classmethod
    def read(cls, root: Path) -> DamageRecord:
        """Record of a store; if it is damaged itself, all files have to be compared."""
        path = root / layout.DAMAGED
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return cls()
        try:
            values = parse_result(path, content)
            lost = {int(index): [(a, b) for a, b in rows] for index, rows in values["rows"].items()}
            return cls(frozenset(values["files"]), lost, content)
        except (StoreError, LookupError, TypeError, ValueError):
            return cls(frozenset([layout.PACKED, *part_names(root)]), content=content)

    @property
    def is_due(self) -> bool:
        """Whether something is to be repaired."""
        return bool(self.files or self.lost)

    def write(self, disk: AtomicFolder, before: DamageRecord) -> None:
        """Write the record in place of one that was read, or delete it if nothing is to be
        repaired. Raises RunError if another process has written one to a bucket in between.
        """
        # No request deletes an object only if it has not changed, so a record without entries stays
        # in a bucket.
        is_kept = self.is_due or not disk.has_locks
        if self == before and (is_kept or not before.content):
            return
        path = disk.root / layout.DAMAGED
        if not is_kept:
            disk.remove(path)
            return
        rows = {str(index): list(ranges) for index, ranges in sorted(self.lost.items())}
        data = result_json({"files": sorted(self.files), "rows": rows}, indent=2)
        if before.content:
            is_written = disk.compare_and_swap(path, before.content, data)
        else:
            is_written = disk.publish(path, data) or path.read_bytes() == data
        if not is_written:
            raise RunError(
                f"{path} was changed by another process since this one began, so it was not "
                "replaced. Nothing committed is lost. Give the same command again when that "
                "process has ended."
            )

    def gaps(self, part: Part, is_there: bool) -> list[Part]:
        """Ranges of rows of a part that are lost: all, if neither its file nor a record exists."""
        ranges = self.lost.get(part.index, [] if is_there else [(part.start, part.stop)])
        return [Part(part.index, start, stop) for start, stop in ranges]


def missing_parts(root: Path, manifest: Manifest) -> list[tuple[Run, list[Part]]]:
    """Runs of a store that lack parts, with the missing rows, judged by file names only.

    Commands use this before they hold the lock and look into the files. For a part with lost rows,
    the ranges of these are listed.
    """
    num_packed, record = 0, DamageRecord.read(root)
    with contextlib.suppress(*layout.UNREADABLE), open_metadata(root / layout.PACKED) as file:
        num_packed = num_runs_of(file)
    names = part_names(root)
    found = []
    for number, run in enumerate(manifest.runs):
        is_packed = number < num_packed
        parts = [
            gap
            for part in run.parts()
            for gap in record.gaps(part, is_packed or layout.part_name(part.index) in names)
        ]
        if parts:
            found.append((run, parts))
    return found


_FOLDERS = (
    "",
    layout.PARTS,
    layout.PROBE_HEADS,
    layout.ZEROSHOT_HEADS,
    layout.WORKERS,
    layout.SHEETS,
    layout.TENSORBOARD,
    f"{layout.TENSORBOARD}/*",
    ".hydra",
)
"""Folders of a store, as globs, in which such files may lie."""


def clear_leftovers(disk: AtomicFolder) -> None:
    """Delete what killed processes have left in a store; only its holder may do this.

    Files that jobs without its lock, such as a probe, are writing at this moment stay.
    """
    for path in _leftovers(disk.root):
        if path.is_dir():
            disk.remove(path)
        else:
            disk.remove_leftover(path)
    clear_job_folders(disk)


def clear_job_folders(disk: AtomicFolder) -> None:
    """Delete the folders of workers whose driver was killed; tasks that still run end without it.

    Without locks nothing is deleted while a process that writes the store is alive.
    """
    jobs = disk.root / layout.JOBS
    folders: set[Path]
    if isinstance(jobs, S3Path):
        folders = {jobs / path.relative_to(jobs).parts[0] for path, _ in jobs.objects()}
    else:
        folders = {*jobs.glob(layout.JOB_GLOB)}
    # A driver has a heartbeat before it has a folder, so this look has to come second.
    if not disk.has_locks and any(record.is_alive for record in read_heartbeats(disk.root)):
        return
    for folder in folders:
        if fnmatch.fnmatchcase(folder.name, layout.JOB_GLOB):
            disk.remove(folder)
            disk.remove_best_effort(folder)  # and `jobs`, if it is empty


def leftover_bytes(root: Path) -> int:
    """Bytes on disk that the next run into a store frees by deleting temporary files."""
    num_bytes = 0
    for path in _leftovers(root):
        with contextlib.suppress(OSError):  # it has got its final name meanwhile
            num_bytes += path.stat().st_blocks * 512
    return num_bytes


def _leftovers(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        yield from root.glob(f"{folder}/{TEMPORARY_PREFIX}*" if folder else f"{TEMPORARY_PREFIX}*")
