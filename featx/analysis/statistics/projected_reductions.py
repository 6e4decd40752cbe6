"""Reductions reduce=pca and reduce=whiten, made from the statistics of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.analysis.statistics.covariance import principal_components, rank_of, whitening
from featx.analysis.statistics.reader import Statistics
from featx.analysis.value_settings import refuse_changes
from featx.config import GRADIENTS, Config, ReduceConfig, reduction_of_args
from featx.errors import ConfigError, ReduceError, counted
from featx.layers import (
    REDUCTIONS,
    CapturePoint,
    ProjectedReduce,
    Projection,
    ProjectionOptions,
    WhitenOptions,
)
from featx.models import Backbone

if TYPE_CHECKING:
    from featx.layers import ChosenLayers


def with_statistics(
    chosen: Sequence[tuple[CapturePoint, ReduceConfig]], config: Config, backbone: Backbone
) -> ChosenLayers:
    """Add the statistics that pca and whiten need to the chosen layers."""
    return [
        (
            point,
            _projected_reduce(point, reduce, config, backbone)
            if isinstance(reduce, ProjectionOptions)
            else reduce,
        )
        for point, reduce in chosen
    ]


def _projected_reduce(
    point: CapturePoint, reduce: ProjectionOptions, config: Config, backbone: Backbone
) -> ProjectedReduce:
    statistics = Statistics(reduce.statistics_path)
    moments, about = statistics.layer(point.name)
    _refuse_another_tensor(statistics.path, about, point, config, backbone)
    try:
        if isinstance(reduce, WhitenOptions):
            projection = whitening(moments, reduce.k, reduce.epsilon, reduce.zca)
            _refuse_arbitrary_directions(projection, moments.dim, reduce.zca)
        else:
            projection = principal_components(moments, reduce.k or moments.dim)
    except ConfigError as error:
        raise ReduceError(
            f"reduce={reduce.name} of {point.name} by {statistics.path}: {error}"
        ) from error
    first = first_reduction(about)
    first_text = " ".join([first.name, *(f"{key}={value:g}" for key, value in first.args.items())])
    args = {
        "first": first_text,
        "rows": about["row"],
        "k": len(projection.explained_variance),
        **reduce.args,
        "stats_sha256": moments.sha256,
    }
    by_position = about["row"] == "position"
    return ProjectedReduce(reduce.name, args, first, tuple(about["shape"]), by_position, projection)


def first_reduction(about: dict[str, Any]) -> ReduceConfig:
    """Return the reduction that was applied before a layer's statistics were computed."""
    if about["reduce"] == "sample":
        raise ReduceError(
            f"these statistics of {about['layer']} are of tokens that reduce=sample chose; a "
            "projection cannot be applied after it. Take them of the layer itself."
        )
    if REDUCTIONS.get(about["reduce"]).needs_statistics:
        raise ReduceError(
            f"these statistics of {about['layer']} are of projected values (reduce="
            f"{about['reduce']}), which cannot be projected again. Take them of the layer itself."
        )
    prefix = "reduce_"
    args = {key.removeprefix(prefix): about[key] for key in about if key.startswith(prefix)}
    return reduction_of_args(about["reduce"], args)


def _refuse_another_tensor(
    path: Path, about: dict[str, object], point: CapturePoint, config: Config, backbone: Backbone
) -> None:
    """Check that statistics were computed from the same tensor as is captured now."""
    now: dict[str, object] = {
        "layer": point.layer,
        "capture": point.capture,
        "weights_sha256": backbone.weights_sha256,
        "transform": backbone.preprocess.describe(),
    }
    stored = {key: about[key] for key in now}
    if point.capture in GRADIENTS:
        now["target"], stored["target"] = config.target, about["target"]
    refuse_changes(
        {key: (stored[key], now[key]) for key in now},
        "the statistics have {!r}, now {!r}",
        f"{path} has statistics of other values than {point.name} gives here",
        "Take them with job=stats and this model.",
    )


def _refuse_arbitrary_directions(projection: Projection, dim: int, zca: bool) -> None:
    """Check that all directions have variance; those without differ between machines.

    Exception: with zca and all directions, the map does not depend on how they are chosen.
    """
    variances = projection.explained_variance
    rank = rank_of(variances, dim)
    if rank < len(variances) and not (zca and len(variances) == dim):
        raise ConfigError(
            f"k is {len(variances)}, but the rows vary in {counted(rank, 'direction')} only; which "
            f"others there are is arbitrary. Give reduce.k={rank} or less, or reduce.zca=true and "
            "no reduce.k."
        )
