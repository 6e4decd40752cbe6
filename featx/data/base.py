"""A folder of image files as a Source: what the kinds that live on a local disk share."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from featx.errors import DataError
from featx.types import ImageFault, Listing, Status

EXTENSIONS = frozenset(
    b".jpg .jpeg .jpe .jfif .png .apng .webp .bmp .dib .gif .tif .tiff .ppm .pgm .pbm .pnm".split()
)
"""Names with these endings, in any case, count as images; what they hold is found out later."""

MAX_FILE_BYTES = 1 << 30
"""A larger file is a recorded failure; it is not read."""


class FolderSource:
    """All images below a folder, at any depth; the first sub-folder is the label.

    Keys are paths relative to the folder, with extension, as the bytes the file system gives.
    """

    def __init__(self, root: Path, follow_links: bool = False) -> None:
        self.root = root
        self._follow_links = follow_links
        self._root_bytes = os.fsencode(root)
        self._real_root = os.path.realpath(self._root_bytes)
        self._skipped: Counter[str] = Counter()

    def listing(self) -> Listing:
        if not self.root.is_dir():
            what = "is a file, not a folder" if self.root.exists() else "does not exist"
            raise DataError(
                f"data.root={self.root} {what} (taken from {Path.cwd()}). "
                "Give the folder that holds your images or their class folders."
            )
        self._skipped.clear()
        keys = sorted(self._walk(self._root_bytes, b"", frozenset({self._real_root})))
        if not keys:
            left_out = ", ".join(f"{n} {why}" for why, n in sorted(self._skipped.items()))
            endings = " ".join(sorted(e.decode() for e in EXTENSIONS))
            raise DataError(
                f"no images below {self.root}: looked at every depth for names ending in "
                f"{endings}. Left out: {left_out or 'nothing'}."
            )
        names = sorted({key.split(b"/", 1)[0] for key in keys if b"/" in key})
        number = {name: i for i, name in enumerate(names)}
        labels = (number[key.split(b"/", 1)[0]] if b"/" in key else -1 for key in keys)
        return Listing(
            keys=np.array(keys, dtype=np.bytes_),
            labels=np.fromiter(labels, dtype=np.int64, count=len(keys)),
            classes=tuple(os.fsdecode(name) for name in names),
            skipped=dict(self._skipped),
        )

    def read(self, key: bytes) -> bytes:
        path = os.path.join(self._root_bytes, key)
        try:
            # Not blocking: a FIFO that took the file's place must not hang the run.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            if not self.root.is_dir():
                raise  # the whole folder is gone: the environment's failure, not this image's
            raise ImageFault(Status.MISSING, "no such file", type(error).__name__) from error
        except PermissionError as error:
            raise ImageFault(Status.MISSING, "permission denied", type(error).__name__) from error
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise ImageFault(Status.MISSING, "not a regular file")
            if info.st_size == 0:
                raise ImageFault(Status.EMPTY, "the file has no bytes")
            if info.st_size > MAX_FILE_BYTES:
                raise ImageFault(Status.TOO_LARGE, f"{info.st_size} bytes, over {MAX_FILE_BYTES}")
            return file.read()

    def _walk(self, folder: bytes, prefix: bytes, above: frozenset[bytes]) -> Iterator[bytes]:
        try:
            entries = os.scandir(folder)
        except OSError as error:
            raise DataError(
                f"cannot list {os.fsdecode(folder)}: {error.strerror}. Its images would be missing "
                "from the store; make it readable or move it out of data.root."
            ) from error
        with entries:
            for entry in entries:
                key = prefix + entry.name
                if entry.name.startswith(b"."):
                    self._skipped["hidden"] += 1
                elif entry.is_symlink():
                    yield from self._link(entry, key, above)
                elif entry.is_dir():
                    yield from self._walk(entry.path, key + b"/", above)
                elif self._is_image_name(entry.name):
                    if entry.is_file():
                        yield key
                    else:
                        self._skipped["not a regular file"] += 1

    def _link(
        self, entry: os.DirEntry[bytes], key: bytes, above: frozenset[bytes]
    ) -> Iterator[bytes]:
        target = os.path.realpath(entry.path)
        inside = target.startswith(self._real_root + b"/")
        if not inside and not self._follow_links:
            self._skipped["links out of the folder (data.follow_links=true follows them)"] += 1
        elif os.path.isdir(target):  # noqa: PTH112 - bytes paths
            if target in above:
                self._skipped["links to a folder above"] += 1
            else:
                yield from self._walk(entry.path, key + b"/", above | {target})
        elif self._is_image_name(entry.name):
            yield key  # a dangling link is listed too: its row says 'missing'

    def _is_image_name(self, name: bytes) -> bool:
        if os.path.splitext(name)[1].lower() in EXTENSIONS:  # noqa: PTH122 - bytes paths
            return True
        self._skipped["other names"] += 1
        return False
