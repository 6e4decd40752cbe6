"""System calls of commits: failed one by one, or recorded and replayed on a model of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from featx.storage import AtomicFolder

SYSTEM_CALLS = ("open", "pwrite", "fsync", "close", "link", "unlink", "replace", "rename",
                "posix_fallocate", "ftruncate", "mkdir")  # fmt: skip


class Calls:
    """Records the system calls below one folder and fails the n-th of them.

    Args:
        root: calls on paths and descriptors elsewhere pass unseen.
        fail_at: which call fails, counted from 1; 0 for none.
        error: its errno, or 'short' for a write that writes half.
        spare: calls that never fail.
        lasting: every call from the n-th on fails, as on a disk that is gone.
    """

    def __init__(
        self,
        root: Path,
        fail_at: int = 0,
        error: int | str = 0,
        spare: tuple[str, ...] = (),
        lasting: bool = False,
    ) -> None:
        self.seen: list[tuple[str, str]] = []
        self.failed: str | None = None
        self._root = root
        self._fail_at = fail_at
        self._error = error
        self._spare = spare
        self._lasting = lasting
        self._count = 0
        self._names: dict[int, str] = {}

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            subject = self._names.get(first) if isinstance(first, int) else os.fspath(first)
            if subject is None or not str(subject).startswith(str(self._root)):
                return real(first, *args, **kwargs)
            self.seen.append((name, str(subject)))
            if name not in self._spare:
                self._count += 1
                after = self._count - self._fail_at
                if self._fail_at and (after == 0 or (self._lasting and after > 0)):
                    short = self._error == "short"
                    if short and name == "pwrite":
                        self.failed = name
                        return real(first, args[0][: max(1, len(args[0]) // 2)], *args[1:])
                    if not short:
                        self.failed = self.failed or name
                        if name == "close":
                            real(first)
                        raise OSError(self._error, os.strerror(int(self._error)))
            done = real(first, *args, **kwargs)
            if name == "open":
                self._names[done] = str(subject)
            if name == "close":
                self._names.pop(first)
            return done

        return call

    @property
    def untouched(self) -> bool:
        """Whether the run ended before the call that was to fail."""
        return self._count < self._fail_at


@contextmanager
def watched(calls: Calls) -> Iterator[Calls]:
    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, calls.wrap(name, getattr(os, name)))
        yield calls


Op = tuple[Any, ...]
"""A change of the disk, or an acknowledgement, as `Recording` notes it: its name, then arguments.

