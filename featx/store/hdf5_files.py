"""HDF5 files open for reading: checked, limited in number, and never shared across a fork."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import FeatxError, StoreError
from featx.storage import RawFile, S3File, S3Path
from featx.store import codecs, layout
from featx.store.attribute_checksums import check_texts
from featx.store.chunk_reader import ChunkReader, Verify, repair_hint
from featx.store.mapped_dataset import map_values

_MAX_OPEN_FILES, _SHARE_OF_LIMIT = 128, 8
"""Limits on the number of open files: see `max_open_files`. Each takes three descriptors, those of
HDF5, of `RawFile` and of its memory map, however many layers are read."""

_MAX_COMPRESSION = 1 << 20
"""Largest compression ratio that a dataset may claim, so that a damaged file cannot exhaust memory.

Zeros and NaN compress well: 32,768 times with zstd, and a whole row to 32 bytes with blosc2.
"""


def max_open_files() -> int:
    """Number of files that a process keeps open for a store, or for the tokens of a layer.

    It is _MAX_OPEN_FILES, or 1/_SHARE_OF_LIMIT of the limit of the process if that is less.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(4, min(_MAX_OPEN_FILES, limit // _SHARE_OF_LIMIT))


class OpenFile:
    """File open for reading, with those of its datasets that were checked.

    Args:
        path: path of the file.
        verify: which chunks are compared with their checksums.

    Attributes:
        path: path of the file.
        file: h5py file.
        is_checked: whether the file was checked to belong to the run of the store.
        num_readers: number of threads that are reading from it.
    """

    def __init__(self, path: Path, verify: Verify = "chunks") -> None:
        self.path = path
        self._verify = verify
        self._remote_file = S3File(path) if isinstance(path, S3Path) else None
        self.file = _open_store_file(path, self._remote_file)
        self.is_checked = False
        self.num_readers = 0
        self._datasets: dict[str, h5py.Dataset] = {}
        self._rows: dict[str, ChunkReader] = {}
        self._raw_file: RawFile | None = None

    def names(self) -> list[str]:
        """Names of the datasets in /features."""
        return list(self.file[layout.FEATURES])

    def column_names(self) -> tuple[str, ...]:
        """Names of the datasets in /columns, which only some stores have."""
        if layout.COLUMNS not in self.file:
            return ()
        check_hard_links(self.file, layout.COLUMNS)
        return tuple(self.file[layout.COLUMNS])

    def dataset(self, path: str) -> h5py.Dataset:
        """Dataset at `path`; raises StoreError unless it is a plain one."""
        if path not in self._datasets:
            dataset = open_plain_dataset(self.file, path)
            codecs.check_filters(filter_numbers(dataset))
            self._datasets[path] = dataset
        return self._datasets[path]

    def texts(self, path: str) -> tuple[str, ...]:
        """Dataset of UTF-8 bytes as strings."""
        values = self._read_compared(path).tolist()
        return tuple(value.decode("utf-8", "surrogateescape") for value in values)

    def _read_compared(self, path: str) -> npt.NDArray[Any]:
        """Read a whole dataset and compare it with its checksums.

        Large texts are mapped, see `map_values`. Numbers are copied: callers may change them,
        and torch warns of arrays that are read-only.
        """
        dataset, mapped = self.dataset(path), None
        if dataset.dtype.kind == "S" and self._remote_file is None:
            mapped = map_values(dataset, self.file.id.get_vfd_handle())
        values: npt.NDArray[Any] = dataset[:] if mapped is None else mapped
        if (sums := self.checksums(path)) is None or not len(values):
            return values
        step = int(dataset.chunks[0]) if dataset.chunks else len(values)
        computed = layout.chunk_checksums(values, step)
        if computed.shape != sums.shape or (computed != sums).any():
            raise StoreError(
                f"{self.path}: /{path} differs from its checksum. {repair_hint(self.path)}"
            )
        return values

    def checksums(self, path: str) -> npt.NDArray[Any] | None:
        """Checksums of a dataset, or None if `verify` is False."""
        name = f"{layout.CHECKSUMS}/{path}"
        if self._verify is False:
            return None
        sums: npt.NDArray[Any] = self.dataset(name)[:]
        return sums

    def failures(self) -> list[npt.NDArray[Any]]:
        """Read the rows, exception names and messages of /failures."""
        columns = [self.dataset(f"{layout.FAILURES}/{n}")[:] for n in layout.FAILURE_COLUMNS]
        sums = self.checksums(layout.FAILURES)
        if sums is not None and sums.tolist() != [layout.failures_checksum(columns)]:
            raise StoreError(
                f"{self.path}: /{layout.FAILURES} differs from its checksum. "
                f"{repair_hint(self.path)}"
            )
        return columns

    def column(self, path: str, num_rows: int, kind: str) -> npt.NDArray[Any]:
        """Read the first rows of a dataset with one entry per row."""
        dataset = self.dataset(path)
        if dataset.ndim != 1 or len(dataset) < num_rows or dataset.dtype.kind not in kind:
            raise StoreError(
                f"{self.path}: /{path} is {dataset.shape} {dataset.dtype}; expected {num_rows} "
                "rows."
            )
        return self._read_compared(path)[:num_rows]

    def rows(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], first_row: int = 0
    ) -> ChunkReader:
        """Reader for the rows of a dataset, which bypasses HDF5 where possible."""
        if path not in self._rows:
            dataset = self.dataset(path)
            if dataset.shape != shape or dataset.dtype != dtype:
                raise StoreError(
                    f"{self.path}: /{path} is {dataset.shape} {dataset.dtype}, expected "
                    f"{shape} {dtype}."
                )
            sums = self.checksums(path) if dataset.chunks and dataset.size else None
            all_rows = bool(filter_numbers(dataset)) or self._verify == "rows"
            if self._remote_file is None and self._raw_file is None:
                # One for all layers: a store may have hundreds of parts with a dozen layers each.
                self._raw_file = RawFile(self.file.id.get_vfd_handle(), may_map=True)
            file = self._remote_file or self._raw_file
            self._rows[path] = ChunkReader(dataset, self.path, file, sums, all_rows, first_row)
        return self._rows[path]

    def close(self) -> None:
        """Close the file and all of its readers."""
        for rows in self._rows.values():
            rows.close()
        self._rows.clear()
        self._raw_file = None
        self._datasets.clear()
        self.file.close()


class Handles:
    """Open files of this process; the least recently used ones are closed first.

    Args:
        verify: which chunks are compared with their checksums when they are read.
    """

    def __init__(self, verify: Verify = "chunks") -> None:
        self.verify = verify
        self._reset()

    def _reset(self) -> None:
        """Start without open files, in a new process or after unpickling."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()
        self._max_open = max_open_files()

    def __getstate__(self) -> dict[str, Any]:
        return {"verify": self.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.verify = state["verify"]
        self._reset()

    @contextlib.contextmanager
    def use(self, path: Path) -> Iterator[OpenFile]:
        """Open a file for the time of the block; never one from before a fork."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            # Last in the order means most recently used. `num_readers` keeps other threads from
            # closing the file while this one reads from it without the lock.
            file = self._files.pop(path, None) or OpenFile(path, self.verify)
            self._files[path] = file
            file.num_readers += 1
            self._close_idle(self._max_open)
        try:
            yield file
        except (FeatxError, FileNotFoundError):
            raise
        except layout.UNREADABLE as error:
            raise StoreError(f"{path}: {damage_text(path, error)}") from error
        finally:
            with self._lock:
                file.num_readers -= 1

    def close(self) -> None:
        """Close all files that no thread is reading; they are opened again when needed."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, max_open: int) -> None:
        """Close the least recently used files beyond `max_open` that no thread is reading."""
        idle = [path for path, file in self._files.items() if not file.num_readers]
        for path in idle[: max(0, len(self._files) - max_open)]:
            self._files.pop(path).close()


def open_hdf5(path: Path, **options: Any) -> h5py.File:
    """Open a file for reading with plain h5py; the texts of its attributes are checked.

    HDF5 refuses a file that this process has open with another locking flag, for example by an
    h5py.File of the user, so both flags are tried.
    """
    if isinstance(path, S3Path):
        return _open_remote(S3File(path), **options)
    try:
        file = h5py.File(path, "r", **options)
    except OSError:
        file = h5py.File(path, "r", locking=False, **options)
    try:
        check_texts(file, functools.partial(os.pread, file.id.get_vfd_handle()))
    except BaseException:
        file.close()
        raise
    return file


def _open_remote(raw: S3File, **options: Any) -> h5py.File:
    """Open an object for reading with h5py, which keeps a reference to it."""
    try:
        file = h5py.File(raw, "r", **options)
    except layout.UNREADABLE as error:
        raise raw.error or error from error
    try:
        check_texts(file, raw.pread)
    except BaseException:
        file.close()
        raise
    return file


class ErrorRecordingFile(io.FileIO):
    """File object that keeps the error of a failed read, as HDF5 loses the reason.

    Attributes:
        error: error of the last failed read, or None.
    """

    error: OSError | None = None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
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

    Args:
        path: path of the file.
        opened: returns the file if it was opened before; it is closed at the end. None opens the
            path.

    Raises:
        OSError: with errno if the file cannot be read now, without errno if it is damaged.
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


def raise_unless_damage(path: Path, error: Exception) -> None:
    """Raise if an error does not show that a file is damaged."""
    if not layout.is_damage(error):
        raise StoreError(
            f"cannot read {path}: {error}. When it can be read, give the same command again."
        ) from error


def damage_text(path: Path, error: Exception) -> str:
    """Describe an error that shows damage of a file.

    Args:
        path: path of the file.
        error: one of layout.UNREADABLE.

    Returns:
        clause for a message.

    Raises:
        StoreError: the error is no damage: the file cannot be read now.
    """
    raise_unless_damage(path, error)
    return f"it cannot be read ({error})"


def _open_store_file(path: Path, remote_file: S3File | None) -> h5py.File:
    """Open a file of a store; raise StoreError if it is no valid HDF5 file."""
    if remote_file is None:
        with path.open("rb"):  # raises FileNotFoundError or PermissionError, unlike h5py
            pass
    try:
        if remote_file is not None:
            return _open_remote(remote_file, rdcc_nbytes=0)
        return open_hdf5(path, rdcc_nbytes=0)
    except FileNotFoundError as error:  # the part was packed and deleted in between
        error.filename = error.filename or str(path)
        raise
    except layout.UNREADABLE as error:
        raise StoreError(
            f"{path} cannot be read as HDF5: {error}. If it is a store's, `python -m featx "
            "job=verify store=FOLDER verify.repair=true` rebuilds it and keeps every row whose "
            "chunks are intact."
        ) from error


def open_plain_dataset(file: h5py.File, path: str, may_be_partial: bool = False) -> h5py.Dataset:
    """Dataset at `path`, if it lies in this file and is not larger than the file can hold.

    The filters of a dataset of featx are loaded: a process that has not imported hdf5plugin would
    take the error of HDF5 about a missing filter for damage.

    Args:
        file: file open for reading.
        path: path of the dataset.
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
    plain = isinstance(found, h5py.h5d.DatasetID)
    reason = ""
    settings = found.get_create_plist() if plain else None
    if settings is None:
        reason = "it is no dataset"
    elif settings.get_layout() == h5py.h5d.VIRTUAL or settings.get_external_count():
        reason = (
            f"it is {'external' if settings.get_external_count() else 'virtual'}, so its values "
            "lie in other files, and read as zeros if those are missing. Copy it into a file of "
            f"its own, in Python as new[{path!r}] = old[{path!r}][:]"
        )
    if settings is None or reason:
        raise StoreError(f"{file.filename}: /{path} is no plain dataset; refused: {reason}.")
    dataset = h5py.Dataset(found, readonly=file.mode == "r")
    size = dataset.size * found.get_type().get_size()  # a bfloat16 reads as float32
    stored = found.get_storage_size()
    num_filters = settings.get_nfilters()
    if not may_be_partial:
        codecs.load_plugin_for(filter_numbers(dataset))
    if size and not stored:
        raise StoreError(
            f"{file.filename}: /{path} claims {size} bytes, but was never written: the file holds "
            "none of them; refused."
        )
    is_compact = num_filters or (may_be_partial and dataset.chunks)
    if size > stored * (_MAX_COMPRESSION if is_compact else 1):
        raise StoreError(
            f"{file.filename}: /{path} claims {size} bytes, the file holds {stored} of it; refused."
        )
    return dataset


def filter_numbers(dataset: h5py.Dataset) -> list[int]:
    """HDF5 numbers of the filters of a dataset."""
    properties = dataset.id.get_create_plist()
    return [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]


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
