"""Lines on stdout and stderr: the result of a job, and log messages about a run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from featx.base.process import ProcessSetting, is_own_process
from featx.base.text import facts, printable
from featx.errors import RunError


def print_result(text: str = "") -> None:
    """Print a line of the command's result on stdout; a closed pipe (`| head`) is no error.

    Its control characters are escaped. A stream that a program has closed is none to write to.
    Raises RunError if stdout cannot be written, for example on a full disk.
    """
    if getattr(sys.stdout, "closed", False):
        return
    try:
        print(printable(text, kept="\n\t"), flush=True)
    except BrokenPipeError:
        if is_own_process():
            discard_output()
    except OSError as error:
        raise RunError(f"stdout cannot be written: {error.strerror}.") from error


def discard_output() -> None:
    """Discard all further output to stdout, whose reader has closed the pipe."""
    # Redirecting the file descriptor also keeps the flush at exit from failing.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_as_json = False
"""Whether stderr receives JSON objects instead of text."""


def shows_bars() -> bool:
    """Return whether progress is a bar: stderr is a terminal or that of a notebook, and no JSON."""
    return not _as_json and (_is_terminal(sys.stderr) or is_notebook())


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal. A program may have closed it, or put None or an object
    with only `write` in its place.
    """
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = None if ipython is None else ipython.get_ipython()
    return "IPKernelApp" in getattr(shell, "config", {})


class _JsonFormatter(logging.Formatter):
    """Formats the records of other libraries' loggers like featx's own JSON lines."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON line with the level and the message."""
        return _json_line(record.levelname.lower(), message=record.getMessage())


def log_as_json() -> None:
    """Write one JSON object per line on stderr from now on, instead of text."""
    global _as_json
    _as_json = True
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_JsonFormatter())


def _json_line(level: str, **values: object) -> str:
    """One line of JSON with the time in UTC, the level and the given values."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return json.dumps({"time": stamp, "level": level, **values})


def log_message(text: str, level: str = "info") -> None:
    """Print a message about the run on stderr; its control characters are escaped.

    The level is 'info', 'warning' or 'error'. JSON lines have it as a value; in text, a warning
    begins with 'warning: '.
    """
    if _as_json:
        if not (text := text.strip()):
            return
        text = _json_line(level, message=text)
    elif level == "warning":
        text = f"warning: {text}"
    _print_line(printable(text, kept="\n\t"))


def log_event(text: str, /, **values: object) -> None:
    """Print a message about the run on stderr: the text, or as JSON the values in its place."""
    if _as_json:
        _print_line(_json_line("info", **values))
    else:
        log_message(text)


def log_step(text: str) -> None:
    """Print a step of the preparation of a run to a person who waits, at a terminal or notebook."""
    if shows_bars():
        # In a notebook, what is printed on stderr looks like an error.
        stream = sys.stdout if is_notebook() else sys.stderr
        _print_line(printable(text, kept="\n\t"), stream)


def _print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line, on stderr unless a stream is given. Its disk may be full, its terminal closed,
    or the stream itself: the run continues.
    """
    with contextlib.suppress(OSError, ValueError):
        print(line, file=stream or sys.stderr, flush=True)


_errors_only = ProcessSetting(
    lambda: logging.root.manager.disable, logging.disable, logging.WARNING
)


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep libraries from warnings inside the block; they log errors as before."""
    with _errors_only, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_announces: ContextVar[bool] = ContextVar("announces", default=True)
"""Whether `announce` prints."""


@contextlib.contextmanager
def announcements(are_printed: bool) -> Iterator[None]:
    """Decide whether the settings of runs in this context are printed before they start."""
    token = _announces.set(are_printed)
    try:
        yield
    finally:
        _announces.reset(token)


def announce(settings: Sequence[tuple[str, str]]) -> None:
    """Print the settings (name, value) of a run before it starts, as text or JSON."""
    if not _announces.get():
        # How images become pixels, where the model does not say it, is never left out.
        for name, text in settings:
            if name == "transform":
                log_step(f"{name}  {text}")
        return
    text = f"{facts(settings)}\n"
    if is_notebook() and not _as_json:
        log_step(text)
    else:
        log_event(text, event="begin", **dict(settings))
