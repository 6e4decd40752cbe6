"""Registry of reductions, and the function of a reduction for the rows of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from featx.base import Member, Registry, for_options
from featx.config import ReduceConfig
from featx.errors import ReduceError
from featx.layers.reductions.row_layout import Reduction, RowLayout, channels_last

OptionsT = TypeVar("OptionsT", bound=ReduceConfig)


@dataclass(frozen=True, kw_only=True)
class ReductionMember(Member):
    """A reduction as it is registered; made by `reduction_member`.

    Attributes:
        bind: returns its function for rows of one layout.
        is_view: whether its result may share memory with the layer's tensor.
        reads_positions: whether its result depends on where positions lie in the image.
        gives_map: whether its result is a map (C, rows, columns) for every layer.
        needs_statistics: whether it is a projection, which `featx.layers.projection` binds.
    """

    bind: Callable[[ReduceConfig, RowLayout], Reduction]
    is_view: bool = False
    reads_positions: bool = False
    gives_map: bool = False
    needs_statistics: bool = False


REDUCTIONS: Registry[ReductionMember] = Registry("reduce", "featx.layers.reductions")
"""All reductions by their names."""


def reduction_member(
    name: str,
    help: str,
    bind: Callable[[OptionsT, RowLayout], Reduction],
    options: type[OptionsT] = ReduceConfig,  # type: ignore[assignment]  # mypy issue 3737
    *,
    is_view: bool = False,
    reads_positions: bool = False,
    gives_map: bool = False,
    needs_statistics: bool = False,
) -> ReductionMember:
    """Describe a reduction for `REDUCTIONS.register`.

    Args:
        name: value of the option `reduce` that selects the reduction.
        help: one sentence for `--help`.
        bind: returns the function for rows of one layout; raises a ReduceError if it does not fit.
        options: dataclass of its options, `ReduceConfig` or a subclass.
        is_view: see `ReductionMember`.
        reads_positions: see `ReductionMember`.
        gives_map: see `ReductionMember`.
        needs_statistics: see `ReductionMember`.
    """
    return ReductionMember(
        name,
        help,
        None if options is ReduceConfig else options,
        bind=for_options(f"reduce={name}", options, bind, "featx.config.make_reduce"),
        is_view=is_view,
        reads_positions=reads_positions,
        gives_map=gives_map,
        needs_statistics=needs_statistics,
    )


def reduction(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Return the function of a reduction for rows of one layout.

    Sums are computed in float32 for every dtype.

    Args:
        config: options of the reduction.
        rows: layout of the layer's rows.

    Raises:
        ReduceError: the reduction does not fit this layout.
    """
    return REDUCTIONS.get(config.name).bind(config, rows)


def channel_axis(reduced: str, rows: RowLayout) -> int:
    """Return the axis of (B, *shape) that holds the features; other axes are positions.

    Args:
        reduced: name of the reduction that made the rows.
        rows: layout of the rows after the reduction.

    Raises:
        ReduceError: the axis cannot be determined.
    """
    if len(rows.shape) == 1 or REDUCTIONS.get(reduced).gives_map:
        return 1
    if len(rows.shape) == 2:
        return 2
    if len(rows.shape) == 3:
        return 3 if channels_last("stats.observation=position", rows) else 1
    raise ReduceError(
        f"stats.observation=position does not fit {rows.layer}: its rows have shape {rows.shape}, "
        "expected a vector, tokens (T, C) or a map (C, H, W). Use stats.observation=image."
    )
