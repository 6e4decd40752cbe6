"""job=stats: mean and covariance of layers over a data set, without storing features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from featx.analysis.statistics.run import run_stats
from featx.analysis.statistics.session import FAILURES_CSV
from featx.analysis.statistics.stats_file import Statistics
from featx.base.console import print_result
from featx.base.text import facts, table
from featx.config.run_config import Config
from featx.config.saved_config import saved_yaml
from featx.config.schema import from_keywords, from_omegaconf, given_keywords, without_object
from featx.pipeline.row_failures import exit_code
from featx.pipeline.run_summary import seconds_text, trial_rows
from featx.sources import source_of


def stats(**keys: Any) -> Statistics:
    """Run job=stats from Python: the same keys as the command's, the same file.

        statistics = featx.stats(model="resnet50", layers=["avgpool"], data="photos/", out="runs/p")
        statistics["avgpool"].covariance()

    Args:
        keys: as of `featx.extract`; `stats` takes a mapping, such as `stats={"rows": "position"}`.

    Returns:
        The statistics, open for reading. Failed images are left out; see `stats-failures.csv`,
        also when there are more than `max_failures`.

    Raises:
        FeatxError: whatever the command would report with exit code 1 or 2.
    """
    keys, given = without_object(keys)
    node = from_keywords(keys)
    node.job.name = "stats"
    config = from_omegaconf(node, given_keywords(keys))
    source = None if given is None else source_of(given)
    summary = run_stats(config, saved_yaml(node), source)
    print_result(_text(summary))
    return Statistics(summary["file"])


def run(config: Config, config_yaml: str) -> int:
    """The command's job: take the statistics, say what they are, return the exit code."""
    summary = run_stats(config, config_yaml)
    print_result(json.dumps(summary, indent=2) if config.job.json else _text(summary))
    failures = Path(config.out) / FAILURES_CSV
    return exit_code(
        config,
        summary["rows"],
        summary["failures"],
        f"They are left out of the statistics; see {failures}.",
    )


_HEADER = (
    "layer", "rows", "features", "smallest", "largest", "mean", "std from", "to",
    "total variance", "effective rank", "in 10 / 50 / 100 directions",
)  # fmt: skip


def _text(summary: dict[str, Any]) -> str:
    """The table after the run, with three lines that use the result."""
    rate = summary["images_per_second"]
    rows = [
        ("images", f"{summary['rows']}, {summary['failures']} failed and left out"),
        ("images/s", f"{rate:.1f}" if rate else "nothing was left to do"),
        *trial_rows(summary),
        ("seconds", seconds_text(summary["seconds"])),
        *([("bound by", summary["bottleneck"])] if summary["bottleneck"] else []),
        ("memory", f"{summary['peak_memory_mib']} MiB at the peak"),
        ("file", summary["file"]),
    ]
    shown = table(_HEADER, [_cells(name, layer) for name, layer in summary["layers"].items()])
    distances = "".join(
        f"Fréchet distance of {layer}: {_number(distance)}\n"
        for layer, distance in summary["frechet"].items()
    )
    layer = next(iter(summary["layers"]))
    opening = (
        "import featx\n"
        f'stats = featx.open_stats("{summary["file"]}")\n'
        f'stats["{layer}"].mean      # (D,) float64; .covariance(), .second_moment, .count'
    )
    return f"{facts(rows)}\n\n{shown}\n{distances}\n{opening}"


def _cells(name: str, layer: dict[str, Any]) -> tuple[str, ...]:
    shares = [f"{100 * share:.1f} %" for share in (layer["first"] or {}).values()]
    numbers = ("smallest", "largest", "mean", "std_min", "std_max", "total_variance")
    return (
        name,
        str(layer["rows"]),
        str(layer["features"]),
        *(_number(layer[key]) for key in (*numbers, "effective_rank")),
        " / ".join(shares) or "-",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
