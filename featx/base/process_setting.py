"""Settings of the whole process, as featx needs them while any of its parts runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """A context manager that holds a setting at one value, for as long as anybody needs it.

    Users come and go in any order, and from any thread: the first saves what was set, and the last
    brings it back. A saved value for each would go wrong where two overlap without one being inside
    the other, as two engines do that are opened and closed in the same order.

    Args:
        now: gives the present value.
        put: sets a value.
        needed: the value while anybody uses it.
    """

    def __init__(self, now: Callable[[], T], put: Callable[[T], None], needed: T) -> None:
        self._now = now
        self._put = put
        self._needed = needed
        self._lock = threading.Lock()
        self._users = 0
        self._before = needed

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = self._now()
                self._put(self._needed)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._put(self._before)
