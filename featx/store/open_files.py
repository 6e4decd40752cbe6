"""Files of a store open for reading: limited in number, and never shared across a fork."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from featx.errors import FeatxError, StoreError
from featx.storage import RawFile, S3File, S3Path
from featx.store import layout
from featx.store.chunk_reader import ChunkReader, Verify, repair_hint
from featx.store.chunk_table import table_checksum
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import (
    check_hard_links,
    compared_chunks,
    damage_text,
    map_values,
    open_hdf5,
    open_plain_dataset,
    raise_unless_damage,
)
from featx.types import Array

_MAX_OPEN_FILES, _SHARE_OF_LIMIT = 128, 8
"""Largest number of open files, or 1/_SHARE_OF_LIMIT of the limit of the process if that is less.
Each takes three descriptors, those of HDF5, of `RawFile` and of its memory map, however many layers
are read."""


class OpenFile:
    """File open for reading, with those of its datasets that were checked.

    `is_checked` tells whether it was found to belong to the run of the store, and `num_readers` how
    many threads are reading from it. `version` changes if another file takes its name: the checksum
    of its chunk table, or its entity tag.
    """

    def __init__(self, path: Path, verify: Verify = "chunks") -> None:
        self.path = path
        self._verify = verify
        self._remote_file = S3File(path) if isinstance(path, S3Path) else None
        self.file = _open_store_file(path, self._remote_file)
        tag = None if self._remote_file is None else self._remote_file.etag
        self.version = tag or table_checksum(self.file)
        self.is_checked = False
        self.num_readers = 0
        self._datasets: dict[str, h5py.Dataset] = {}
        self._rows: dict[str, ChunkReader] = {}
        self._raw_file: RawFile | None = None

    def column_names(self) -> tuple[str, ...]:
        """Names of the datasets in /columns, which only some stores have."""
        if layout.COLUMNS not in self.file:
            return ()
        check_hard_links(self.file, layout.COLUMNS)
        return tuple(self.file[layout.COLUMNS])

    def dataset(self, path: str) -> h5py.Dataset:
        """Dataset at `path`; raises StoreError unless it is a plain one."""
        if path not in self._datasets:
            self._datasets[path] = open_plain_dataset(self.file, path)
        return self._datasets[path]

    def texts(self, path: str) -> tuple[str, ...]:
        """Dataset of UTF-8 bytes as strings."""
        values = self._read_compared(path).tolist()
        return tuple(value.decode("utf-8", "surrogateescape") for value in values)

    def _read_compared(self, path: str) -> Array:
        """Read a whole dataset and compare it with its checksums.

        Large texts are mapped, see `map_values`. Numbers are copied: callers may change them,
        and torch warns of arrays that are read-only.
        """
        dataset, sums = self.dataset(path), self.checksums(path)
        values: Array | None = None
        if sums is not None and dataset.chunks and len(dataset):
            chunks = [(rows, good) for _, rows, good in compared_chunks(dataset, sums)]
            values = np.concatenate([rows for rows, _ in chunks])
            is_good = all(good for _, good in chunks)
        else:
            if dataset.dtype.kind == "S" and self._remote_file is None:
                values = map_values(dataset, self.file.id.get_vfd_handle())
            values = dataset[:] if values is None else values
            is_good = sums is None or not len(values) or layout.agrees(sums, values)
        if not is_good:
            raise StoreError(
                f"{self.path}: /{path} differs from its checksum. {repair_hint(self.path)}"
            )
        return values

    def checksums(self, path: str) -> Array | None:
        """Checksums of a dataset, or None if `verify` is False."""
        name = f"{layout.CHECKSUMS}/{path}"
        if self._verify is False:
            return None
        sums: Array = self.dataset(name)[:]
        return sums

    def failures(self) -> list[Array]:
        """Read the rows, exception names and messages of /failures."""
        columns = [self.dataset(f"{layout.FAILURES}/{n}")[:] for n in layout.FAILURE_COLUMNS]
        sums = self.checksums(layout.FAILURES)
        if sums is not None and not layout.agrees(sums, *columns):
            raise StoreError(
                f"{self.path}: /{layout.FAILURES} differs from its checksum. "
                f"{repair_hint(self.path)}"
            )
        return columns

    def column(self, path: str, num_rows: int, kind: str) -> Array:
        """Read the first rows of a dataset with one entry per row."""
        dataset = self.dataset(path)
        if dataset.ndim != 1 or len(dataset) < num_rows or dataset.dtype.kind not in kind:
            raise StoreError(
                f"{self.path}: /{path} is {dataset.shape} {dataset.dtype}; expected {num_rows} "
                "rows."
            )
        return self._read_compared(path)[:num_rows]

    def rows(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], first_row: int = 0
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
            has_filters = bool(dataset.chunks and Pipeline.of(dataset).filters)
            all_rows = has_filters or self._verify == "rows"
            if self._remote_file is None and self._raw_file is None:
                # One for all layers: a store may have hundreds of parts with a dozen layers each.
                self._raw_file = RawFile(self.file.id.get_vfd_handle(), may_map=True)
            file = self._remote_file or self._raw_file
            self._rows[path] = ChunkReader(dataset, self.path, file, sums, all_rows, first_row)
        return self._rows[path]

    def close(self) -> None:
        for rows in self._rows.values():
            rows.close()
        self._rows.clear()
        self._raw_file = None
        self._datasets.clear()
        self.file.close()


class Handles:
    """Open files of this process; the least recently used ones are closed first.

    A file that is opened again, here, after a fork or after unpickling, must not have changed: what
    was read from it before, such as the status of its rows, would belong to other rows.
    """

    def __init__(self, verify: Verify = "chunks") -> None:
        self.verify = verify
        self._versions: dict[Path, int | str | None] = {}
        self._reset()

    def _reset(self) -> None:
        """Start without open files, in a new process or after unpickling."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max(4, min(_MAX_OPEN_FILES, limit // _SHARE_OF_LIMIT))

    def __getstate__(self) -> dict[str, object]:
        return {"verify": self.verify, "_versions": dict(self._versions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def with_verify(self, verify: Verify) -> Handles:
        """Return further handles, for which the same versions of the files count."""
        handles = Handles(verify)
        handles._versions = self._versions
        return handles

    def check_version(self, path: Path, version: int | str | None) -> None:
        """Raise StoreError if a file has another version than when it was first opened."""
        if self._versions.setdefault(path, version) != version:
            raise StoreError(f"{path} has changed since the store was opened. Open it again.")

    def is_open(self, path: Path) -> bool:
        """Return whether this process has a file open."""
        return self._pid == os.getpid() and path in self._files

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
            self.check_version(path, file.version)
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
        """Close all files that no thread is reading; one that is read later is opened again."""
        if self._pid == os.getpid():
            with self._lock:
                self._close_idle(0)

    def forget(self) -> None:
        """Close all files that no thread is reading; others may have taken their names."""
        with self._lock:
            self._close_idle(0)
            self._versions.clear()

    def _close_idle(self, max_open: int) -> None:
        """Close the least recently used files beyond `max_open` that no thread is reading."""
        if len(self._files) <= max_open:
            return
        idle = [path for path, file in self._files.items() if not file.num_readers]
        for path in idle[: max(0, len(self._files) - max_open)]:
            self._files.pop(path).close()


def _open_store_file(path: Path, remote_file: S3File | None) -> h5py.File:
    """Open a file of a store; raise StoreError if it is no valid HDF5 file."""
    if remote_file is None:
        with path.open("rb"):  # raises FileNotFoundError or PermissionError, unlike h5py
            pass
    try:
        return open_hdf5(path, remote_file, rdcc_nbytes=0)
    except FileNotFoundError as error:  # the part was packed and deleted in between
        error.filename = error.filename or str(path)
        raise
    except layout.UNREADABLE as error:
        raise_unless_damage(path, error)
        raise StoreError(
            f"{path} cannot be read as HDF5: {error}. If it is a store's, "
            f"{layout.repair_command(layout.store_root(path))} rebuilds it and keeps every row "
            "whose chunks are intact."
        ) from error
