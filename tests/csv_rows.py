"""Lines of CSV files that jobs write."""

from __future__ import annotations

import csv
from pathlib import Path


def csv_rows(path: str | Path, **values: str) -> list[dict[str, str]]:
    """Lines of a file by the names of its columns; with `values` those that have them."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if values.items() <= row.items()]
