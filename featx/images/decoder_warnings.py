"""Warnings of image decoders, counted by reason instead of printed.

A folder of TIFF files can cause several warnings per image. Pillow warns through `warnings` and
`logging`; libtiff and other C libraries write to stderr. A decoder process redirects all three and
sends them to the process of the model. A decoder thread collects what featx itself warns of.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from featx.base import name_text

logger = logging.getLogger(__name__)

MAX_REASONS = 20
"""Number of reasons that are counted separately; further ones are counted as OTHER."""

OTHER = "other warnings"
"""Reason under which all further warnings are counted."""

ACCEPTED_DAMAGE = "damaged JPEG: "
"""Beginning of the warning about an image that is damaged and accepted."""

_logged: set[str] = set()
"""Reasons that this process has logged. A process may load images for many runs, and logs once."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Numbers and addresses in a warning."""
_LENGTH = 160
"""Largest number of characters of a reason."""

_STDERR = 2
"""Descriptor of the standard error stream."""

_STDERR_BYTES = 1 << 14
"""Largest number of bytes on stderr that are taken as warnings of one image."""


def count_warnings(counts: Counter[str], key: bytes, messages: Iterable[str]) -> None:
    """Count the warnings of an image by reason, once each, and log reasons that are new here.

    A reason is a warning without what differs between images: numbers become N.
    """
    message_of_reason = {
        _NUMBERS.sub("N", message)[:_LENGTH]: message for message in reversed([*messages])
    }
    for reason, message in message_of_reason.items():
        has_room = reason in counts or len(counts) < MAX_REASONS
        entry = reason if has_room else OTHER
        counts[entry] += 1
        if entry not in _logged:
            _logged.add(entry)
            logger.warning("%s: %s (others of this kind are counted)", name_text(key), message)


class _OfThread(threading.local):
    """What was warned of in a thread that decodes; None in any other one."""

    messages: list[str] | None = None


_of_thread = _OfThread()


def warn(message: str) -> None:
    """Warn of the image that is decoded."""
    if _of_thread.messages is not None:
        _of_thread.messages.append(message)
        return
    # With a new registry each time, as Python would show one text only once.
    warnings.warn_explicit(message, UserWarning, __file__, 1, "PIL.featx", {})


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Record what a block warns of, which the caller may warn of again."""
    before = _of_thread.messages
    recorded: list[str] = []
    _of_thread.messages = recorded
    try:
        yield recorded
    finally:
        _of_thread.messages = before


def collect_warnings() -> Callable[[], list[str]]:
    """Collect what `warn` is called with in this thread from now on.

    Returns a function that returns the warnings since its last call.
    """
    messages: list[str] = []
    _of_thread.messages = messages

    def take() -> list[str]:
        taken = [text for text in messages if text]
        messages.clear()
        return taken

    return take


def redirect_warnings() -> Callable[[], list[str]]:
    """Collect all warnings of this process, and what it writes to stderr; as `collect_warnings`."""
    take_collected = collect_warnings()

    def add(text: object) -> None:
        warn(" ".join(str(text).split()))

    def show(message: Warning | str, *args: object, **kwargs: object) -> None:
        add(message)

    # "always": Python otherwise shows one text from one line of code only once, and warnings could
    # not be counted per image.
    warnings.filterwarnings("always", module=r"PIL\.")
    warnings.showwarning = show
    pillow = logging.getLogger("PIL")
    pillow.propagate = False
    pillow.handlers = [_Handler(add)]
    file = os.memfd_create("featx-stderr")
    os.dup2(file, _STDERR)
    if sys.stderr is None:  # the command was started without the stream
        sys.stderr = os.fdopen(_STDERR, "w", buffering=1, closefd=False)

    def take() -> list[str]:
        if os.fstat(file).st_size:
            text = os.pread(file, _STDERR_BYTES, 0).decode(errors="replace")
            for line in text.splitlines():
                add(line)
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
        return take_collected()

    return take


class _Handler(logging.Handler):
    """Hands the messages of a logger to a function."""

    def __init__(self, add: Callable[[object], None]) -> None:
        super().__init__()
        self._add = add

    def emit(self, record: logging.LogRecord) -> None:
        self._add(record.getMessage())
