"""Runs that are cut off: by a signal after some commits, or at any change of the disk."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from featx.storage import AtomicFolder
from featx.store import FeatureStore, StoreSession


def same_values(store: FeatureStore, other: FeatureStore) -> bool:
    """Whether rows, statuses and the checksums of images are equal, bit for bit."""
    return (
        all(store[name][:].tobytes() == other[name][:].tobytes() for name in store)
        and store.status.tolist() == other.status.tolist()
        and store.image_checksums.tolist() == other.image_checksums.tolist()
    )


def signal_after_commits(patch: pytest.MonkeyPatch, count: int, *signals: signal.Signals) -> None:
    """Send this process signals, SIGTERM unless some are given, when so many parts are there."""
    commit = StoreSession.commit
    done = 0

    def signalled(self: StoreSession, builder: Any) -> Any:
        nonlocal done
        failures = commit(self, builder)
        done += 1
        if done == count:
            for signum in signals or (signal.SIGTERM,):
                os.kill(os.getpid(), signum)
        return failures

    patch.setattr(StoreSession, "commit", signalled)


class Dies(BaseException):
    """The end of a process."""


def die_at_disk_change(patch: pytest.MonkeyPatch, number: int) -> None:
    """Raise `Dies` at the change of a store with this number, and at all later ones."""
    calls = 0

    def counted(method: Any) -> Any:
        def call(*args: Any, **keys: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= number:
                raise Dies
            return method(*args, **keys)

        return call

    for name in ("publish", "replace", "remove"):
        patch.setattr(AtomicFolder, name, counted(getattr(AtomicFolder, name)))
