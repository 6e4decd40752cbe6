"""The items that were used last are kept, up to a number or a size."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from featx.base import LruCache


def test_the_item_that_was_not_used_for_longest_is_dropped() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    cache.put("a", 7)
    assert cache.get("a") == 1, "an item that is there stays"
    cache.drop(lambda key: key != "c")
    cache.put("d", 4)
    assert [cache.get(key) for key in "acd"] == [None, 3, 4]


def test_sizes_are_limited_and_the_last_item_stays() -> None:
    cache: LruCache[int, bytes] = LruCache(10, len)
    for key in range(4):
        cache.put(key, bytes(4))
    assert [cache.get(key) is not None for key in range(4)] == [False, False, True, True]
    cache.put(4, bytes(100))
    assert [cache.get(key) is not None for key in range(5)] == [False] * 4 + [True]
    cache.drop(lambda key: True)
    cache.put(5, bytes(5))
    cache.put(6, bytes(5))
    assert cache.get(5) == cache.get(6) == bytes(5), "dropped items count no more"


def test_threads_that_need_an_item_make_it_once_and_an_error_keeps_nothing() -> None:
    cache: LruCache[str, object] = LruCache(1)
    made = []
    waiting = threading.Barrier(4)

    def item() -> object:
        waiting.wait()
        return cache.get_or_make("a", lambda: made.append(1) or object())

    with ThreadPoolExecutor(4) as threads:
        assert len({*threads.map(lambda _: item(), range(4))}) == 1
    assert len(made) == 1
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("b", lambda: 1 / 0)
    assert cache.get_or_make("b", lambda: 2) == 2
