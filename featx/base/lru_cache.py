"""Cache of the items that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Items that were used last, shared by threads; the least recently used ones are dropped.

    Dropped items are not closed, because another thread may be using them: a file closes with its
    last reference.

    Args:
        limit: largest sum of the sizes of the items. The item that was added last stays anyway.
        size_of: size of an item; by default items are counted.
    """

    def __init__(self, limit: int, size_of: Callable[[V], int] = lambda item: 1) -> None:
        self._limit, self._size_of = limit, size_of
        self._items: OrderedDict[K, V] = OrderedDict()
        self._size = 0
        self._lock, self._making = threading.Lock(), threading.Lock()

    def get(self, key: K) -> V | None:
        """Return the item of a key, if it is there."""
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
            return item

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the item of a key; a missing one is made while other threads wait."""
        with self._making:
            item = self.get(key)
            if item is None:
                item = make()
                self.put(key, item)
            return item

    def put(self, key: K, item: V) -> None:
        """Add an item, unless its key is there already."""
        with self._lock:
            if key in self._items:
                return
            self._items[key] = item
            self._size += self._size_of(item)
            while self._size > self._limit and len(self._items) > 1:
                self._size -= self._size_of(self._items.popitem(last=False)[1])

    def drop(self, is_dropped: Callable[[K], bool]) -> None:
        """Drop the items with some keys."""
        with self._lock:
            for key in [key for key in self._items if is_dropped(key)]:
                self._size -= self._size_of(self._items.pop(key))
