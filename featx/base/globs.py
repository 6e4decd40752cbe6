"""Globs over the dotted names of layers."""

from __future__ import annotations

import re


def glob_to_regex(glob: str) -> str:
    """Translate a glob over dotted names into a regular expression.

    * matches within one part of the name, ** across parts, and ? one character.
    """
    parts = {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    pieces = re.split(r"(\*\*|\*|\?)", glob)
    return "".join(parts.get(piece, re.escape(piece)) for piece in pieces)
