"""job=probe in this process, as the tests of its results run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_model import run_job


def probe(show: str | None = None, store: str = "store", **options: Any) -> dict[str, Any]:
    """Run job=probe with these options; returns the content of probe.json."""
    assert run_job("probe", store=store, device="cpu", probe=options, show=show) == 0
    found: dict[str, Any] = json.loads(Path(store, "probe.json").read_text())
    return found
