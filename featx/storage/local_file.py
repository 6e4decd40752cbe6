"""Direct access to the bytes of a file that HDF5 has open, by memory map or system calls.

A memory map has one weakness: if a page cannot be read (the disk fails, or the file is truncated
at that moment), the process is killed by SIGBUS. So files on network file systems are never
mapped, and readers check the size of the file before every read.
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
"""Types of file systems, as in /proc/self/mountinfo, whose files may be mapped."""


class RawFile:
    """Second descriptor of a file that HDF5 has open, and its memory map.

    Both are closed when the last reader drops the object: a descriptor that is closed earlier could
    be reused for another file while a reader still uses its number.

    Attributes:
        size: size of the file in bytes when it was opened.
        mapped: (size,) uint8 view of the mapped file, or None if it is not mapped; it is mapped
            only on a local file system.
    """

    def __init__(self, descriptor: int, may_map: bool) -> None:
        # The same file, even if its name belongs to another one by now.
        self._descriptor = os.dup(descriptor)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.mapped: Bytes | None = None
        if may_map and self.size and is_local(status.st_dev):
            pages = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
            self.mapped = np.frombuffer(pages, np.uint8)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `os` may already be gone at the end of the interpreter, so the function is an argument.
        if hasattr(self, "_descriptor"):
            close(self._descriptor)

    def current_size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def items(self, width: int) -> npt.NDArray[np.void]:
        """View of the mapped file as overlapping items of `width` bytes; item i starts at i."""
        assert self.mapped is not None
        shape = (max(0, self.size - width + 1),)
        return np.ndarray(shape, f"V{width}", self.mapped.data, strides=(1,))

    def read_ranges_into(self, ranges: Iterable[tuple[Bytes, int]], label: str) -> None:
        """Fill buffers, each with the bytes from its address on; the label is for messages."""
        for buffer, address in ranges:
            if self.mapped is None:
                self.pread_into(buffer, address, label)
            else:
                buffer[:] = self.mapped[address : address + len(buffer)]

    def pread_into(self, buffer: Bytes, address: int, label: str) -> None:
        """Fill `buffer` by system calls, which raise an error where a memory map raises SIGBUS."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:].data], address + done)
            if count == 0:
                raise StoreError(f"{label}: the file ends before byte {address + len(buffer)}")
            done += count


@functools.cache
def is_local(device: int, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether a device number belongs to a known local file system; False if unknown."""
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line.split(" - ")[-1].split()[0] for line in lines if line.split()[2:3] == [number]}
    return bool(kinds) and kinds <= _LOCAL_FILE_SYSTEMS
