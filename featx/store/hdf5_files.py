"""Opens HDF5 files for reading, and checks what they claim and hold before it is believed."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from featx.errors import StoreError
from featx.storage import RawFile, S3File, S3Path
from featx.store import codecs, layout
from featx.store.dtypes import read_raw, stored_dtype
from featx.store.filter_pipeline import Pipeline
from featx.types import Array

_MAX_COMPRESSION = 1 << 20
"""Largest compression ratio that a dataset may claim, so that a damaged file cannot exhaust memory.

Zeros and NaN compress well: 32,768 times with zstd.
"""


def open_hdf5(path: Path, remote: S3File | None = None, **options: object) -> h5py.File:
    """Open a file for reading with plain h5py; the texts of its attributes are checked.

    For an object, h5py keeps a reference to `remote`, which is opened here if it is None.
    """
    if remote is None and isinstance(path, S3Path):
        remote = S3File(path)
    try:
        file = h5py.File(remote or path, "r", **options)
    except layout.UNREADABLE as error:
        if remote is not None:
            raise remote.error or error from error
        # HDF5 refuses a file that this process has open with another locking flag, for example by
        # an h5py.File of the user, so both flags are tried.
        file = h5py.File(path, "r", locking=False, **options)
    try:
        check_texts(
            file, remote.pread if remote else functools.partial(os.pread, file.id.get_vfd_handle())
        )
    except BaseException:
        file.close()
        raise
    return file


class ErrorRecordingFile(io.FileIO):
    """File object that keeps the error of its last failed read, as HDF5 loses the reason."""

    error: OSError | None = None

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def pread(self, size: int, address: int) -> bytes:
        """Read bytes at an address without moving the position."""
        return os.pread(self.fileno(), size, address)

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.error = error
            raise


def open_raw(path: Path) -> S3File | ErrorRecordingFile:
    """Open a file for reading bytes, on a disk or in an object store."""
    return S3File(path) if isinstance(path, S3Path) else ErrorRecordingFile(path)


@contextlib.contextmanager
def open_metadata(
    path: Path, opened: Callable[[], S3File | ErrorRecordingFile] | None = None
) -> Iterator[h5py.File]:
    """Open a file through Python, for its metadata; HDF5 gets no handle of the real file.

    `opened` returns the file if it was opened before; it is closed at the end. An OSError has an
    errno if the file cannot be read now, and none if it is damaged.
    """
    with opened() if opened is not None else open_raw(path) as raw:
        try:
            with h5py.File(raw, "r") as file:
                check_texts(file, raw.pread)
                yield file
        except layout.UNREADABLE as error:
            # A reference kept in `raw` would close a cycle through HDF5, which crashes at exit.
            failed, raw.error = raw.error, None
            raise failed or error from error


@contextlib.contextmanager
def suppress_damage() -> Iterator[None]:
    """Suppress errors of damaged data, but not errors of access to the file."""
    try:
        yield
    except (StoreError, *layout.UNREADABLE) as error:
        if not layout.is_damage(error):
            raise


def raise_unless_damage(path: Path, error: Exception) -> None:
    """Raise if an error does not show that a file is damaged."""
    if not layout.is_damage(error):
        raise StoreError(
            f"cannot read {path}: {error}. When it can be read, give the same command again."
        ) from error


def damage_text(path: Path, error: Exception) -> str:
    """Clause for a message on one of layout.UNREADABLE.

    Raises StoreError if the error is no damage: the file cannot be read now.
    """
    raise_unless_damage(path, error)
    return f"it cannot be read ({error})"


def write_values(file: h5py.File, path: str, values: Array) -> None:
    """Write a dataset without chunks: `file[path] = values` in half the time.

    A part has a dozen of them.
    """
    kind, _ = _hdf5_types(values.dtype)
    space = h5py.h5s.create_simple(values.shape)
    of_dataset, of_name = _creation_settings(path.isascii())
    dataset = h5py.h5d.create(file.id, None, kind, space, of_dataset)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(values))
    h5py.h5o.link(dataset, file.id, path.encode(), lcpl=of_name)


def write_attributes(target: h5py.File | h5py.Dataset, values: Mapping[str, object]) -> None:
    """Write attributes that `target` does not have yet: `target.attrs.update(values)`, in a third
    of the time for texts and numbers. A part has thirty of them.
    """
    for name, value in values.items():
        data = np.asarray(value, _TEXT if isinstance(value, str) else None, order="C")
        if data.dtype.kind not in "biuf" and data.dtype is not _TEXT:  # such as a list of texts
            target.attrs[name] = value
            continue
        in_file, in_memory = _hdf5_types(data.dtype)
        space = h5py.h5s.create_simple(data.shape)
        attribute = h5py.h5a.create(target.id, name.encode(), in_file, space)
        attribute.write(data, mtype=in_memory)


_TEXT = h5py.string_dtype()


@functools.cache
def _hdf5_types(dtype: np.dtype[Any]) -> tuple[h5py.h5t.TypeID, h5py.h5t.TypeID]:
    """Types of a numpy dtype in a file and in memory; that of objects is `_TEXT`."""
    dtype = _TEXT if dtype.kind == "O" else dtype
    return h5py.h5t.py_create(dtype, logical=True), h5py.h5t.py_create(dtype)


@functools.cache
def _creation_settings(is_ascii: bool) -> tuple[h5py.h5p.PropDCID, h5py.h5p.PropLCID]:
    """Settings of a dataset without times, and those of its name as h5py chooses them."""
    of_dataset = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    of_dataset.set_obj_track_times(False)
    of_name = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    of_name.set_create_intermediate_group(True)
    of_name.set_char_encoding(h5py.h5t.CSET_ASCII if is_ascii else h5py.h5t.CSET_UTF8)
    return of_dataset, of_name


def open_plain_dataset(file: h5py.File, path: str, may_be_partial: bool = False) -> h5py.Dataset:
    """Dataset at `path`, if it lies in this file and is not larger than the file can hold.

    The filters of a dataset of featx are loaded: a process that has not imported hdf5plugin would
    take the error of HDF5 about a missing filter for damage.

    Args:
        may_be_partial: whether chunks without filters may be missing, as in a file of others whose
            writer stopped. The caller then checks the filters, which its chunks may not use.

    Raises:
        StoreError: it is missing, a link, virtual, external, or impossibly large.
        MissingExtraError: hdf5plugin is needed and not installed.
    """
    check_hard_links(file, path)
    # file[path], is_virtual and external would look up the path and the settings once each: a
    # command opens hundreds of datasets.
    found = h5py.h5o.open(file.id, path.encode())
    if not isinstance(found, h5py.h5d.DatasetID):
        raise _not_plain(file, path, "it is no dataset.")
    settings = found.get_create_plist()
    if settings.get_layout() == h5py.h5d.VIRTUAL or settings.get_external_count():
        raise _not_plain(
            file,
            path,
            f"it is {'external' if settings.get_external_count() else 'virtual'}, so its "
            "values lie in other files, and read as zeros if those are missing. Copy it into a "
            f"file of its own, in Python as new[{path!r}] = old[{path!r}][:].",
        )
    size = math.prod(found.shape) * found.get_type().get_size()  # a bfloat16 reads as float32
    stored = found.get_storage_size()
    num_filters = settings.get_nfilters()
    if not may_be_partial:
        codecs.require_filters(settings.get_filter(i)[0] for i in range(num_filters))
    if size and not stored:
        raise StoreError(
            f"{file.filename}: /{path} claims {size} bytes, but was never written: the file holds "
            "none of them; refused."
        )
    is_chunked = settings.get_layout() == h5py.h5d.CHUNKED
    is_compact = num_filters or (may_be_partial and is_chunked)
    if size > stored * (_MAX_COMPRESSION if is_compact else 1):
        raise StoreError(
            f"{file.filename}: /{path} claims {size} bytes, the file holds {stored} of it; refused."
        )
    return h5py.Dataset(found, readonly=file.mode == "r")


def _not_plain(file: h5py.File, path: str, reason: str) -> StoreError:
    return StoreError(f"{file.filename}: /{path} is no plain dataset; refused: {reason}")


def read_values(file: h5py.File, path: str) -> Array:
    """Read a whole dataset of numbers: `open_plain_dataset(file, path)[:]`, in half the time."""
    dataset = open_plain_dataset(file, path).id
    values = np.empty(dataset.shape, dataset.dtype)
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def check_hard_links(file: h5py.File, path: str) -> None:
    """Raise StoreError unless every step of `path` is a hard link within this file."""
    where = ""
    for name in path.split("/"):
        where = f"{where}/{name}".lstrip("/")
        try:
            link = file.id.links.get_info(where.encode())
        except RuntimeError as error:  # HDF5 has no type of error for a name that does not exist
            if where in file:
                raise
            raise StoreError(f"{file.filename} has no /{where}.") from error
        if link.type != h5py.h5l.TYPE_HARD:
            raise StoreError(f"{file.filename}: /{where} links to another object; refused.")


_SIGNATURE = b"GCOL\x01\0\0\0"
"""First bytes of a heap; its length in bytes follows, 8 bytes little-endian."""


def seal_texts(file: h5py.File, raw: io.RawIOBase | io.BytesIO) -> None:
    """Record the addresses and checksums of the heaps in an attribute."""
    file.flush()
    raw.seek(0)
    data = raw.read()
    heaps = []
    address = data.find(_SIGNATURE)
    while address >= 0:
        begin = address + len(_SIGNATURE)
        size = int.from_bytes(data[begin : begin + 8], "little")
        heaps.append((address, size, layout.checksum(data[address : address + size])))
        address = data.find(_SIGNATURE, address + size)
    file.attrs[layout.TEXT_CHECKSUMS] = np.array(heaps, dtype=np.uint64)


def check_texts(file: h5py.File, read: Callable[[int, int], bytes]) -> None:
    """Compare the heaps of a file with their checksums."""
    # samples.h5 has no attributes with texts, so it has no heaps and no checksums of heaps.
    heaps = np.reshape(file.attrs.get(layout.TEXT_CHECKSUMS, ()), (-1, 3))
    for address, size, crc in heaps.tolist():
        is_inside = address + size <= file.id.get_filesize()
        if not (is_inside and layout.agrees(crc, read(size, address))):
            raise StoreError("the texts of its attributes differ from their checksum")


def row_datasets(file: h5py.File) -> list[str]:
    """Paths of all datasets with one entry per row: those of the listing, then the features."""
    features = [f"{layout.FEATURES}/{name}" for name in file[layout.FEATURES]]
    columns = [f"{layout.COLUMNS}/{name}" for name in file.get(layout.COLUMNS, ())]
    fixed = (layout.KEY, layout.LABEL, layout.STATUS, layout.IMAGE_CHECKSUM)
    return [*fixed, *columns, *features]


def chunks_with_verdict(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, Array, bool]]:
    """Yield of each chunk its first row, its rows as stored, and whether they have their checksum.

    bfloat16 rows are uint16; lost ones are zeros.
    """
    sums = read_values(file, f"{layout.CHECKSUMS}/{path}")
    yield from compared_chunks(open_plain_dataset(file, path), sums, first_row)


def compared_chunks(
    dataset: h5py.Dataset, sums: Array, first_row: int = 0
) -> Iterator[tuple[int, Array, bool]]:
    """Yield the chunks of a dataset as `chunks_with_verdict` does."""
    step, rest = dataset.chunks[0], (0,) * (dataset.ndim - 1)
    if len(sums) != -(-len(dataset) // step):
        raise StoreError(f"{dataset.name} has {len(sums)} checksums for {len(dataset)} rows")
    pipeline, dtype = Pipeline.of(dataset), stored_dtype(dataset)
    for start in range(first_row, len(dataset), step):
        shape = (min(step, len(dataset) - start), *dataset.shape[1:])
        try:
            mask, stored = dataset.id.read_direct_chunk((start, *rest))
        except (OSError, RuntimeError, ValueError) as error:  # its address is lost
            if not layout.is_damage(error):
                raise
            yield start, np.zeros(shape, dtype), False
            continue
        if not layout.agrees(sums[start // step], stored):
            yield start, np.zeros(shape, dtype), False
            continue
        if pipeline.is_supported:
            rows = np.frombuffer(pipeline.decode(stored, mask), dtype).reshape(-1, *shape[1:])
        else:
            rows = read_raw(dataset, start, start + shape[0])
        yield start, rows[: shape[0]], True


def good_chunks(file: h5py.File, path: str, first_row: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield the first row and the rows as stored of each chunk."""
    for start, rows, good in chunks_with_verdict(file, path, first_row):
        if not good:
            raise StoreError(f"/{path} differs from its checksum at row {start}.")
        yield start, rows


