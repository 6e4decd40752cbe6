"""Text for a terminal: tables, aligned facts, sizes and times."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format rows as aligned columns; the first `left` columns flush left, the others flush right.

    Args:
        header: names of the columns; a name may have several lines.
        rows: cells as text.
        left: number of columns that are flush left.
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


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Format (name, value) pairs as aligned lines; further lines of a value are indented."""
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        first, *more = value.splitlines() or [""]
        lines.append(f"{name:<{width}}  {first}".rstrip())
        lines += [f"{'':<{width}}  {line}" for line in more]
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """A number of bytes with its unit: '2.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def time_text(seconds: float) -> str:
    """A duration given in seconds, with its unit: '41 s', '12 min', '3.5 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
