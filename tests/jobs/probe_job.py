"""job=probe in this process, as the tests of its results run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from csv_rows import csv_rows
from tiny_model import run_job


def probe(
    show: str | None = None, store: str = "store", layers: Any = None, **options: Any
) -> dict[str, Any]:
    """Run job=probe with these options; returns the content of probe.json."""
    keys = {} if layers is None else {"layers": layers}
    assert run_job("probe", store=store, device="cpu", probe=options, show=show, **keys) == 0
    found: dict[str, Any] = json.loads(Path(store, "probe.json").read_text())
    return found


def predictions(store: str = "store", **values: str) -> list[dict[str, str]]:
    """Lines of predictions.csv; with `values` those that have them."""
    return csv_rows(Path(store, "probe/predictions.csv"), **values)
