"""Runs that are cut off: by a signal after some commits, or at any change of the disk."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from featx.analysis.statistics.session import StatsSession
from featx.pipeline import Interrupted
from featx.storage import AtomicFolder
from featx.store import FeatureStore, StoreSession
from featx.types import Part


def same_values(store: FeatureStore, other: FeatureStore) -> bool:
    """Whether rows, statuses and the checksums of images are equal, bit for bit."""
    return (
        all(store[name][:].tobytes() == other[name][:].tobytes() for name in store)
        and store.status.tolist() == other.status.tolist()
        and store.image_checksums.tolist() == other.image_checksums.tolist()
    )


def on_commit(patch: pytest.MonkeyPatch, function: Callable[[Part], object]) -> None:
    """Call a function with each part of features or statistics that this process has committed."""

    def noted(commit: Any) -> Any:
        def call(self: Any, part: Any, *rest: Any) -> Any:
            failures = commit(self, part, *rest)
            function(getattr(part, "part", part))  # a builder knows its part
            return failures

        return call

    for session, name in ((StoreSession, "commit"), (StatsSession, "record_commit")):
        patch.setattr(session, name, noted(getattr(session, name)))


def signal_after_commits(patch: pytest.MonkeyPatch, count: int, *signals: signal.Signals) -> None:
    """Send this process signals, SIGTERM unless some are given, when so many parts are there."""
    done: list[Part] = []

    def signalled(part: Part) -> None:
        done.append(part)
        if len(done) == count:
            for signum in signals or (signal.SIGTERM,):
                os.kill(os.getpid(), signum)

    on_commit(patch, signalled)


@contextlib.contextmanager
def stopped_after(
    count: int, *signals: signal.Signals
) -> Iterator[pytest.ExceptionInfo[Interrupted]]:
    """The block is a run that is stopped after so many commits, by SIGTERM or by other signals."""
    with pytest.MonkeyPatch.context() as patch:
        signal_after_commits(patch, count, *signals)
        with pytest.raises(Interrupted) as stopped:
            yield stopped


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let files grow no further: as on a full disk the write fails; Python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


@contextlib.contextmanager
def died_at_disk_change(number: int) -> Iterator[None]:
    """The block is a run that ends at the change of a store with this number."""
    with pytest.MonkeyPatch.context() as patch:
        die_at_disk_change(patch, number)
        with pytest.raises(Dies):
            yield
