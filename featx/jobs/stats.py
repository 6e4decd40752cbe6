"""job=stats: mean and covariance of layers over a data set; stores no features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from featx.base import facts, print_result, table
from featx.config import Config, StatsConfig, without_object
from featx.jobs.base import (
    JOBS,
    RUN_OPTIONS,
    Input,
    Job,
    config_of_call,
    print_summary,
    with_keywords,
)
from featx.jobs.keywords import StatsOptions
from featx.pipeline import exit_code, seconds_text, trial_rows
from featx.sources import source_of

if TYPE_CHECKING:
    from featx.analysis.statistics import Statistics


@with_keywords(StatsOptions)
def stats(**keys: Unpack[StatsOptions]) -> Statistics:
    """Run job=stats from Python, with the options of the command and the same file.

        statistics = featx.stats(model="resnet50", layers=["avgpool"], data="photos/", out="runs/p")
        statistics["avgpool"].covariance()

    Args:
        keys: as of `featx.extract`; `stats` takes a mapping, such as
            `stats={"observation": "position"}`.

    Returns:
        The statistics, open for reading. Failed images are left out; see `stats-failures.csv`,
        also when there are more than `max_failures`.

    Raises:
        FeatxError: an error that the command would report with exit code 1 or 2.
    """
    from featx.analysis.statistics import (
        Statistics,
        run_stats,  # which imports torch
    )

    options, given = without_object(keys)
    config, config_yaml = config_of_call("stats", options)
    source = None if given is None else source_of(given)
    summary = run_stats(config, config_yaml, source)
    print_result(_text(summary))
    return Statistics(summary["file"])


def run(config: Config, config_yaml: str) -> int:
    """Compute the statistics and print a summary; returns the exit code."""
    from featx.analysis.statistics import (
        FAILURES_CSV,
        run_stats,  # which imports torch
    )

    summary = run_stats(config, config_yaml)
    print_summary(config, summary, _text(summary))
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
    """Format the result for people, with three lines of code that open it."""
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
    """Return one row of the table of layers."""
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


JOBS.register(
    Job(
        "stats",
        "Compute mean and covariance of layers over a data set; stores no features.",
        StatsConfig,
        run=run,
        input=Input.IMAGES,
        reads=(*RUN_OPTIONS, "job.json", "executor", "refresh", "profile"),
        ignores=("dtype", "codec", "pack", "grow"),
        why="statistics are computed in float64 from the layer's values; no features are stored",
    )
)
