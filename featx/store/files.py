"""HDF5 files open for reading: found to be harmless, few at a time, never carried across a fork."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from featx.errors import StoreError
from featx.store import codecs

MAX_OPEN_FILES = 16
"""File handles one store keeps open in one process."""

_MAX_COMPRESSION = 1 << 20
"""A filtered dataset that claims to expand more than this is refused before memory is taken.

Zeros and NaN shrink far: 32,768 times with zstd, a whole row to 32 bytes with blosc2.
"""


class OpenFile:
    """A file open for reading, with those of its datasets that were found to be plain.

    Attributes:
        known: whether it was checked to be of the store's own run.
    """

    def __init__(self, path: Path) -> None:
        self.file = _open_checked(path)
        self.known = False
        self._datasets: dict[str, h5py.Dataset] = {}

    def dataset(self, path: str) -> h5py.Dataset:
        """The dataset at `path`. Raises StoreError where it is no plain one."""
        if path not in self._datasets:
            self._datasets[path] = check_plain(self.file, path)
        return self._datasets[path]

    def close(self) -> None:
        self._datasets.clear()
        self.file.close()


class Handles:
    """Open files of this process, the least recently used closed first."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()

    @contextlib.contextmanager
    def use(self, path: Path) -> Iterator[OpenFile]:
        """An open file; never one that a parent process opened before a fork."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            file = self._files.pop(path, None) or OpenFile(path)
            self._files[path] = file
            while len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            yield file


def open_hdf5(path: Path, **options: Any) -> h5py.File:
    """A file opened for reading with plain h5py.

    HDF5 refuses a file that this process holds open with another locking flag already, be it by
    the user's own h5py.File, so both flags are tried.
    """
    try:
        return h5py.File(path, "r", **options)
    except OSError:
        return h5py.File(path, "r", locking=False, **options)


def _open_checked(path: Path) -> h5py.File:
    with path.open("rb"):  # says FileNotFoundError and PermissionError by themselves
        pass
    try:
        file = open_hdf5(path, rdcc_nbytes=0)
    except OSError as error:
        raise StoreError(f"{path} cannot be read as HDF5: {error}.") from error
    codec = file.attrs.get("codec", "none")
    if codec != "none":
        # Whole chunks are decoded; the default cache keeps neighbours from decoding them again.
        file.close()
        if codec in ("zstd", "blosc2"):
            codecs.load_plugin()
        file = open_hdf5(path)
    return file


def check_plain(file: h5py.File, path: str) -> h5py.Dataset:
    """The dataset at `path`, if it lies in this very file and is as large as it claims.

    Raises:
        StoreError: it is a link, virtual, external, missing, or larger than the file could hold.
    """
    check_hard(file, path)
    dataset = file[path]
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise StoreError(f"{file.filename}: /{path} is no plain dataset; refused.")
    size = dataset.size * dataset.dtype.itemsize
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    if size > dataset.id.get_storage_size() * (_MAX_COMPRESSION if filtered else 1):
        raise StoreError(
            f"{file.filename}: /{path} claims {size} bytes, the file holds "
            f"{dataset.id.get_storage_size()} of it; refused."
        )
    return dataset


def check_hard(file: h5py.File, path: str) -> None:
    """Raise StoreError unless every step of `path` is a hard link: it stays in this very file."""
    where = ""
    for name in path.split("/"):
        where = f"{where}/{name}".lstrip("/")
        link = file.get(where, getlink=True)
        if link is None:
            raise StoreError(f"{file.filename} has no /{where}.")
        if not isinstance(link, h5py.HardLink):
            raise StoreError(f"{file.filename}: /{where} points to another place; refused.")
