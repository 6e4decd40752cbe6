"""job=stats: mean and covariance of layers over a data set; stores no features."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from featx.base import (
    WIDTH,
    announcements,
    facts,
    is_notebook,
    percent_text,
    print_result,
    shown_path,
    table,
)
from featx.config import Config, StatsConfig
from featx.errors import counted
from featx.jobs.base import (
    JOBS,
    RUN_OPTIONS,
    Input,
    Job,
    call_of_job,
    print_summary,
    with_keywords,
)
from featx.jobs.keywords import StatsOptions
from featx.pipeline import exit_code

if TYPE_CHECKING:
    from featx.analysis.statistics import Statistics


@with_keywords(StatsOptions)
def stats(
    data: object = None, /, *, verbose: bool | None = None, **keys: Unpack[StatsOptions]
) -> Statistics:
    """Run job=stats from Python, with the options of the command and the same file.

        statistics = featx.stats("photos/", model="resnet50", layers=["avgpool"], out="runs/p")
        statistics["avgpool"].covariance()

    Args:
        data: as of `featx.extract`.
        verbose: as of `featx.extract`.
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

    is_verbose = not is_notebook() if verbose is None else verbose
    with call_of_job("stats", keys, data) as call, announcements(is_verbose):
        config, config_yaml, source = call
        summary = run_stats(config, config_yaml, source)
    if is_verbose:
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


_VALUES = ("layer", "rows", "features", "smallest", "largest", "mean", "std from", "to")
_SPREAD = (
    "layer", "total variance", "participation\nratio", "\nRankMe",
    "share of variance in\n10 / 50 / 100 directions",
)  # fmt: skip


def _text(summary: dict[str, Any]) -> str:
    """Format the result for people, with three lines of code that open it."""
    rate, limit = summary["images_per_second"], summary["bottleneck"]
    done_text = (
        f"Done: {counted(summary['rows'], 'image')}, {summary['failures']} failed and left out, "
        + (f"{rate:.1f} images/s." if rate else "nothing was left to do.")
        + (f" Limited by {limit}." if limit else "")
    )
    layers = summary["layers"].items()
    parts = [
        textwrap.fill(done_text, WIDTH),
        table(_VALUES, [_values(name, layer) for name, layer in layers]),
        table(_SPREAD, [_spread(name, layer) for name, layer in layers]),
    ]
    norms = [(name, layer["token_norms"]) for name, layer in layers if layer["token_norms"]]
    if norms:
        parts.append(_norms_table(norms))
    parts += [
        textwrap.fill(f"{name}: no norms of tokens, as {layer['no_token_norms']}", WIDTH)
        for name, layer in layers
        if layer["no_token_norms"]
    ]
    distances = [
        f"Fréchet distance of {layer}: {_number(distance)}"
        for layer, distance in summary["frechet"].items()
    ]
    path = shown_path(summary["file"])
    layer = next(iter(summary["layers"]))
    opening = (
        "import featx\n"
        f"stats = featx.open_stats({json.dumps(path, ensure_ascii=False)})\n"
        f"stats[{json.dumps(layer)}].mean\n"
        "# (D,) float64; also .covariance(), .second_moment, .count"
    )
    rows = facts([("file", path)])
    return "\n\n".join([*parts, *(["\n".join(distances)] if distances else []), rows, opening])


def _values(name: str, layer: dict[str, Any]) -> tuple[str, ...]:
    """Return one row of the table of values."""
    numbers = ("smallest", "largest", "mean", "std_min", "std_max")
    counts = (str(layer["rows"]), str(layer["features"]))
    return (name, *counts, *(_number(layer[key]) for key in numbers))


def _spread(name: str, layer: dict[str, Any]) -> tuple[str, ...]:
    """Return one row of the table of variances."""
    shares = [percent_text(share) for share in (layer["first"] or {}).values()]
    numbers = (_number(layer[key]) for key in ("total_variance", "participation_ratio", "rank_me"))
    return (name, *numbers, " / ".join(shares) or "-")


def _norms_table(layers: list[tuple[str, dict[str, Any]]]) -> str:
    """Format a table of the norms of tokens, with one row per layer."""
    rows = [
        (
            name,
            "{} x {}".format(*norms["grid"]),
            *(_number(norms[key]) for key in ("median", "p99", "largest", "threshold")),
            f"{_number(100 * norms['share'])} %",
            ", ".join(_number(each["mean"]) for each in norms["prefix"]) or "-",
        )
        for name, norms in layers
    ]
    header = (
        "layer",
        "patches",
        "norm of patches:\nmedian",
        "99 %",
        "largest",
        "outlier\nfrom",
        "share of\noutliers",
        "norm of\nprefix tokens",
    )
    return table(header, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


JOBS.register(
    Job(
        "stats",
        "Compute mean and covariance of layers over a data set; stores no features.",
        StatsConfig,
        run=run,
        input=Input.IMAGES,
        reads=(*RUN_OPTIONS, "job.json", "executor", "refresh", "log.metrics", "profile"),
        ignores=("dtype", "codec", "part_mib", "pack", "grow"),
        why="statistics are computed in float64 from the layer's values; no features are stored",
    )
)
