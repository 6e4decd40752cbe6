"""job=predict: a probe's head on new pictures, as a CSV file."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base.console import log_message, print_result
from featx.base.text import facts
from featx.config.run_config import Config
from featx.errors import ConfigError
from featx.pipeline.row_failures import exit_code
from featx.pipeline.run_summary import trial_rows
from featx.storage.local_folder import AtomicFolder
from featx.storage.s3_path import parse_path

if TYPE_CHECKING:
    from featx.analysis.prediction import Predictions

PREDICTIONS_CSV = "predictions.csv"
COLUMNS = ("key", "class", "probability", "status", "reason")


def run(config: Config, config_yaml: str) -> int:
    """Classify the pictures, write the file, say what came out; returns the exit code."""
    from featx.analysis.prediction import head_of_store, run_prediction  # which import torch

    assert config.store is not None, "the config was checked"
    layer = config.layers
    if isinstance(layer, list | tuple) and len(layer) == 1:
        layer = layer[0]
    if not isinstance(layer, str | None):
        raise ConfigError(f"layers={layer}: job=predict uses the head of one layer.")
    head = head_of_store(parse_path(config.store), layer)
    log_message(f"head        {head}")
    found = run_prediction(config, head)
    disk = AtomicFolder(Path(config.out).expanduser())
    disk.make_folder(disk.root)
    path = disk.root / PREDICTIONS_CSV
    disk.replace_unlocked(path, predictions_csv(found))
    summary = _summary(found, path)
    print_result(json.dumps(summary, indent=1) if config.job.json else _text(summary))
    return exit_code(
        config, summary["rows"], summary["failures"], f"They have their reason in {path}."
    )


def predictions_csv(found: Predictions) -> bytes:
    """The whole file: a line a picture, failed ones with their reason and no class."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    for row in found.rows:
        probability = "" if row.probability is None else f"{row.probability:.6f}"
        writer.writerow([row.key, row.label or "", probability, row.status, row.reason])
    return buffer.getvalue().encode("utf-8", "surrogateescape")


def _summary(found: Predictions, path: Path) -> dict[str, Any]:
    counts = Counter(row.label for row in found.rows if row.label is not None)
    figures = found.figures.as_dict()
    speed = (
        "images_per_second", "trial_images_per_second", "share_of_trial", "below_trial",
    )  # fmt: skip
    return {
        "rows": len(found),
        "failures": len(found) - sum(counts.values()),
        "classes": dict(counts.most_common()),
        **{name: figures[name] for name in speed},
        "file": str(path),
    }


def _text(summary: dict[str, Any]) -> str:
    counts = [f"{count} {name}" for name, count in summary["classes"].items()]
    shown = ", ".join(counts[:10]) + (", ..." if len(counts) > 10 else "")
    return facts(
        [
            ("images", f"{summary['rows']}, {summary['failures']} failed"),
            ("classes", shown or "none"),
            ("images/s", f"{summary['images_per_second'] or 0:.1f}"),
            *trial_rows(summary),
            ("file", summary["file"]),
        ]
    )
