"""Image files below a folder as a Source, and helpers that other kinds of sources share."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from featx.base import name_bytes, name_text
from featx.config import source_of_path
from featx.errors import DataError
from featx.store import layout
from featx.types import IMAGE_STATE, NO_STATE, ImageFault, Listing, Status

EXTENSIONS = frozenset(
    b".jpg .jpeg .jpe .jfif .png .apng .webp .bmp .dib .gif .tif .tiff .ppm .pgm .pbm .pnm "
    b".avif .avifs .heic .heif .hif".split()
)
"""File name extensions that count as images, compared without regard to case. The content is
checked only when the image is decoded."""

_ARCHIVES = (".zip", ".7z", ".rar", ".bz2", ".xz", ".zst")
"""File name extensions of archives that no source reads."""

MAX_FILE_BYTES = 1 << 30
"""Size limit of an encoded image in bytes. A larger file is not read and is recorded as a
failure."""

_PIECE = 1 << 16
"""Number of keys that are converted to Python objects at a time."""

_DANGLING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_OF_THE_FILE = _DANGLING | {errno.EACCES, errno.EPERM, errno.ENXIO}
"""Error numbers of `open` and `stat` that concern one file. All others concern the disk or the
mount."""


_SPLITS = frozenset(b"train training val valid validation test testing".split())
"""Names of folders that divide a data set, rather than name a class."""

_STATS = 512
"""Number of files that one thread stats in a row."""

_STAT_THREADS = 16
"""Threads that stat files, if the first files take over `_SLOW_STAT_S` seconds each on average."""
_SLOW_STAT_S = 1e-4
"""Average seconds per `stat` above which threads are used."""


_LATEST_NS = (1 << 63) - 1
"""Last time that int64 nanoseconds hold, in 2262; a file may have a later one by mistake."""


def state_of(info: os.stat_result) -> tuple[int, int, int]:
    """Return the IMAGE_STATE fields of a file: size in bytes, mtime in ns, and ctime in ns."""
    return info.st_size, mtime_ns(info), min(info.st_ctime_ns, _LATEST_NS)


def mtime_ns(info: os.stat_result) -> int:
    """Return the modification time of a file in nanoseconds since 1970, at most that of 2262."""
    return min(info.st_mtime_ns, _LATEST_NS)


def state_of_files(paths: Iterable[str | Path], count: int, tag: int = 0) -> npt.NDArray[np.void]:
    """Compute one IMAGE_STATE for rows that all come from the same files.

    The state changes when any of the files or `tag` changes.

    Returns (count,) IMAGE_STATE, the same value in every row.
    """
    infos = [os.stat(path) for path in paths]  # noqa: PTH116 - unusual bytes
    size = sum(info.st_size for info in infos)
    newest = max((mtime_ns(info) for info in infos), default=-1)
    content = [*(state_of(info) for info in infos), tag]
    return np.full(count, np.array((size, newest, tag_of(content)), IMAGE_STATE))


def of_other_paths(states: npt.NDArray[np.void], paths: Iterable[bytes]) -> npt.NDArray[np.void]:
    """Mix file paths into states, for sources whose keys are not paths.

    A row that names another file then counts as changed even if both files have equal states.

    Returns `states`.
    """
    exists = states != NO_STATE
    states["tag"][exists] ^= np.array([tag_of(path) for path in paths], dtype=np.int64)[exists]
    return states


def tag_of(content: object) -> int:
    """Hash the `repr` of an object to a non-negative 63-bit integer."""
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "little") >> 1


def endings(
    extensions: Iterable[str] | None, usual: frozenset[bytes] = EXTENSIONS
) -> frozenset[bytes]:
    """Convert the option data.extensions to lower-case extensions with a leading dot.

    Returns the extensions as bytes.
    """
    if extensions is None:
        return usual
    return frozenset(name_bytes("." + ending.lower().lstrip(".")) for ending in extensions)


def _sort_keys(names: Iterable[bytes]) -> npt.NDArray[np.bytes_]:
    """Sort keys bytewise. Returns (N,) fixed-length bytes."""
    # Python bytes objects need about twice the memory of the array, so only _PIECE of them exist at
    # a time.
    remaining = iter(names)
    pieces = []
    while piece := list(itertools.islice(remaining, _PIECE)):
        pieces.append(np.array(piece, dtype=np.bytes_))
    keys = np.empty(sum(map(len, pieces)), f"S{max([p.itemsize for p in pieces], default=1)}")
    row = 0
    pieces.reverse()
    while pieces:
        keys[row : row + len(pieces[-1])] = pieces[-1]
        row += len(pieces.pop())
    keys.sort(kind="stable")  # fast on input that is partly sorted
    return keys


def _each_key(keys: npt.NDArray[np.bytes_]) -> Iterator[bytes]:
    """Yield every key as Python bytes, converting `_PIECE` keys at a time."""
    for start in range(0, len(keys), _PIECE):
        yield from keys[start : start + _PIECE].tolist()


class FolderSource:
    """Image files below a folder; the first sub-folder is the label.

    A key is the path relative to the folder, with extension, as the bytes that the file system
    returns. Rows are in bytewise order of their keys. Hidden entries, featx stores and files with
    other extensions are left out and counted in `Listing.skipped`.

    Args:
        follow_links: whether symbolic links that lead out of the folder are listed and read.
        extensions: file name extensions to list, in lower case with a leading dot.
        depth: maximum number of folders between `root` and an image, or None for no limit.
        what: plural noun for the files, for error messages.
    """

    reads_in_decoders = True

    def __init__(
        self,
        root: Path,
        follow_links: bool = False,
        extensions: frozenset[bytes] = EXTENSIONS,
        depth: int | None = None,
        what: str = "images",
    ) -> None:
        self.root = root
        self._what = what
        self._follow_links = follow_links
        self._extensions = extensions
        self._depth = depth
        self._root_bytes = os.path.abspath(os.fsencode(root))  # noqa: PTH100 - bytes paths
        self._real_root = os.path.realpath(self._root_bytes)
        self._identity: tuple[int, int] | None = None
        self._skipped: Counter[str] = Counter()

    def listing(self) -> Listing:
        """List all files below the folder.

        Raises:
            DataError: the folder does not exist, one of its folders cannot be listed, or no file in
                it matches.
        """
        if not self.root.is_dir():
            what = "is a file, not a folder" if self.root.exists() else "does not exist"
            kind = source_of_path(str(self.root)) if self.root.is_file() else "folder"
            if kind != "folder":
                hint = f" Such a file is read with data={kind}."
            elif self.root.is_file() and self.root.suffix.lower() in _ARCHIVES:
                hint = " Unpack the archive first, or make it a .tar."
            elif self.root.is_file() or "*" in str(self.root):
                hint = (
                    " For chosen files, give a CSV file with the column path, or a list in Python."
                )
            else:
                hint = ""
            raise DataError(
                f"data.root={self.root} {what} (taken from {Path.cwd()}). "
                f"Give the folder that holds your images or their class folders.{hint}"
            )
        info = self.root.stat()
        self._identity = info.st_dev, info.st_ino
        self._skipped.clear()
        keys = _sort_keys(self._walk())
        if not len(keys):
            if (self.root / layout.MANIFEST).is_file():
                raise DataError(
                    f"data.root={self.root} is a store, without {self._what} to extract features "
                    f"of. A job that reads a store takes it as store={self.root}."
                )
            left_out = ", ".join(f"{n} {why}" for why, n in sorted(self._skipped.items()))
            extensions = " ".join(sorted(name_text(e) for e in self._extensions))
            depth = "every depth" if self._depth is None else f"a depth up to {self._depth}"
            kinds = {source_of_path(str(path)) for path in self.root.iterdir()} - {"folder"}
            hint = f" Some may be read with data={' or data='.join(sorted(kinds))}."
            raise DataError(
                f"no {self._what} below {self.root}: searched {depth} for names ending in "
                f"{extensions}. Left out: {left_out or 'nothing'}.{hint if kinds else ''}"
            )
        names = sorted({key.split(b"/", 1)[0] for key in _each_key(keys) if b"/" in key})
        number = {name: i for i, name in enumerate(names)}
        labels = (number[key.split(b"/", 1)[0]] if b"/" in key else -1 for key in _each_key(keys))
        return Listing(
            keys=keys,
            labels=np.fromiter(labels, dtype=np.int64, count=len(keys)),
            classes=tuple(name_text(name) for name in names),
            skipped=dict(self._skipped),
            label_note=self._splits_text(keys, names),
        )

    def _splits_text(self, keys: npt.NDArray[np.bytes_], names: Sequence[bytes]) -> str:
        """Return a hint if the first folders are parts of a data set with classes, else ''."""
        splits = [name for name in names if name.lower() in _SPLITS]
        if not splits or (len(splits) == 1 and len(names) > 1):
            return ""
        if not any(key.count(b"/") > 1 for key in _each_key(keys)):
            return ""
        shown = " and ".join(map(name_text, splits))
        return f"{shown}: data.root={self.root / name_text(splits[0])} has the classes in it"

    def read(self, key: bytes) -> bytes:
        """Read one file.

        Raises:
            ImageFault: the file is missing, empty, not a regular file, or larger than
                `MAX_FILE_BYTES`.
            OSError: the disk or mount fails, or the folder itself is gone.
        """
        path = os.path.join(self._root_bytes, key)
        try:
            # O_NONBLOCK: opening a FIFO that has replaced the file must not hang the run.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _OF_THE_FILE:
                raise
            self.check_root()
            reason = (error.strerror or "cannot be opened").lower()
            raise ImageFault(Status.MISSING, reason, type(error).__name__) from error
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise ImageFault(Status.MISSING, "not a regular file")
            if info.st_size == 0:
                raise ImageFault(Status.EMPTY, "the file has no bytes")
            if info.st_size > MAX_FILE_BYTES:
                raise ImageFault(Status.TOO_LARGE, f"{info.st_size} bytes, over {MAX_FILE_BYTES}")
            # Without a file object, which takes twice the time. A read ends early at a signal, and
            # on some network file systems.
            data = os.read(descriptor, info.st_size + 1)
            while len(data) != info.st_size and (more := os.read(descriptor, 1 << 20)):
                data += more
            return data
        finally:
            os.close(descriptor)

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Stat the files of some keys.

        Returns:
            (n,) IMAGE_STATE with size, mtime and, as the tag, ctime, which tools that restore mtime
            cannot set back; NO_STATE where a file cannot be accessed.

        Raises:
            OSError: the disk or mount fails.
        """
        states = np.full(len(keys), NO_STATE, dtype=IMAGE_STATE)
        # With dir_fd the kernel does not resolve the path of the folder for every file.
        folder = os.open(self._root_bytes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        def stat_files(start: int) -> None:
            """Stat `_STATS` files from `start` on."""
            for row, key in enumerate(keys[start : start + _STATS].tolist(), start):
                try:
                    states[row] = state_of(os.stat(key, dir_fd=folder))
                except OSError as error:
                    if error.errno not in _OF_THE_FILE:
                        raise

        try:
            started_at = time.perf_counter()
            stat_files(0)
            is_slow = time.perf_counter() - started_at > _STATS * _SLOW_STAT_S
            starts = range(_STATS, len(keys), _STATS)
            # A network file system serves many requests at once. On a local disk, threads would
            # only contend with each other. The first _STATS files decide which of the two it is.
            with ThreadPoolExecutor(_STAT_THREADS if is_slow else 1) as threads:
                for _ in threads.map(stat_files, starts):
                    pass
        finally:
            os.close(folder)
        return states

    def read_inside(self, path: bytes) -> bytes:
        """Read a file whose path comes from a table and was not found by listing the folder.

        Raises:
            ImageFault: as for `read`, and if the path leads out of the folder while `follow_links`
                is False.
            OSError: as for `read`.
        """
        if not self._follow_links:
            real = os.path.realpath(os.path.join(self._root_bytes, path))
            if not self._is_inside(real):
                raise ImageFault(
                    Status.MISSING,
                    "leads out of the folder (data.follow_links=true follows it)",
                )
        return self.read(path)

    def check_root(self) -> None:
        """Check that the folder still exists and is the one that was listed.

        If it is gone, a file that cannot be opened is not a fault of that image.

        Raises:
            OSError: the folder is gone, replaced or unmounted.
        """
        info = os.stat(self._root_bytes)  # noqa: PTH116 - bytes paths
        if self._identity not in (None, (info.st_dev, info.st_ino)):
            raise OSError(errno.ESTALE, "the folder was replaced or unmounted", str(self.root))
        os.scandir(self._root_bytes).close()

    def _walk(self) -> Iterator[bytes]:
        """Yield the keys of all images in arbitrary order; links to a folder above are not
        entered."""
        pending = [_Folder(self._root_bytes, self._real_root, b"", frozenset())]
        while pending:
            folder = pending.pop()
            if folder.real in folder.above:
                self._skipped["links to a folder above"] += 1
                continue
            above = folder.above | {folder.real}
            # The images of a store of featx (heat maps, sprites) are output.
            manifest = os.path.join(folder.path, os.fsencode(layout.MANIFEST))
            if folder.prefix and os.path.lexists(manifest):
                self._skipped["stores of featx"] += 1
                continue
            try:
                with os.scandir(folder.path) as entries:
                    for entry in entries:
                        result = self._classify(entry, folder, above)
                        if isinstance(result, bytes):
                            yield result
                        elif isinstance(result, _Folder):
                            pending.append(result)
                        else:
                            self._skipped[result] += 1
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    yield folder.prefix[:-1]  # a row that fails and names it
                    continue
                raise DataError(
                    f"cannot list {name_text(folder.path)}: {error.strerror}. Its images would "
                    "be missing from the store. Make it readable or move it out of data.root."
                ) from error

    def _classify(
        self, entry: os.DirEntry[bytes], folder: _Folder, above: frozenset[bytes]
    ) -> bytes | _Folder | str:
        """Classify a directory entry.

        Returns the key of an image as bytes, a folder to list next, or the reason to leave the
        entry out.
        """
        if entry.name.startswith(b"."):
            return "hidden"
        real = None
        if entry.is_symlink():
            real = os.path.realpath(entry.path)
            if not (self._follow_links or self._is_inside(real)):
                return "links out of the folder (data.follow_links=true follows them)"
        key = folder.prefix + entry.name
        try:
            if entry.is_file():  # known from the listing, mostly: no system call
                mode = stat.S_IFREG
            else:
                mode = stat.S_IFDIR if entry.is_dir() else stat.S_IFMT(entry.stat().st_mode)
        except OSError as error:
            if error.errno not in _DANGLING:
                raise
            mode = 0  # a dangling link is listed, so that its row is recorded as 'missing'
        if mode == stat.S_IFDIR:
            if entry.name.lower() in SYSTEM_FOLDERS:
                return "folders of the system, such as @eaDir"
            if self._depth is not None and folder.prefix.count(b"/") >= self._depth:
                return "folders below data.depth"
            real = real or os.path.join(folder.real, entry.name)
            return _Folder(entry.path, real, key + b"/", above)
        if os.path.splitext(entry.name)[1].lower() not in self._extensions:  # noqa: PTH122 - bytes
            return "other names"
        return key if mode in (stat.S_IFREG, 0) else "not a regular file"

    def _is_inside(self, target: bytes) -> bool:
        """Return whether a path without links lies in the folder."""
        return os.path.commonpath((target, self._real_root)) == self._real_root


SYSTEM_FOLDERS = frozenset(
    b"@eadir #recycle #snapshot @recycle @recently-snapshot $recycle.bin __macosx "
    b"lost+found".split()
) | {b"system volume information"}
"""Lower-case names of folders that NAS devices and operating systems add to folders of images."""


class _Folder(NamedTuple):
    """A folder that is still to be listed."""

    path: bytes
    real: bytes
    prefix: bytes
    above: frozenset[bytes]
