"""job=stats: mean and covariance of layers over a data set; stores no features."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from featx.base import (
    WIDTH,
    Section,
    Table,
    announcements,
    as_text,
    is_notebook,
    percent_text,
    print_result,
    shown_path,
)
from featx.config import Config, StatsConfig, given_by_value
from featx.errors import ConfigError, counted
from featx.jobs.base import JOBS, RUN_OPTIONS, Input, Job, call_of_job, print_summary, with_keywords
from featx.jobs.keywords import StatsOptions
from featx.pipeline import exit_code
from featx.types import Json, Source

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
        stats: a mapping, such as `{"observation": "position"}`; the other keywords are as of
            `featx.extract`.

    Returns:
        The statistics, open for reading. Failed images are left out; see `stats-failures.csv`,
        also when there are more than `max_failures`.

    Raises:
        FeatxError: an error that the command would report with exit code 1 or 2.
    """
    from featx.analysis.statistics import Statistics

    is_verbose = not is_notebook() if verbose is None else verbose
    with call_of_job("stats", keys, data) as call, announcements(is_verbose):
        summary = _compute(*call)
    if is_verbose:
        print_result(as_text(*_sections(summary)))
    return Statistics(summary["file"])


def run(config: Config, config_yaml: str) -> int:
    """Compute the statistics and print a summary; returns the exit code."""
    from featx.analysis.statistics import FAILURES_CSV

    summary = _compute(config, config_yaml)
    print_summary(config, summary, *_sections(summary))
    if config.store is not None:
        return 0
    failures = Path(config.out) / FAILURES_CSV
    return exit_code(
        config,
        summary["rows"],
        summary["failures"],
        f"They are left out of the statistics; see {failures}.",
    )


def _compute(config: Config, config_yaml: str, source: Source | None = None) -> Json:
    from featx.analysis.statistics import run_stats, stats_of_store  # which import torch

    if config.store is not None:
        return stats_of_store(config)
    return run_stats(config, config_yaml, source)


_VALUES = ("layer", "rows", "features", "smallest", "largest", "mean", "std from", "to")
_NORMS = (
    "layer", "patches", "norm of patches:\nmedian", "99 %", "largest", "outlier\nfrom",
    "share of\noutliers", "norm of\nprefix tokens",
)  # fmt: skip
_SPREAD = (
    "layer", "total variance", "participation\nratio", "\nRankMe",
    "share of variance in\n10 / 50 / 100 directions",
)  # fmt: skip


def _sections(summary: Json) -> list[Section]:
    done_text = (
        f"Done: {counted(summary['rows'], 'image')}, {summary['failures']} failed and left out"
    )
    if "images_per_second" in summary:  # of a run over images, not of a store
        rate = summary["images_per_second"]
        done_text += f", {rate:.1f} images/s" if rate else ", nothing was left to do"
    limit = summary.get("bottleneck")
    done_text += f". Limited by {limit}." if limit else "."
    layers = summary["layers"]
    numbers = ("smallest", "largest", "mean", "std_min", "std_max")
    values = [
        (
            name,
            str(about["rows"]),
            str(about["features"]),
            *(_number(about[key]) for key in numbers),
        )
        for name, about in layers.items()
    ]
    of_variance = ("total_variance", "participation_ratio", "rank_me")
    spreads = []
    for name, about in layers.items():
        shares = " / ".join(percent_text(share) for share in (about["first"] or {}).values())
        spreads.append((name, *(_number(about[key]) for key in of_variance), shares or "-"))
    sections: list[Section] = [
        textwrap.fill(done_text, WIDTH), Table(_VALUES, values), Table(_SPREAD, spreads),
    ]  # fmt: skip
    norms = [
        (
            name,
            "{} x {}".format(*norms["grid"]),
            *(_number(norms[key]) for key in ("median", "p99", "largest", "threshold")),
            "-" if norms["share"] is None else f"{_number(100 * norms['share'])} %",
            ", ".join(_number(each["mean"]) for each in norms["prefix"]) or "-",
        )
        for name, about in layers.items()
        if (norms := about["token_norms"])
    ]
    if norms:
        sections.append(Table(_NORMS, norms))
    sections += [
        textwrap.fill(f"{name}: no norms of tokens, as {about['no_token_norms']}", WIDTH)
        for name, about in layers.items()
        if about["no_token_norms"]
    ]
    distances = [
        f"Fréchet distance of {layer}: {_number(distance)}"
        for layer, distance in summary["frechet"].items()
    ]
    if distances:
        sections.append("\n".join(distances))
    path = shown_path(summary["file"])
    opening = (
        "import featx\n"
        f"stats = featx.open_stats({json.dumps(path, ensure_ascii=False)})\n"
        f"stats[{json.dumps(next(iter(layers)))}].mean\n"
        "# (D,) float64; also .covariance(), .second_moment, .count"
    )
    return [*sections, [("file", path)], opening]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


_READ_WITH_STORE = ("job", "log", "store", "layers", "stats", "device", "overwrite")
"""Options and groups that job=stats store=DIR reads."""


def _check(config: Config) -> None:
    """Refuse windows, and options of a run with the rows of a store."""
    if config.store is None:
        if config.model.window.size is not None:
            raise ConfigError(
                "model.window.size does not go with the images of job=stats, whose layers are "
                "summed as the model gives them. Make a store with windows, and sum its rows with "
                "job=stats store=DIR."
            )
        return
    for name in sorted(given_by_value(config)):
        if name.partition(".")[0] not in _READ_WITH_STORE:
            raise ConfigError(
                f"{name} has no effect with job=stats store={config.store}: the rows of the store "
                "are summed as they are, and stats.h5 is written into its folder."
            )


JOBS.register(
    Job(
        "stats",
        "Compute mean and covariance of layers over a data set; stores no features.",
        StatsConfig,
        run=run,
        input=Input.IMAGES,
        reads=(*RUN_OPTIONS, "store", "job.json", "executor", "refresh", "log.metrics", "profile"),
        ignores=("dtype", "codec", "pack", "grow"),
        check=_check,
        why="statistics are computed in float64 from the layer's values; no features are stored",
    )
)
