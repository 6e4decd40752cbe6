"""job=report: a store as one HTML page, to be opened or sent as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from featx.base.console import log_message, print_result
from featx.base.text import facts, size_text
from featx.config.run_config import Config
from featx.config.schema import from_keywords, from_omegaconf, given_keywords


def write_report(**keys: Any) -> Path:
    """Run job=report from Python: the same keys as the command's, the same page.

        featx.write_report(store="runs/p", out="p.html")

    Args:
        keys: `store`, `layers`, `out`, `seed`, `data` where the pictures lie elsewhere now, and
            `report` as a mapping.

    Returns:
        The HTML file.

    Raises:
        FeatxError: whatever the command would report with exit code 1 or 2.
    """
    from featx.export.report.run import run_report  # which imports torch

    node = from_keywords(keys)
    node.job.name = "report"
    return Path(run_report(from_omegaconf(node, given_keywords(keys)), log_message)["file"])


def run(config: Config, config_yaml: str) -> int:
    """The command's job: write the page and say where it is; returns the exit code."""
    from featx.export.report.run import run_report  # which imports torch

    summary = run_report(config, log_message)
    print_result(json.dumps(summary, indent=2) if config.job.json else _text(summary))
    return 0


def _text(summary: dict[str, Any]) -> str:
    pictures = str(summary["pictures"])
    if undecoded := summary["pictures_not_decoded"]:
        pictures += f"; {undecoded} cannot be decoded now"
    if why := summary["without_pictures"]:
        pictures = f"none: {why}"
    rows = [
        ("layers", ", ".join(summary["layers"])),
        ("rows", f"{summary['rows_looked_at']} looked at"),
        ("pictures", pictures),
        *([] if summary["complete"] else [("warning", "the store is not complete")]),
        ("seconds", f"{summary['seconds']:.1f}"),
        ("size", size_text(summary["bytes"])),
        ("file", summary["file"]),
    ]
    return facts(rows)
