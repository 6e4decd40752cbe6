"""job=export: a store in another format, with its rows, their order and their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from featx.base.console import print_result
from featx.config.run_config import Config
from featx.config.schema import from_keywords, from_omegaconf, given_keywords
from featx.export.run import describe_export, run_export


def export_store(**keys: Any) -> Path:
    """Run job=export from Python: the same keys as the command's, the same files.

        featx.export_store(store="runs/p", export={"format": "parquet"}, out="exports/p")

    Args:
        keys: `store`, `layers`, `out`, `overwrite`, and `export` as a mapping.

    Returns:
        The folder of the export.

    Raises:
        FeatxError: whatever the command would report with exit code 1 or 2.
    """
    node = from_keywords(keys)
    node.job.name = "export"
    return Path(run_export(from_omegaconf(node, given_keywords(keys)))["folder"])


def run(config: Config, config_yaml: str) -> int:
    """The command's job: write the export and say how it is opened; returns the exit code."""
    summary = run_export(config)
    print_result(json.dumps(summary, indent=2) if config.job.json else describe_export(summary))
    return 0