Paths are relative to the recorded folder.
"""


class Recording:
    """Records every change below a folder, in order, so that a model of the disk can replay it.

    Args:
        base: the folder; what lies in it already is not recorded.
    """

    def __init__(self, base: Path) -> None:
        self.ops: list[Op] = []
        self._base = base
        self._names: dict[int, str] = {}

    def acknowledge(self, *what: Any) -> None:
        """Note that from here on something was promised."""
        self.ops.append(("ack", *what))

    def __enter__(self) -> Recording:
        self._patch = pytest.MonkeyPatch()
        for name, on_success in self._recorders().items():
            self._patch.setattr(os, name, self._recorded(getattr(os, name), on_success))
        self._patch.setattr(os, "open", self._recorded_open(os.open))
        self._patch.setattr(os, "close", self._recorded_close(os.close))
        self._patch.setattr(AtomicFolder, "append", self._recorded_append(AtomicFolder.append))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _recorders(self) -> dict[str, Callable[..., Op]]:
        """For each system call: its arguments, names for paths and descriptors -> the operation."""
        return {
            "pwrite": lambda path, data, offset: ("write", path, offset, bytes(data)),
            "ftruncate": lambda path, size: ("size", path, size),
            "posix_fallocate": lambda path, start, size: ("grow", path, start + size),
            "fsync": lambda path: ("sync", path),
            "link": lambda path, target, **_: ("link", path, self._name(target)),
            "rename": lambda path, target, **_: ("rename", path, self._name(target)),
            "replace": lambda path, target, **_: ("rename", path, self._name(target)),
            "unlink": lambda path, **_: ("unlink", path),
            "rmdir": lambda path, **_: ("unlink", path),
            "mkdir": lambda path, *_, **__: ("mkdir", path),
        }

    def _name(self, subject: Any) -> str | None:
        """A path below the base, relative to it, or None."""
        if isinstance(subject, int):
            return self._names.get(subject)
        try:
            return Path(subject).relative_to(self._base).as_posix()
        except ValueError:
            return None

    def _recorded(self, real: Callable[..., Any], op: Callable[..., Op]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            done = real(first, *args, **kwargs)
            name = self._name(first)
            if name is not None:
                self.ops.append(op(name, *args, **kwargs))
            return done

        return call

    def _recorded_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            name = None if isinstance(path, int) else self._name(path)
            new = name is not None and flags & os.O_CREAT and not Path(path).exists()
            descriptor = real(path, flags, *args, **kwargs)
            if name is not None:
                self._names[descriptor] = name
                if new:
                    self.ops.append(("create", name))
            return descriptor

        return call

    def _recorded_close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            self._names.pop(descriptor, None)
            real(descriptor)

        return call

    def _recorded_append(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(disk: AtomicFolder, path: Path, text: str) -> None:
            size = path.stat().st_size if path.exists() else 0
            real(disk, path, text)
            name = self._name(path)
            if name is not None:
                if not size:
                    self.ops.append(("create", name))
                self.ops.append(("write", name, size, path.read_bytes()[size:]))

        return call


class File:
    """A file of the model: what is durable of it, and what was done since."""

    def __init__(self, data: bytes = b"") -> None:
        self.durable = data
        self.latest = data
        self.pending = False

    def change(self, latest: bytes) -> None:
        self.latest = latest
        self.pending = True

    def sync(self) -> None:
        self.durable = self.latest
        self.pending = False


class Folder:
    """A folder of the model: for each name what it stood for, the durable one first."""

    def __init__(self) -> None:
        self.names: dict[str, list[File | Folder | None]] = {}

    def now(self, name: str) -> File | Folder | None:
        return self.names.get(name, [None])[-1]

    def put(self, name: str, node: File | Folder | None) -> None:
        self.names.setdefault(name, [None]).append(node)

    def sync(self) -> None:
        self.names = {n: h[-1:] for n, h in self.names.items() if h[-1] is not None}


Tree = dict[str, bytes | None]
"""Path -> contents of a file, None for a folder."""


class DiskModel:
    """A disk that keeps after a power loss what was synced, and of the rest whatever it likes.

    A name stands for anything it stood for since its folder was synced, each name for itself: so
    operations are lost in any subset and any order, and even a rename is not atomic. The data of a
    file that was not synced are all there, gone, zeros, torn at any sector, or sectors at random.
    """

    def __init__(self, base: Path | None = None) -> None:
        self.root = Folder()
        for path in sorted(base.rglob("*")) if base else []:
            name = path.relative_to(base).as_posix()  # type: ignore[arg-type]
            folder, last = self._folder_of(name)
            folder.names[last] = [Folder() if path.is_dir() else File(path.read_bytes())]

    def _folder_of(self, name: str) -> tuple[Folder, str]:
        *steps, last = name.split("/")
        folder = self.root
        for step in steps:
            inner = folder.now(step)
            assert isinstance(inner, Folder), f"{name}: {step} is no folder"
            folder = inner
        return folder, last

    def _node(self, name: str) -> File | Folder:
        if name == ".":
            return self.root
        folder, last = self._folder_of(name)
        node = folder.now(last)
        assert node is not None, f"there is no {name}"
        return node

    def _file(self, name: str) -> File:
        node = self._node(name)
        assert isinstance(node, File)
        return node

    def apply(self, op: Op) -> None:
        kind, *arguments = op
        if kind != "ack":
            getattr(self, f"_{kind}")(*arguments)

    def _create(self, name: str) -> None:
        folder, last = self._folder_of(name)
        folder.put(last, File())

    def _mkdir(self, name: str) -> None:
        folder, last = self._folder_of(name)
        folder.put(last, Folder())

    def _unlink(self, name: str) -> None:
        folder, last = self._folder_of(name)
        folder.put(last, None)

    def _link(self, name: str, target: str) -> None:
        folder, last = self._folder_of(target)
        folder.put(last, self._node(name))

    def _rename(self, name: str, target: str) -> None:
        self._link(name, target)
        self._unlink(name)

    def _write(self, name: str, offset: int, data: bytes) -> None:
        file = self._file(name)
        before = file.latest.ljust(offset, b"\0")
        file.change(before[:offset] + data + before[offset + len(data) :])

    def _size(self, name: str, size: int) -> None:
        file = self._file(name)
        file.change(file.latest[:size].ljust(size, b"\0"))

    def _grow(self, name: str, size: int) -> None:
        file = self._file(name)
        file.change(file.latest.ljust(size, b"\0"))

    def _sync(self, name: str) -> None:
        self._node(name).sync()

    def tree(
        self,
        name_after: Callable[[list[File | Folder | None]], File | Folder | None],
        data_after: Callable[[File], bytes],
    ) -> Tree:
        """What is there after a crash.

        Args:
            name_after: chooses what a name stands for among all that it stood for.
            data_after: what is in a file.
        """
        found: Tree = {}

        def visit(folder: Folder, prefix: str) -> None:
            for name, history in sorted(folder.names.items()):
                node = name_after(history) if len(history) > 1 else history[0]
                if isinstance(node, File):
                    found[prefix + name] = data_after(node) if node.pending else node.latest
                elif node is not None:
                    found[prefix + name] = None
                    visit(node, f"{prefix}{name}/")

        visit(self.root, "")
        return found
