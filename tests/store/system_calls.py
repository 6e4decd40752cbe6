"""A recorder of system calls that can fail any one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SYSTEM_CALLS = ("open", "pwrite", "fsync", "close", "link", "unlink", "replace", "rename",
                "posix_fallocate", "ftruncate", "mkdir")  # fmt: skip


class Calls:
    """Records the system calls below one folder and fails the n-th of them.

    Args:
        root: calls on paths and descriptors elsewhere pass unseen.
        fail_at: which call fails, counted from 1; 0 for none.
        error: its errno, or 'short' for a write that writes half.
        spare: calls that never fail.
    """

    def __init__(
        self, root: Path, fail_at: int = 0, error: int | str = 0, spare: tuple[str, ...] = ()
    ) -> None:
        self.seen: list[tuple[str, str]] = []
        self.failed: str | None = None
        self._root = root
        self._fail_at = fail_at
        self._error = error
        self._spare = spare
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
                if self._count == self._fail_at:
                    short = self._error == "short"
                    if short and name == "pwrite":
                        self.failed = name
                        return real(first, args[0][: max(1, len(args[0]) // 2)], *args[1:])
                    if not short:
                        self.failed = name
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
