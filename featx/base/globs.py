"""Globs over the dotted names of layers."""

from __future__ import annotations

import re


def glob_to_regex(glob: str) -> str:
    """A glob over dotted names: * within one part, ** across parts, ? one character."""
    parts = {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    pieces = re.split(r"(\*\*|\*|\?)", glob)
    return "".join(parts.get(piece, re.escape(piece)) for piece in pieces)
