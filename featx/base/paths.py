"""Paths: of files installed with featx, of its cache, and as they are shown to people."""

from __future__ import annotations

import os
from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Path of a folder that is installed with featx: 'conf' or 'data'.

    In a wheel it is inside the package; in a checkout and an editable install, next to it.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "_shipped" / name
    return inside if inside.is_dir() else package.parent / name


def cache_folder(name: str) -> Path:
    """Folder of featx in the user's cache, `$XDG_CACHE_HOME/featx/NAME`; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "featx" / name


def shown_path(path: str | Path) -> str:
    """Return a path relative to the current folder if that is shorter, else the absolute path.

    A URL stays as it is.
    """
    text = str(path)
    if "://" in text:
        return text
    try:
        relative = os.path.relpath(text)
    except OSError:  # the current folder was deleted
        return text
    return min(text, relative, key=len)
