"""The bytes of a file that HDF5 has open: mapped where that is safe, else read by system calls.

A memory map has one weakness: where a page cannot be read (the disk fails, or the file is cut off
in the very moment of the read), the process gets SIGBUS. So files on network file systems are never
mapped, and readers look at the file's size before every read.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError

Bytes = npt.NDArray[np.uint8]

_LOCAL_FILE_SYSTEMS = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay")
)


class RawFile:
    """A second descriptor of a file that HDF5 has open, and its memory map.

    Both are closed when the last reader has let go of the object: a descriptor closed under a
    reader's hands could have become another file's.
    """

    def __init__(self, descriptor: int, may_map: bool) -> None:
        self._descriptor = os.dup(descriptor)  # the very same file, whatever its name is by now
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.mapped: Bytes | None = None
        if may_map and self.size and _is_local(status.st_dev):
            pages = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
            self.mapped = np.frombuffer(pages, np.uint8)
        self.address = 0 if self.mapped is None else self.mapped.ctypes.data

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of a script the module's names may be gone before the file is.
        if hasattr(self, "_descriptor"):
            close(self._descriptor)

    def size_now(self) -> int:
        return os.fstat(self._descriptor).st_size

    def items(self, width: int) -> npt.NDArray[np.void]:
        """The mapped file as items of `width` bytes, item i beginning at byte i: they overlap."""
        assert self.mapped is not None
        shape = (max(0, self.size - width + 1),)
        return np.ndarray(shape, f"V{width}", self.mapped.data, strides=(1,))

    def read_into(self, target: Bytes, at: int, label: str) -> None:
        """Fill `target` with the bytes from `at` on."""
        if self.mapped is None:
            self.pread_into(target, at, label)
            return
        target[:] = self.mapped[at : at + len(target)]

    def read_pieces(self, pieces: Iterable[tuple[Bytes, int]], label: str) -> None:
        """Fill each target with the bytes from its place on."""
        for target, at in pieces:
            self.read_into(target, at, label)

    def pread_into(self, target: Bytes, at: int, label: str) -> None:
        """The same by system calls, which fail with an error where the disk does."""
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:].data], at + done)
            if count == 0:
                raise StoreError(f"{label}: the file ends before byte {at + len(target)}")
            done += count


@functools.cache
def _is_local(device: int) -> bool:
    """Whether a device number belongs to a file system of this machine, as far as is known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line.split(" - ")[-1].split()[0] for line in lines if line.split()[2:3] == [number]}
    return bool(kinds) and kinds <= _LOCAL_FILE_SYSTEMS
