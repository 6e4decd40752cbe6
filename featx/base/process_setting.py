"""Settings of the whole process that are changed while any part of featx needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """A context manager that keeps a setting at one value while it has any user.

    Users enter and leave in any order and from any thread: the first saves the value, and the last
    restores it. A saved value per user would go wrong if users overlap without nesting, as two
    engines do that are opened and closed in the same order.

    Args:
        now: function that returns the present value.
        put: function that sets a value.
        needed: the value while there is any user.
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
