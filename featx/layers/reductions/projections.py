"""Reductions pca and whiten: their options. `featx.layers.projection` computes them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

from annotated_types import Ge, Lt

from featx.config import Count, ReduceConfig, options
from featx.errors import ConfigError, FeatxError
from featx.layers.reductions.registry import REDUCTIONS, reduction_member
from featx.layers.reductions.row_layout import Reduction, RowLayout


@options("reduce")
class ProjectionOptions(ReduceConfig):
    """Options of reduce=pca, and those that whiten shares with it."""

    name: str = "pca"
    stats: str | None = None
    """stats.h5 of job=stats, or its folder. The reduction that the statistics were computed after
    is applied first."""
    k: Count | None = None
    """Number of directions to keep, those of largest variance; null keeps all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_statistics_path()

    @property
    def statistics_path(self) -> str:
        """Path of the statistics.

        Raises:
            ConfigError: it is not given.
        """
        self._check_statistics_path()
        return str(self.stats)

    def _check_statistics_path(self) -> None:
        """Raise a ConfigError if the path of the statistics is not given."""
        if not self.stats:
            raise ConfigError(
                f"reduce={self.name} needs reduce.stats=FILE, the stats.h5 that job=stats made."
            )

    def with_statistics_path(self, path: str) -> ProjectionOptions:
        """Return a copy that reads the statistics from another path."""
        return replace(self, stats=path)


@options("reduce")
class WhitenOptions(ProjectionOptions):
    """Options of reduce=whiten."""

    name: str = "whiten"
    epsilon: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    """Number that is added to each variance, in the unit of the variances, so that noise is not
    amplified."""
    zca: bool = False
    """Rotate the result back into the axes of the features."""

    @property
    def args(self) -> dict[str, float | str]:
        """Addend and rotation."""
        return {"epsilon": self.epsilon, "zca": self.zca}


def _unbound(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Raise a FeatxError: the statistics have not been read."""
    raise FeatxError(f"reduce={config.name} of {rows.layer} is bound without its statistics.")


REDUCTIONS.register(
    reduction_member(
        "pca",
        "Projection on the principal components of the statistics of job=stats.",
        _unbound,
        ProjectionOptions,
        needs_statistics=True,
    )
)
REDUCTIONS.register(
    reduction_member(
        "whiten",
        "Projection by the statistics of job=stats to uncorrelated values of variance 1.",
        _unbound,
        WhitenOptions,
        needs_statistics=True,
    )
)
