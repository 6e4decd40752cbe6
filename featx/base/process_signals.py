"""Signal handlers of a block of code, which forked child processes do not inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[int, Any], object]

_replaced: list[dict[signal.Signals, Any]] = []
"""Handlers that the open blocks have replaced, those of the outermost block first."""


def _restore_in_child() -> None:
    """Put the handlers back in a forked child.

    A child such as a worker of a process pool would otherwise take a signal that ends it for a
    request to stop the run.
    """
    while _replaced:
        _restore(_replaced.pop())


os.register_at_fork(after_in_child=_restore_in_child)


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals inside the block, in this process only.

    Signal handlers exist only in the main thread; in other threads nothing is installed. A signal
    that is ignored, as SIGHUP under nohup, stays ignored.

    Args:
        handlers: number of the signal -> handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signum for signum in handlers if signal.getsignal(signum) != signal.SIG_IGN]
    before: dict[signal.Signals, Any] = {
        signum: signal.signal(signum, handlers[signum]) for signum in handled
    }
    _replaced.append(before)
    try:
        yield
    finally:
        if any(each is before for each in _replaced):  # not in a forked child
            _replaced.remove(before)
            _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install handlers as `signal.getsignal` returned them; None is one of another language."""
    for signum, handler in handlers.items():
        if handler is not None:
            signal.signal(signum, handler)
