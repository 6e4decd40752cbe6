"""Packs the parts of a finished store into one plain features.h5, chunk by chunk.

HDF5 can crash its process when a disk fails, and the run must survive that. So a small file is
built in memory, where no write fails, and a larger one in a process of its own (`python -m
featx.store.pack FOLDER`). Sources are only read; parts are deleted once the packed file is
complete, checked and synced. If features.h5 already holds earlier runs, it is one more source, and
the new file replaces it.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.base import module_command, module_environment, name_text, size_text
from featx.errors import FeatxError, RunError, StoreError, counted
from featx.storage import AtomicFolder, ReservedFile, exclusive_lock
from featx.store import layout
from featx.store.checksums import check_chunks, good_chunks
from featx.store.chunk_table import write_chunk_table
from featx.store.committed_parts import remove_parts
from featx.store.dtypes import stored_dtype
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import check_texts, damage_text, open_hdf5, seal_texts
from featx.store.heartbeat import refuse_other_writers
from featx.store.image_states import read_image_checksums
from featx.store.listing import make_groups, read_listing, row_values, same_values, write_classes
from featx.store.manifest import Manifest, load_manifest, num_runs_of
from featx.store.part_builder import (
    Extent,
    create_columns,
    create_layer,
    make_feature_groups,
    whole_chunk,
    write_columns,
)
from featx.store.part_files import DamageRecord, clear_leftovers
from featx.store.result_files import read_failures, write_failures
from featx.types import (
    UNKNOWN_IMAGE,
    Failure,
    LayerSpec,
    Listing,
    Part,
    Status,
    combined_status,
)

HEADROOM_BYTES = 16 << 20
"""Bytes to reserve beyond the size of the parts, for HDF5 metadata and other writers."""

IN_MEMORY_BYTES = 8 << 20
"""Largest size of the sources that are packed in memory. A process of its own takes as long to
start as packing hundreds of megabytes."""


LARGEST_PACKED_BYTES = 256 << 30
"""Largest size of a store that pack=auto packs. Parts are read as fast as a packed file, and beyond
this size the copy takes minutes to hours and twice the disk."""


def reason_to_keep_parts(stored_bytes: int, free_bytes: int) -> str | None:
    """Say why pack=auto does not pack a store, or None if it does.

    Args:
        stored_bytes: bytes of the files to pack.
        free_bytes: bytes that are free on the disk.
    """
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


def pack_parts(root: Path, lock: int, stored_bytes: int) -> None:
    """Pack a store: in memory if it is small, otherwise in a child process.

    Args:
        root: folder of the store.
        lock: file descriptor that holds the lock.
        stored_bytes: bytes of the files to pack.

    Raises:
        RunError: packing failed. The parts are kept; the next run repairs damaged ones.
    """
    if stored_bytes > IN_MEMORY_BYTES:
        pack_in_child(root, lock)
        return
    try:
        pack(root, in_memory=True)
    except FeatxError as error:
        raise _packing_failed(root, str(error)) from error
    except OSError as error:
        raise _packing_failed(root, f"{type(error).__name__}: {error}.") from error


def pack_in_child(root: Path, lock: int) -> None:
    """Pack a store in a child process."""
    result = subprocess.run(
        module_command("featx.store.pack", str(root)),
        env=module_environment(),
        pass_fds=(lock,),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        raise _packing_failed(root, reason[0])


def _packing_failed(root: Path, reason: str) -> RunError:
    """Error for a store whose parts could not be packed."""
    return RunError(
        f"packing {root / layout.PACKED} failed: {reason} The parts are still there and "
        "featx.open reads them. Give the same command again to pack them, or pack=false to "
        "leave them as they are."
    )


def pack_store(root: Path) -> bool:
    """Pack a finished store that was kept in parts, and delete the parts.

    Returns:
        whether there was anything to pack.

    Raises:
        StoreError: there is no store, or rows are missing.
        RunError: the disk is full or fails; the parts are kept.
    """
    manifest, _ = load_manifest(root)
    if manifest is None:
        raise StoreError(f"{root} holds no store: there is no {layout.MANIFEST} in it.")
    disk = AtomicFolder(root)
    with exclusive_lock(root / layout.LOCK) as lock:
        # Slurm tasks without a driver write without this lock.
        refuse_other_writers(root)
        clear_leftovers(disk)
        sources = _source_files(root, manifest)
        has_parts = [source.path.name for source in sources] != [layout.PACKED]
        if has_parts:
            stored_bytes = sum(source.path.stat().st_size for source in sources)
            size = packed_size_bound(stored_bytes)
            if (free := disk.free_bytes()) < size:
                raise RunError(
                    f"packing {root} needs {size} bytes, but {free} are free. Free some space "
                    "and give the same command again; featx.open reads the parts as well."
                )
            pack_parts(root, lock, stored_bytes)
        remove_parts(disk)
        DamageRecord().write(disk, DamageRecord.read(root))
    return has_parts


@dataclass(frozen=True)
class _SourceFile:
    """Source file with rows [start, stop) of the layers of some runs."""

    path: Path
    start: int
    stop: int
    fingerprint_sha256: str
    part: Part | None = None


def pack(root: Path, in_memory: bool = False) -> None:
    """Create features.h5 from the files of a store and check every chunk of it."""
    manifest, _ = load_manifest(root)
    if manifest is None:
        raise StoreError(f"{root} holds no store: there is no {layout.MANIFEST}.")
    sources = _source_files(root, manifest)
    if [source.path.name for source in sources] == [layout.PACKED]:
        return
    listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
    if listing is None:
        raise StoreError(f"{root / layout.LISTING} is missing or damaged.")
    try:
        size = packed_size_bound(sum(source.path.stat().st_size for source in sources))
    except FileNotFoundError as error:
        raise StoreError(
            f"{error.filename} was removed while {root} was being packed: another process writes "
            "the store, on a file system without locks. Give the same command again."
        ) from error
    disk = AtomicFolder(root)
    with _open_packed_file(disk, None if in_memory else size) as (file, read_at):
        try:
            with h5py.File(file, "w", libver=layout.LIBVER) as packed:
                writer = _PackWriter(manifest, listing, packed)
                writer.create()
                seal_texts(packed, file)
                writer.copy(sources)
            # Read back before the file gets its name and the parts are deleted.
            with h5py.File(file, "r") as packed:
                check_texts(packed, read_at)
                check_chunks(packed)
        except layout.UNREADABLE as error:
            damaged = _record_damaged(disk, sources)
            if isinstance(error, OSError) and not isinstance(error, StoreError) and not damaged:
                raise  # the disk failed; no source is damaged
            raise StoreError(f"{error}{damaged}") from error


@contextlib.contextmanager
def _open_packed_file(
    disk: AtomicFolder, reserved: int | None
) -> Iterator[tuple[ReservedFile | io.BytesIO, Callable[[int, int], bytes]]]:
    """File object for the packed file, which gets its name when the block succeeds."""
    path = disk.root / layout.PACKED
    if reserved is not None:
        with disk.reserve_file(path, reserved, replace=True) as file:
            yield file, file.pread
        return
    buffer = io.BytesIO()
    yield buffer, lambda size, address: bytes(buffer.getbuffer()[address : address + size])
    disk.replace(path, buffer.getbuffer())


def _source_files(root: Path, manifest: Manifest) -> list[_SourceFile]:
    """Source files: an existing features.h5, then the parts that it does not hold."""
    sources, num_packed = [], 0
    packed = root / layout.PACKED
    # The rows of a damaged one have become parts, and the new one takes its place.
    if packed.exists() and packed.name not in DamageRecord.read(root).files:
        try:
            with open_hdf5(packed) as file:
                num_packed, fingerprint_sha256 = num_runs_of(file), file.attrs["fingerprint"]
        except (*layout.UNREADABLE, StoreError) as error:
            raise StoreError(
                f"{packed}: {damage_text(packed, error)}. job=verify "
                "verify.repair=true rebuilds it."
            ) from error
        if len(manifest.runs) < num_packed or fingerprint_sha256 != manifest.digest_of(num_packed):
            raise StoreError(
                f"{packed} belongs to another run. Move it away and give the same command again."
            )
        rows = max(run.grid.stop_row for run in manifest.runs[:num_packed])
        sources.append(_SourceFile(packed, 0, rows, manifest.digest_of(num_packed)))
    for run in manifest.runs[num_packed:]:
        for part in run.parts():
            path = root / layout.PARTS / layout.part_name(part.index)
            sources.append(_SourceFile(path, part.start, part.stop, run.digest, part))
    missing = [source.path.name for source in sources if not source.path.is_file()]
    if missing and num_packed == 0 and packed.exists():
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


def _record_damaged(disk: AtomicFolder, sources: list[_SourceFile]) -> str:
    """Record the sources that differ from their checksums; the next run repairs them."""
    damaged, text = [], ""
    for source in sources:
        try:
            with open_hdf5(source.path) as file:
                check_chunks(file)
        except layout.UNREADABLE as error:
            if layout.is_damage(error):
                damaged.append(source.path.name)
                name = source.path.name
                text += f" {name} is damaged ({error}); the next run computes its lost rows."
    before = DamageRecord.read(disk.root)
    DamageRecord(before.files.union(damaged), before.lost).write(disk, before)
    return text


class _PackWriter:
    """Packed file that is being filled."""

    def __init__(self, manifest: Manifest, listing: Listing, packed: h5py.File) -> None:
        self._manifest = manifest
        self._listing = listing
        self._packed = packed
        self._num_rows = manifest.num_rows
        self._sums: dict[str, npt.NDArray[np.uint64]] = {}
        self._partial_chunks: dict[
            str, bytearray
        ] = {}  # dataset path -> bytes of an incomplete chunk
        self._status = np.full(self._num_rows, Status.ABSENT, dtype=np.uint8)
        self._images = np.full(self._num_rows, UNKNOWN_IMAGE, dtype=np.uint64)
        self._columns = {
            **row_values(listing),
            layout.STATUS: self._status,
            layout.IMAGE_CHECKSUM: self._images,
        }
        self._failures: dict[int, Failure] = {}

    def create(self) -> None:
        """Write attributes and datasets without rows."""
        packed, first = self._packed, self._manifest.runs[0]
        packed.attrs.update(
            layout.root_attributes(first.header, self._manifest.digest, complete=False)
        )
        packed.attrs["codec"] = first.codec
        make_groups(packed, self._listing)
        make_feature_groups(packed)
        grid = layout.Grid(self._num_rows, first.grid.part_rows)
        extent = Extent(self._num_rows, len(grid) * grid.slots, grid.column_chunk_rows)
        create_columns(packed, self._columns, extent)
        for spec in self._manifest.layers.values():
            self._create_layer(spec)

    def copy(self, sources: list[_SourceFile]) -> None:
        """Copy all rows; the attribute `complete` is set last."""
        packed = self._packed
        for source in sources:
            with open_hdf5(source.path) as file:
                self._copy_source(file, source)
        write_columns(packed, self._columns)
        for name, sums in self._sums.items():
            packed[f"{layout.CHECKSUMS}/{name}"] = sums
        write_classes(packed, self._listing.classes)
        write_failures(packed, self._failures.values())
        packed.attrs[layout.MANIFEST_COPY] = np.bytes_(self._manifest.to_json())
        packed.attrs["num_failures"] = len(self._failures)
        packed.attrs["complete"] = True
        write_chunk_table(packed, self._manifest.digest, len(self._manifest.runs), 0)

    def _create_layer(self, spec: LayerSpec) -> None:
        """Create an empty dataset with chunks for the rows of the whole store."""
        run = self._manifest.first_run_with(spec.name)
        grid = layout.Grid(self._num_rows, run.grid.part_rows)
        chunk_rows = grid.chunk_rows(spec.row_bytes, run.codec != "none")
        extent = Extent(self._num_rows, len(grid) * grid.slots, chunk_rows)
        create_layer(self._packed, spec, extent, run.codec, run.tokens.get(spec.name))
        num_chunks = -(-self._num_rows // chunk_rows)
        self._sums[f"{layout.FEATURES}/{spec.name}"] = np.zeros(num_chunks, np.uint64)

    def _copy_source(self, file: h5py.File, source: _SourceFile) -> None:
        """Copy the rows of one file to their positions."""
        if file.attrs["fingerprint"] != source.fingerprint_sha256:
            raise StoreError(f"{source.path} belongs to another run.")
        rows = slice(source.start, source.stop)
        num_rows = source.stop - source.start
        if file.attrs.get("start", 0) != source.start or len(file[layout.KEY]) != num_rows:
            raise StoreError(f"{source.path} holds the rows of another part.")
        for name, expected in row_values(self._listing).items():
            for start, values in good_chunks(file, name):
                if not same_values(values, expected[rows][start : start + len(values)]):
                    raise StoreError(f"{source.path}: /{name} is not that of {layout.LISTING}.")
        for name in file[layout.FEATURES]:
            path = f"{layout.FEATURES}/{name}"
            self._copy_rows(file, path, source.start)
        status = self._status[rows]
        statuses = np.concatenate([values for _, values in good_chunks(file, layout.STATUS)])
        status[:] = combined_status(status, statuses)
        self._copy_image_checksums(file, source)
        for failure in read_failures(file):
            self._failures.setdefault(failure.row, failure)

    def _copy_image_checksums(self, file: h5py.File, source: _SourceFile) -> None:
        """Copy image checksums; they must agree with those of other layers of the same rows."""
        images = self._images[source.start : source.stop]
        new_images = read_image_checksums(file)
        both = (images != UNKNOWN_IMAGE) & (new_images != UNKNOWN_IMAGE)
        if (other := np.flatnonzero(both & (images != new_images))).size:
            key = name_text(bytes(self._listing.keys[source.start + int(other[0])]))
            layers = ", ".join(file[layout.FEATURES])
            raise StoreError(
                f"{source.path.name}: {counted(len(other), 'row was', 'rows were')} computed for "
                f"{layers} from other images than the layers before them, such as {key}. "
                "refresh=true with the command of the run computes them again."
            )
        images[:] = np.where(new_images == UNKNOWN_IMAGE, images, new_images)

    def _copy_rows(self, file: h5py.File, path: str, first_row: int) -> None:
        """Copy the rows of a dataset: aligned chunks as stored, others decoded and checked."""
        rows, target, sums = file[path], self._packed[path], self._sums[path]
        step = target.chunks[0]
        num_rows = len(rows)
        has_same_chunks = rows.chunks == target.chunks and _filters(rows) == _filters(target)
        if has_same_chunks and first_row % step == 0:
            stored = file[f"{layout.CHECKSUMS}/{path}"][:]
            # A short last chunk may be copied as it is only if no rows follow it in the store.
            is_last = first_row + num_rows == self._num_rows
            num_whole = -(-num_rows // step) if is_last else num_rows // step
            copy_chunks(rows, target, first_row, num_whole)
            sums[first_row // step : first_row // step + num_whole] = stored[:num_whole]
            begin = num_whole * step
        else:
            begin = 0
        for start, values in good_chunks(file, path, begin):
            self._put(path, first_row + start, values)

    def _put(self, path: str, first_row: int, values: npt.NDArray[Any]) -> None:
        """Write rows that do not fill whole chunks; they arrive in ascending order.

        The bytes of a chunk are collected until its last row has arrived.
        """
        target, sums = self._packed[path], self._sums[path]
        step, rest = target.chunks[0], (0,) * (target.ndim - 1)
        stop = first_row + len(values)
        partial = self._partial_chunks.setdefault(path, bytearray())
        for start in range(first_row - first_row % step, stop, step):
            low, high = max(start, first_row), min(start + step, stop)
            partial += values[low - first_row : high - first_row].tobytes()
            if high == min(start + step, self._num_rows):
                rows = np.frombuffer(bytes(partial), stored_dtype(target))
                chunk = whole_chunk(rows.reshape(-1, *target.shape[1:]), step)
                data = Pipeline.of(target).encode(chunk)
                target.id.write_direct_chunk((start, *rest), data)
                sums[start // step] = layout.checksum(data)
                partial.clear()


def _filters(dataset: h5py.Dataset) -> list[Any]:
    """Filters of a dataset with their parameters."""
    properties = dataset.id.get_create_plist()
    return [properties.get_filter(i) for i in range(properties.get_nfilters())]


def copy_chunks(
    source: h5py.Dataset, target: h5py.Dataset, first_row: int, num_chunks: int
) -> None:
    """Copy the stored bytes of the first chunks of a dataset to rows from `first_row` on."""
    step = source.chunks[0]
    rest = (0,) * (source.ndim - 1)
    for row in range(0, num_chunks * step, step):
        mask, data = source.id.read_direct_chunk((row, *rest))
        target.id.write_direct_chunk((first_row + row, *rest), data, mask)


if __name__ == "__main__":
    try:
        pack(Path(sys.argv[1]))
    except FeatxError as error:
        sys.exit(str(error))