def failures_agree(file: h5py.File) -> bool:
    path = f"{layout.CHECKSUMS}/{layout.FAILURES}"
    columns = [read_values(file, f"{layout.FAILURES}/{name}") for name in layout.FAILURE_COLUMNS]
    return layout.agrees(read_values(file, path), *columns)


def classes_agree(file: h5py.File) -> bool:
    path = f"{layout.CHECKSUMS}/{layout.CLASSES}"
    return layout.agrees(read_values(file, path), read_values(file, layout.CLASSES))


def check_chunks(file: h5py.File) -> None:
    """Compare all chunks with their checksums; raises StoreError at the first damaged chunk."""
    if not failures_agree(file):
        raise StoreError(f"/{layout.FAILURES} differs from its checksum.")
    for path in row_datasets(file):
        for _ in good_chunks(file, path):
            pass


MAPPED_BYTES = 64 << 20
"""Least size of a dataset that is mapped. Smaller ones are read: a mapped file whose disk fails, or
that somebody truncates, ends the process by SIGBUS."""


def map_values(
    dataset: h5py.Dataset, descriptor: int, least_bytes: int = MAPPED_BYTES
) -> Array | None:
    """Map the values of a dataset, so that all processes of a machine share one copy in memory.

    The mapping, (N,) read-only with numbers that may not be aligned, outlives the descriptor, and a
    file that takes the name of this one. None if the dataset is smaller, does not lie in one piece
    in the file as it does in memory (chunks, filters, booleans), or is on a file system whose files
    are not mapped.
    """
    file, dtype = dataset.file, np.dtype(dataset.dtype.str)
    num_bytes = dataset.size * dtype.itemsize
    properties, address = dataset.id.get_create_plist(), dataset.id.get_offset()
    if num_bytes < least_bytes or address is None or dataset.ndim != 1 or dtype.kind not in "Siuf":
        return None
    is_plain = (
        properties.get_layout() == h5py.h5d.CONTIGUOUS
        and not properties.get_external_count()
        and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)
        and file.userblock_size == 0
        and file.mode == "r"  # otherwise HDF5 may hold values that are not in the file yet
    )
    content = None
    with contextlib.suppress(OSError):  # such as a limit of the address space
        content = RawFile(descriptor, may_map=is_plain).mapped
    if content is None or len(content) < address + num_bytes:
        return None
    values: Array = content[address : address + num_bytes].view(dtype)
    return values
