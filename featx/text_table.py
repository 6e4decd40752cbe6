"""Rows of text as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns; the first `left` ones flush left, numbers flush right.

    A name in the header may have several lines, divided by newlines.
    """
    depth = max(name.count("\n") for name in header)
    split = [("\n" * (depth - name.count("\n")) + name).split("\n") for name in header]
    every = [*zip(*split, strict=True), *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(header))]
    lines = []
    for row in every:
        cells = [
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
