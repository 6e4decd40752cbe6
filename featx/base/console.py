"""Lines on stdout and on stderr: the result of a job, and messages about a run."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from featx.base.text import facts


def print_result(text: str = "") -> None:
    """A line of the command's result, on stdout; nobody has to read it to the end (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        stop_saying()


def stop_saying() -> None:
    """Write no more to stdout, whose reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_as_json = False
"""Whether stderr gets JSON objects instead of text."""


def writes_json() -> bool:
    """Whether stderr gets JSON objects instead of text."""
    return _as_json


class _JsonFormatter(logging.Formatter):
    """Records of the libraries' loggers, in the form of our own lines."""

    def format(self, record: logging.LogRecord) -> str:
        return json_line(record.levelname.lower(), message=record.getMessage())


def log_as_json() -> None:
    """From now on one JSON object a line on stderr, in place of text for people."""
    global _as_json
    _as_json = True
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_JsonFormatter())


def json_line(level: str, **values: Any) -> str:
    """A message as one line of JSON, with its time and level."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return json.dumps({"time": stamp, "level": level, **values})


def log_message(text: str, level: str = "info") -> None:
    """Something about the run, on stderr.

    Args:
        level: 'info', 'warning' or 'error'; a text that begins with 'warning:' is one.
    """
    if _as_json:
        if not (text := text.strip()):
            return
        level = "warning" if text.startswith("warning: ") else level
        text = json_line(level, message=text.removeprefix("warning: "))
    print(text, file=sys.stderr, flush=True)


def announce(rows: Sequence[tuple[str, str]]) -> None:
    """What is going to be done, before it begins."""
    if not _as_json:
        log_message(f"{facts(rows)}\n")
        return
    values: dict[str, str] = {}
    last = ""
    for name, value in rows:
        last = name or last  # a line without a name goes on with the one before
        values[last] = f"{values[last]}\n{value}" if last in values else value
    print(json_line("info", event="begin", **values), file=sys.stderr, flush=True)
