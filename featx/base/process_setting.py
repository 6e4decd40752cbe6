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
        get: function that returns the present value.
        set_value: function that sets a value.
        value: the value while there is any user.
    """

    def __init__(self, get: Callable[[], T], set_value: Callable[[T], None], value: T) -> None:
        self._get = get
        self._set = set_value
        self._value = value
        self._lock = threading.Lock()
        self._users = 0
        self._saved = value

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._saved = self._get()
                self._set(self._value)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set(self._saved)
