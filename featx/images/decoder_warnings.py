"""Warnings of Pillow and libtiff during decoding, counted by reason instead of printed.

A folder of TIFF files can cause several warnings per image. Pillow warns through `warnings` and
`logging`; libtiff writes to stderr itself unless it is given handlers. All three are redirected
while a decoder of featx is open, for the threads that decode for it. Warnings of other threads are
not redirected.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
import warnings
from collections import Counter
from typing import Any

from PIL import _imaging

from featx.base import ProcessSetting

logger = logging.getLogger(__name__)

MAX_REASONS = 20
"""Number of reasons that are counted separately; further ones are counted as OTHER."""

OTHER = "other warnings"
"""Reason under which all further warnings are counted."""

_logged: set[str] = set()
"""Reasons that this process has logged; a worker opens a decoder for each part, and logs once."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Numbers and addresses in a warning."""
_LENGTH = 160
"""Largest number of characters of a reason."""


class DecoderWarnings:
    """Warnings of decoders, counted by reason; safe to use from several threads.

    Attributes:
        counts: reason, with N in place of every number -> number of images with this warning.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def collecting(self, key: bytes) -> _Collecting:
        """Context manager that counts the warnings of the calling thread, and logs new reasons.

        Args:
            key: key of the image that the thread decodes.
        """
        return _Collecting(self, key)

    def add(self, key: bytes, messages: list[str]) -> None:
        """Count each reason once per image, and log those that are new in this process.

        Args:
            key: key of the image.
            messages: its warnings.
        """
        message_of_reason = {reason_of(message): message for message in reversed(messages)}
        with self._lock:
            new = []
            for reason, message in message_of_reason.items():
                room = reason in self.counts or len(self.counts) < MAX_REASONS
                entry = reason if room else OTHER
                self.counts[entry] += 1
                if entry not in _logged:
                    _logged.add(entry)
                    new.append(message)
        # Logging comes after the lock is released: a handler may be slow, or warn itself.
        for message in new:
            logger.warning("%s: %s (others of this kind are counted)", os.fsdecode(key), message)


def reason_of(message: str) -> str:
    """A warning without what differs between images: numbers become N."""
    return _NUMBERS.sub("N", message)[:_LENGTH]


class _Thread(threading.local):
    """The warnings of the image that a thread decodes for featx; None in other threads."""

    messages: list[str] | None = None


_thread = _Thread()


class _Collecting:
    """Collects the warnings of the calling thread inside a block; every image enters one."""

    __slots__ = ("_before", "_key", "_warnings")

    def __init__(self, warnings: DecoderWarnings, key: bytes) -> None:
        self._warnings = warnings
        self._key = key

    def __enter__(self) -> None:
        self._before, _thread.messages = _thread.messages, []

    def __exit__(self, *error: object) -> None:
        messages, _thread.messages = _thread.messages, self._before
        if messages:
            self._warnings.add(self._key, messages)


def _take(message: str) -> bool:
    """Collect a warning if the calling thread decodes for featx; return whether it does."""
    if _thread.messages is None:
        return False
    _thread.messages.append(" ".join(message.split()))
    return True


class _LogHandler(logging.Handler):
    """Handler on Pillow's logger that collects messages, or passes them to the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        parent = logging.getLogger()
        if not _take(record.getMessage()):
            parent.callHandlers(record)


_TIFF_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
"""TIFFErrorHandler of tiffio.h: (module, format, va_list)."""

_MESSAGE_BYTES = 1024
"""Size of the buffer into which a message of libtiff is formatted."""


class _Libtiff:
    """The handlers for warnings and errors of the libtiff that Pillow is linked with."""

    def __init__(self) -> None:
        self._setters: list[Any] = []
        self._replaced: list[tuple[Any, Any]] = []
        self._handlers: list[Any] = []
        with contextlib.suppress(AttributeError, OSError):
            # The symbols are found through the libraries that Pillow's own one is linked with.
            library = ctypes.CDLL(_imaging.__file__)
            self._setters = [library.TIFFSetWarningHandler, library.TIFFSetErrorHandler]
            self._format = ctypes.CDLL(None).vsnprintf
            self._format.argtypes = (
                ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p,
            )  # fmt: skip
        for setter in self._setters:
            setter.restype = ctypes.c_void_p
            setter.argtypes = (ctypes.c_void_p,)

    def replace(self) -> None:
        """Install handlers that collect messages of decoding threads."""
        for setter in self._setters:
            handler, before = self._handler()
            before.append(setter(ctypes.cast(handler, ctypes.c_void_p)))
            self._replaced.append((setter, before[0]))
            self._handlers.append(handler)  # ctypes frees a callback without a reference

    def restore(self) -> None:
        """Bring back the handlers that were installed before."""
        while self._replaced:
            setter, before = self._replaced.pop()
            setter(before)
        self._handlers.clear()

    def _handler(self) -> tuple[Any, list[int | None]]:
        """A callback for libtiff, and the list that takes the address of the replaced one."""
        before: list[int | None] = []

        def handle(module: bytes | None, text: bytes | None, arguments: int | None) -> None:
            if _thread.messages is None:
                if before and before[0]:
                    _TIFF_HANDLER(before[0])(module, text, arguments)
                return
            buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
            self._format(buffer, len(buffer), text, arguments)
            _take(f"libtiff: {buffer.value.decode(errors='replace')}")

        return _TIFF_HANDLER(handle), before


class _Redirection:
    """Switches the redirection of the warnings of the process on and off."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._libtiff: _Libtiff | None = None

    def put(self, redirected: bool) -> None:
        """Redirect warnings, or bring back the state before."""
        if redirected:
            self._redirect()
        else:
            self._stack.close()

    def _redirect(self) -> None:
        """Redirect libtiff, `warnings` and Pillow's loggers."""
        if self._libtiff is None:
            self._libtiff = _Libtiff()
        self._libtiff.replace()
        self._stack.callback(self._libtiff.restore)
        self._stack.enter_context(warnings.catch_warnings())
        # "always": Python otherwise shows one text from one line of code only once, and warnings
        # could not be counted per image.
        warnings.filterwarnings("always", module=r"PIL\.")
        show_warning = warnings.showwarning

        def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if not _take(str(message)):
                show_warning(message, *args, **kwargs)

        warnings.showwarning = show
        pillow, handler = logging.getLogger("PIL"), _LogHandler()
        self._stack.callback(setattr, pillow, "propagate", pillow.propagate)
        self._stack.callback(pillow.removeHandler, handler)
        pillow.addHandler(handler)
        pillow.propagate = False


decoder_warnings_redirected: ProcessSetting[bool] = ProcessSetting(
    lambda: False, _Redirection().put, True
)
"""Context manager inside which warnings of decoders can be collected."""
