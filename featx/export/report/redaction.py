"""Removal of absolute paths from the texts of a page, which may be sent to others."""

from __future__ import annotations

import re
from collections.abc import Iterable

_START = r"(?<![\w.~:<…/\\-])"
"""Position that is not inside a relative path, a URL or an expression."""

_ABSOLUTE = re.compile(
    _START
    + r"""
        (?:~|[A-Za-z]:)?            # home folder, drive of Windows
        (?:[/\\][^\s/\\'"`,;:()\[\]{}<>|=]+)+ [/\\]?
    """,
    re.VERBOSE,
)
"""An absolute path without spaces in a text."""


def without_folders(text: str, folders: Iterable[str] = ()) -> str:
    """Replace every absolute path in a text by its last part: '/home/me/a.png' -> '…/a.png'."""
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            pattern = _START + re.escape(folder.rstrip("/\\"))
            last = _last_part(folder).replace("\\", r"\\")
            text = re.sub(rf"{pattern}(?=[/\\]\S)", "…", text)
            text = re.sub(rf"{pattern}(?![\w.-])", last, text)
    return _ABSOLUTE.sub(lambda match: _last_part(match.group()), text)


def without_folder(path: str) -> str:
    """Return the last part of an absolute path, and a relative one unchanged."""
    return _last_part(path) if re.match(r"(~|[A-Za-z]:)?[/\\]", path) else path


def without_folders_in_yaml(text: str, folders: Iterable[str] = ()) -> str:
    """Replace absolute paths in the values of a YAML text; a whole value may contain spaces."""
    known_folders = list(folders)
    lines = []
    for line in text.splitlines():
        name, separator, value = line.partition(": ")
        bare = value.strip().strip("'\"")
        if separator:
            line = f"{name}: {without_folder(bare)}" if without_folder(bare) != bare else line
        lines.append(without_folders(line, known_folders))
    return "\n".join(lines)


def _last_part(path: str) -> str:
    """Return the last part of a path, with an ellipsis for the others."""
    parts = [part for part in re.split(r"[/\\]+", path) if part]
    return f"…/{parts[-1]}" if parts else path
