"""Packs the parts of a finished store into one plain features.h5, chunk by chunk.

Sources are only read; parts are deleted once the packed file is complete, checked and synced. If
features.h5 already holds earlier runs, it is one more source, and the new file replaces it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from featx.base import name_text, size_text
from featx.errors import FeatxError, RunError, StoreError, counted
from featx.storage import AtomicFolder
from featx.store import layout
from featx.store.chunk_file import ChunkFile
from featx.store.committed_parts import remove_parts
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import (
    check_chunks,
    damage_text,
    good_chunks,
    open_hdf5,
    open_plain_dataset,
    read_values,
)
from featx.store.heartbeat import refuse_other_writers
from featx.store.image_states import read_image_checksums
from featx.store.listing import read_listing, row_values, same_values
from featx.store.manifest import Manifest, num_runs_of, require_manifest
from featx.store.part_files import DamageRecord, clear_leftovers, part_path
from featx.store.result_files import read_failures
from featx.store.row_file import RowFile
from featx.types import UNKNOWN_IMAGE, Failure, Listing, Status, combined_status

HEADROOM_BYTES = 16 << 20
"""Bytes to reserve beyond the size of the parts, for HDF5 metadata and other writers."""

LARGEST_PACKED_BYTES = 256 << 30
"""Largest size of a store that pack=auto packs. Parts are read as fast as a packed file, and beyond
this size the copy takes minutes to hours and twice the disk."""


def reason_to_keep_parts(stored_bytes: int, free_bytes: int) -> str | None:
    """Say why pack=auto does not pack a store, or None if it does."""
    if stored_bytes > LARGEST_PACKED_BYTES:
        return (
            f"they are {size_text(stored_bytes)}, and pack=auto packs up to "
            f"{size_text(LARGEST_PACKED_BYTES)}; pack=true packs larger stores, too"
        )
    needed = packed_size_bound(stored_bytes)
    if free_bytes < needed:
        return (
            f"packing needs {size_text(needed)}, {size_text(HEADROOM_BYTES)} of them as a reserve "
            f"for the disk, and {size_text(free_bytes)} are free"
        )
    return None


def packed_size_bound(stored_bytes: int) -> int:
    """Bytes to reserve for the packed file; it is never larger than its sources."""
    return stored_bytes + stored_bytes // 50 + HEADROOM_BYTES


def pack_parts(root: Path) -> None:
    """Pack a store whose lock the caller holds.

    Raises RunError if packing failed. The parts are kept; the next run repairs damaged ones.
    """
    stop = threading.Event()
    try:
        # Ctrl-C interrupts this thread only: HDF5 cannot go on after an interrupted call of Python.
        with ThreadPoolExecutor(1, "featx-pack") as threads:
            try:
                threads.submit(pack, root, stop).result()
            finally:
                stop.set()
    except (FeatxError, OSError) as error:
        kind = "" if isinstance(error, FeatxError) else f"{type(error).__name__}: "
        raise RunError(
            f"packing {root / layout.PACKED} failed: {kind}{error} The parts are still there and "
            "featx.open reads them. The command of the run packs them, or leaves them as they are "
            "with pack=false."
        ) from error


def pack_store(root: Path) -> bool:
    """Pack a finished store that was kept in parts, and delete the parts; False if it has none.

    Raises:
        StoreError: there is no store, or rows are missing.
        RunError: the disk is full or fails; the parts are kept.
    """
    manifest = require_manifest(root)
    disk = AtomicFolder(root)
    with disk.lock(root / layout.LOCK):
        # Slurm tasks without a driver write without this lock.
        refuse_other_writers(root)
        clear_leftovers(disk)
        sources = [path for path, _ in _source_files(root, manifest)]
        has_parts = [path.name for path in sources] != [layout.PACKED]
        if has_parts:
            stored_bytes = sum(path.stat().st_size for path in sources)
            size = packed_size_bound(stored_bytes)
            if (free := disk.free_bytes()) < size:
                raise RunError(
                    f"packing {root} needs {size} bytes, but {free} are free. Free some space "
                    "and give the same command again; featx.open reads the parts as well."
                )
            pack_parts(root)
        remove_parts(disk)
        DamageRecord().write(disk, DamageRecord.read(root))
    return has_parts


def pack(root: Path, stop: threading.Event | None = None) -> None:
    """Create features.h5 from the files of a store and check every chunk of it.

    Once `stop` is set, the copy ends with an error.
    """
    manifest = require_manifest(root)
    sources = _source_files(root, manifest)
    if [path.name for path, _ in sources] == [layout.PACKED]:
        return
    listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
    if listing is None:
        raise StoreError(f"{root / layout.LISTING} is missing or damaged.")
    disk, path = AtomicFolder(root), root / layout.PACKED
    try:
        size = packed_size_bound(sum(path.stat().st_size for path, _ in sources))
        with ChunkFile(path, disk.begin_file(path, replace=True, reserved_bytes=size)) as file:
            _copy_sources(sources, manifest, listing, file, stop or threading.Event())
            file.save()
    except RunError:
        raise
    except FileNotFoundError as error:
        raise StoreError(
            f"a file of {root} was removed while it was being packed: another process writes the "
            "store, on a file system without locks. Give the same command again."
        ) from error
    except layout.UNREADABLE as error:
        damaged = _record_damaged(disk, [path for path, _ in sources])
        if isinstance(error, OSError) and not isinstance(error, StoreError) and not damaged:
            raise  # the disk failed; no source is damaged
        raise StoreError(f"{error}{damaged}") from error


def _source_files(root: Path, manifest: Manifest) -> list[tuple[Path, RowFile]]:
    """Source files: an existing features.h5, then the parts that it does not hold."""
    sources: list[tuple[Path, RowFile]] = []
    num_packed = 0
    packed = root / layout.PACKED
    was_packed = packed.exists()
    # The rows of a damaged one have become parts, and the new one takes its place.
    if was_packed and packed.name not in DamageRecord.read(root).files:
        try:
            with open_hdf5(packed) as file:
                num_packed, fingerprint_sha256 = num_runs_of(file), file.attrs["fingerprint"]
        except (*layout.UNREADABLE, StoreError) as error:
            raise StoreError(
                f"{packed}: {damage_text(packed, error)}. {layout.repair_command(root)} rebuilds "
                "it."
            ) from error
        if len(manifest.runs) < num_packed or fingerprint_sha256 != manifest.digest_of(num_packed):
            raise StoreError(
                f"{packed} belongs to another run. Move it away and give the same command again."
            )
        sources.append((packed, RowFile.packed(manifest, num_packed)))
    for run in manifest.runs[num_packed:]:
        for part in run.parts():
            sources.append((part_path(root, part.index), RowFile.of_part(run, part)))
    missing = [path.name for path, _ in sources if not path.is_file()]
    if missing and not was_packed and packed.exists():
        # Another process, on a file system without locks, has packed the parts since the look at
        # features.h5 above, and has removed them.
        return _source_files(root, manifest)
    if missing:
        raise StoreError(
            f"{root} cannot be packed yet: "
            f"{counted(len(missing), 'part is', 'parts are')} missing, {missing[0]} first. The "
            "command of the run computes what is missing."
        )
    return sources


def _record_damaged(disk: AtomicFolder, sources: list[Path]) -> str:
    """Record the sources that differ from their checksums; the next run repairs them."""
    damaged, text = [], ""
    for path in sources:
        try:
            with open_hdf5(path) as file:
                check_chunks(file)
        except layout.UNREADABLE as error:
            if layout.is_damage(error):
                damaged.append(path.name)
                text += f" {path.name} is damaged ({error}); the next run computes its lost rows."
    before = DamageRecord.read(disk.root)
    DamageRecord(before.files.union(damaged), before.lost).write(disk, before)
    return text


def _copy_sources(
    sources: list[tuple[Path, RowFile]],
    manifest: Manifest,
    listing: Listing,
    target: ChunkFile,
    stop: threading.Event,
) -> None:
    """Copy the rows of all sources to their positions in the packed file."""
    row_file = RowFile.packed(manifest, len(manifest.runs))
    row_file.create(target, listing)
    all_status = np.full(len(listing), Status.ABSENT, dtype=np.uint8)
    all_images = np.full(len(listing), UNKNOWN_IMAGE, dtype=np.uint64)
    failures: dict[int, Failure] = {}

    for path, source in sources:
        rows = slice(source.start, source.stop)
        with open_hdf5(path) as file:
            _check_rows(path, file, source, listing)
            for name in file[layout.FEATURES]:
                _copy_layer(file, f"{layout.FEATURES}/{name}", source.start, target, stop)

            statuses = np.concatenate([values for _, values in good_chunks(file, layout.STATUS)])
            all_status[rows] = combined_status(all_status[rows], statuses)

            # All layers of a row must be of the same image.
            before, now = all_images[rows], read_image_checksums(file)
            both = (before != UNKNOWN_IMAGE) & (now != UNKNOWN_IMAGE)
            if (other := np.flatnonzero(both & (before != now))).size:
                key = name_text(bytes(listing.keys[source.start + int(other[0])]))
                raise StoreError(
                    f"{path.name}: {counted(len(other), 'row was', 'rows were')} computed for "
                    f"{', '.join(file[layout.FEATURES])} from other images than the layers before "
                    f"them, such as {key}. refresh=true with the command of the run computes them "
                    "again."
                )
            all_images[rows] = np.where(now == UNKNOWN_IMAGE, before, now)

            for failure in read_failures(file):
                failures.setdefault(failure.row, failure)

    for name, values in row_values(listing).items():
        target.append(name, 0, values)
    target.append(layout.STATUS, 0, all_status)
    target.append(layout.IMAGE_CHECKSUM, 0, all_images)
    row_file.finish(target, listing, [*failures.values()], manifest.to_json())


def _check_rows(path: Path, file: h5py.File, source: RowFile, listing: Listing) -> None:
    """Raise StoreError unless a file holds the rows of a source."""
    if file.attrs["fingerprint"] != source.fingerprint_sha256:
        raise StoreError(f"{path} belongs to another run.")
    if file.attrs.get("start", 0) != source.start or len(file[layout.KEY]) != len(source):
        raise StoreError(f"{path} holds the rows of another part.")
    for name, values_of_all in row_values(listing).items():
        expected = values_of_all[source.start : source.stop]
        for start, values in good_chunks(file, name):
            if not same_values(values, expected[start : start + len(values)]):
                raise StoreError(f"{path}: /{name} is not that of {layout.LISTING}.")


def _copy_layer(
    file: h5py.File, path: str, first_row: int, target: ChunkFile, stop: threading.Event
) -> None:
    """Copy the rows of a dataset: aligned chunks as stored, others decoded."""
    rows, packed = open_plain_dataset(file, path), target.hdf5[path]
    step, begin = packed.chunks[0], 0
    has_same_chunks = (
        rows.chunks == packed.chunks and Pipeline.of(rows).filters == Pipeline.of(packed).filters
    )
    if has_same_chunks and first_row % step == 0:
        sums = read_values(file, f"{layout.CHECKSUMS}/{path}")
        # A short last chunk may be copied as it is only if no rows follow it in the store.
        is_last = first_row + len(rows) == len(packed)
        begin = len(rows) if is_last else len(rows) // step * step
        for row in range(0, begin, step):
            if stop.is_set():
                raise RunError("packing was interrupted.")
            mask, data = rows.id.read_direct_chunk((row, *(0,) * (rows.ndim - 1)))
            if not layout.agrees(sums[row // step], data):
                raise StoreError(f"/{path} differs from its checksum at row {row}.")
            target.append_chunk(path, first_row + row, data, mask)
    if begin < len(rows):
        for start, values in good_chunks(file, path, begin):
            target.append(path, first_row + start, values)
