"""job=probe in this process, as the tests of its results run it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from csv_rows import csv_rows
from tiny_model import run_job

from featx.config import listed_stores


def probe(
    show: str | None = None, store: str = "store", layers: Any = None, **options: Any
) -> dict[str, Any]:
    """Run job=probe with these options; returns the content of probe.json of the first store."""
    keys = {} if layers is None else {"layers": layers}
    assert run_job("probe", store=store, device="cpu", probe=options, show=show, **keys) == 0
    found: dict[str, Any] = json.loads(Path(listed_stores(store)[0], "probe.json").read_text())
    return found


def given_split(keys: Iterable[str], splits: Iterable[str]) -> dict[str, str]:
    """Write a split file; returns the options that give it to a probe."""
    lines = [f"{key},{split}\n" for key, split in zip(keys, splits, strict=True)]
    Path("split.csv").write_text("key,split\n" + "".join(lines))
    return {"split": "split.csv"}


def predictions(store: str = "store", **values: str) -> list[dict[str, str]]:
    """Lines of predictions.csv; with `values` those that have them."""
    return csv_rows(Path(store, "probe/predictions.csv"), **values)
