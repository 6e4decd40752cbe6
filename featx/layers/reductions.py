"""Reductions: functions from a captured tensor to the stored row, computed on the device.

Each is registered under its name of the option `reduce`, with its options; torch is imported when
one of them runs. pca and whiten are bound by `featx.layers.projection`, which has their statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Lt

from featx.base import Member, Registry, for_options, sampled_positions
from featx.config import Count, ReduceConfig, options
from featx.errors import ConfigError, FeatxError, ReduceError
from featx.layers.row_layout import (
    Reduction,
    RowLayout,
    channels_last,
    check_tokens,
    map_view,
    mean,
    reduced_shape,
    token_grid,
)

if TYPE_CHECKING:
    import torch

OptionsT = TypeVar("OptionsT", bound=ReduceConfig)
Bind = Callable[[OptionsT, RowLayout], Reduction]
"""Function that returns a reduction for rows of one layout; raises a ReduceError if it does not
fit."""


@dataclass(frozen=True, kw_only=True)
class ReductionMember(Member):
    """A reduction as `register` makes it.

    Attributes:
        bind: returns its function for rows of one layout.
        reads_positions: whether its result depends on where positions lie in the image.
        gives_map: whether its result is a map (C, rows, columns) for every layer.
        needs_statistics: whether it is a projection, which `featx.layers.projection` binds.
    """

    bind: Callable[[ReduceConfig, RowLayout], Reduction]
    reads_positions: bool = False
    gives_map: bool = False
    needs_statistics: bool = False


REDUCTIONS: Registry[ReductionMember] = Registry("reduce", "featx.layers.reductions")
"""All reductions by their names."""


POOLED = ("avg", "max", "gem")
"""Reductions over positions, which leave a vector as it is."""


def register(
    name: str,
    help: str,
    options: type[OptionsT] = ReduceConfig,  # type: ignore[assignment]  # mypy issue 3737
    **flags: Any,
) -> Callable[[Bind[OptionsT]], Bind[OptionsT]]:
    """Decorator that registers the function `bind` of a reduction."""

    def add(bind: Bind[OptionsT]) -> Bind[OptionsT]:
        bound = for_options(f"reduce={name}", options, bind, "featx.config.make_reduce")
        own = None if options is ReduceConfig else options
        REDUCTIONS.register(ReductionMember(name, help, own, bind=bound, **flags))
        return bind

    return add


def reduction(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Return the function of a reduction for rows of one layout.

    Sums are computed in float32 for every dtype. Raises ReduceError if it does not fit this layout.
    """
    if config.name in POOLED and len(rows.shape) == 1:
        return lambda x: x  # a vector has no positions
    return REDUCTIONS.get(config.name).bind(config, rows)


def channel_axis(reduced: str, rows: RowLayout) -> int:
    """Return the axis of (B, *shape) that holds the features; other axes are positions.

    The rows have been `reduced` by the reduction of this name. Raises ReduceError if the axis
    cannot be determined.
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


@register("none", "The tensor as the layer gave it.")
def _none(config: ReduceConfig, rows: RowLayout) -> Reduction:
    return lambda x: x


@register("flatten", "All values of the tensor as one vector.")
def _flatten(config: ReduceConfig, rows: RowLayout) -> Reduction:
    return lambda x: x.reshape(len(x), -1)


_GEM_FLOOR = 1e-6
"""Smallest value that gem uses; smaller ones are raised to it."""


@options("reduce")
class GemOptions(ReduceConfig):
    """Options of reduce=gem."""

    name: str = "gem"
    p: Annotated[float, Ge(0.01), Lt(math.inf)] = 3.0
    """Exponent from 0.01: 1 is the mean, a large number comes near the maximum."""

    @property
    def args(self) -> dict[str, float | str]:
        return {"p": self.p}


@register("avg", "Mean over all positions.")
def _avg(config: ReduceConfig, rows: RowLayout) -> Reduction:
    axes = _pooled_axes("avg", rows)
    return lambda x: mean(x, axes)


@register("max", "Maximum over all positions.")
def _max(config: ReduceConfig, rows: RowLayout) -> Reduction:
    axes = _pooled_axes("max", rows)
    return lambda x: x.amax(axes)


@register("gem", "Generalised mean over all positions.", GemOptions)
def _gem(config: GemOptions, rows: RowLayout) -> Reduction:
    """Return the generalised mean over positions: (1/n sum max(x, 1e-6)^p)^(1/p).

    F. Radenovic, G. Tolias, O. Chum, Fine-tuning CNN Image Retrieval with No Human Annotation, IEEE
    TPAMI 41(7), 2019, equation 6. Here p is given, not learned.
    """
    axes, p = _pooled_axes("gem", rows), config.p

    def gem(x: torch.Tensor) -> torch.Tensor:
        values = x.float().clamp(min=_GEM_FLOOR)
        largest = values.amax(axes, keepdim=True)
        # Powers of the values themselves leave float32: 0.3^100 is 5e-53.
        means = (values / largest).pow(p).mean(axes)
        return means.pow(1 / p) * largest.amax(axes)

    return gem


def _pooled_axes(name: str, rows: RowLayout) -> tuple[int, ...]:
    if len(rows.shape) == 2:
        return (1,)
    if len(rows.shape) == 3:
        return (1, 2) if channels_last(f"reduce={name}", rows) else (2, 3)
    raise ReduceError(
        f"reduce={name} does not fit {rows.layer}: its rows have shape {rows.shape}, expected "
        "tokens (T, C) or a map (C, H, W).",
        f"Use none or flatten for this layer, for example 'layers={{{rows.layer}: none}}'.",
    )


@register("cls", "The class token.")
def _cls(config: ReduceConfig, rows: RowLayout) -> Reduction:
    check_tokens("cls", rows)
    if not rows.has_class_token:
        raise ReduceError(
            f"reduce=cls does not fit {rows.layer}: the {rows.num_prefix_tokens} tokens in front "
            "of this backbone's patch tokens are register tokens, and it has no class token.",
            "Use reduce=patch_avg, which leaves them out, or avg, none or flatten.",
        )
    return lambda x: x[:, 0]


@register("patch_avg", "Mean over the patch tokens, without class and register tokens.")
def _patch_avg(config: ReduceConfig, rows: RowLayout) -> Reduction:
    check_tokens("patch_avg", rows)
    num_prefix_tokens = rows.num_prefix_tokens
    return lambda x: mean(x[:, num_prefix_tokens:], (1,))


@register(
    "map",
    "The map (C, rows, columns) of a map or of patch tokens.",
    reads_positions=True,
    gives_map=True,
)
def _map(config: ReduceConfig, rows: RowLayout) -> Reduction:
    return map_view("map", rows)


@options("reduce")
class SizedOptions(ReduceConfig):
    """Options of a reduction that gives a map of a certain size."""

    size: Count | None = None
    """Number of rows and of columns of the result; null takes 2 for grid and 28 for align."""
    rows: Count | None = None
    """Number of rows of the result, with reduce.columns instead of reduce.size."""
    columns: Count | None = None
    """Number of columns of the result."""

    usual_size: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rows is None) != (self.columns is None):
            raise ConfigError(
                f"reduce={self.name}: give both of reduce.rows and reduce.columns, or reduce.size."
            )
        if self.rows is not None and self.size is not None:
            raise ConfigError(
                f"reduce.size={self.size} has no effect with reduce.rows and reduce.columns."
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        if self.rows is not None and self.columns is not None:
            return self.rows, self.columns
        return (self.size or self.usual_size,) * 2


@options("reduce")
class GridOptions(SizedOptions):
    """Options of reduce=grid."""

    name: str = "grid"
    usual_size = 2

    @property
    def args(self) -> dict[str, float | str]:
        rows, columns = self.sides
        return {"size": rows} if self.rows is None else {"rows": rows, "columns": columns}


@register(
    "grid",
    "Means over the cells of a grid of a map or of patch tokens.",
    GridOptions,
    reads_positions=True,
    gives_map=True,
)
def _grid(config: GridOptions, rows: RowLayout) -> Reduction:
    import torch.nn.functional as F

    cells, to_map = config.sides, map_view("grid", rows)
    _, num_rows, num_columns = reduced_shape(to_map, rows.shape)
    if num_rows < cells[0] or num_columns < cells[1]:
        option = "reduce.size" if config.rows is None else "reduce.rows and reduce.columns"
        raise ReduceError(
            f"reduce=grid does not fit {rows.layer}: {cells[0]} x {cells[1]} cells are more than "
            f"its {num_rows} x {num_columns} positions. Give a smaller {option}."
        )

    def grid(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(to_map(x).float(), cells)

    return grid


@options("reduce")
class AlignOptions(SizedOptions):
    """Options of reduce=align."""

    name: str = "align"
    pool: Count = 1
    """Side of the window that is averaged around each position before the map is resized; 3 for
    PatchCore."""

    usual_size = 28

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ConfigError(f"reduce.pool={self.pool}: expected an odd number above 0.")

    @property
    def args(self) -> dict[str, float | str]:
        rows, columns = self.sides
        return {"rows": rows, "columns": columns, "pool": self.pool}


@register(
    "align",
    "A map or patch tokens, resized to one grid for all layers.",
    AlignOptions,
    reads_positions=True,
    gives_map=True,
)
def _align(config: AlignOptions, rows: RowLayout) -> Reduction:
    """Return the map or patch tokens, averaged and resized, (B, C, rows, columns).

    The average is that of nn.AvgPool2d(pool, 1, pool // 2), in which zeros beyond the border count;
    the resize is bilinear with pixel centres (align_corners=False) and without antialiasing. This
    is the combination of K. Roth et al., Towards Total Recall in Industrial Anomaly Detection, CVPR
    2022, section 3.1, as anomalib computes it; anomalib takes the grid of the first layer, here it
    is given, so that each layer is stored by itself and any of them can be concatenated.
    """
    import torch.nn.functional as F

    to_map, size, pool = map_view("align", rows), config.sides, config.pool

    def align(x: torch.Tensor) -> torch.Tensor:
        values = to_map(x).float()
        if pool > 1:
            values = F.avg_pool2d(values, pool, stride=1, padding=pool // 2)
        if tuple(values.shape[2:]) == size:
            return values
        return F.interpolate(values, size, mode="bilinear", align_corners=False)

    return align


_DEFAULT_K = 16


@options("reduce")
class SampleOptions(ReduceConfig):
    """Options of reduce=sample."""

    name: str = "sample"
    k: Count | None = None
    """Number of tokens of each image; null takes 16."""
    candidates: Literal["patches", "all"] = "patches"
    """Tokens to choose from: patches, which leaves class and register tokens out, or all."""
    seed: Annotated[int, Ge(0), Lt(1 << 63)] = 0
    """Seed of the choice, which depends on it and on the key of the image alone."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of each image."""
        return _DEFAULT_K if self.k is None else self.k

    @property
    def args(self) -> dict[str, float | str]:
        return {"k": self.num_tokens, "candidates": self.candidates, "seed": self.seed}


@dataclass(frozen=True)
class TokenSample:
    """The function of reduce=sample for the rows of a layer, which depend on keys as well.

    Attributes:
        view: function from the tensor of the layer to (B, T, C) tokens.
        first: index of the first candidate on the token axis.
        num_candidates: number of tokens to choose from.
        grid: (rows, columns) of the candidates in the image; (0, 0) if they are no grid.
        k: number of tokens to choose.
        seed: seed of the choice.
    """

    view: Reduction
    first: int
    num_candidates: int
    grid: tuple[int, int]
    k: int
    seed: int

    def __call__(self, x: torch.Tensor, keys: Sequence[bytes] = ()) -> torch.Tensor:
        """Return (B, k, C) tokens in the order of the token axis."""
        import torch

        padded = [*keys, *[b""] * (len(x) - len(keys))]
        chosen = sampled_positions(padded, self.seed, self.num_candidates, self.k)
        tokens = self.view(x)
        places = torch.from_numpy(chosen + self.first).to(tokens.device, non_blocking=True)
        return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))

    @property
    def bound_args(self) -> dict[str, float | str]:
        """Candidates of the layer, from which positions follow; recorded with the options."""
        rows, columns = self.grid
        found: dict[str, float | str] = {"first": self.first, "num_candidates": self.num_candidates}
        return {**found, "rows": rows, "columns": columns} if rows else found


@register(
    "sample", "k tokens, or positions of a map, chosen by seed and key of the image.", SampleOptions
)
def _sample(config: SampleOptions, rows: RowLayout) -> Reduction:
    """Return k tokens per image; see `featx.base.sampled_positions`."""
    if len(rows.shape) not in (2, 3):
        raise ReduceError(
            f"reduce=sample does not fit {rows.layer}: its rows have shape {rows.shape}, expected "
            "tokens (T, C) or a map."
        )
    k = config.num_tokens
    sample = (_of_map if len(rows.shape) == 3 else _of_tokens)(config, rows)
    if k > sample.num_candidates:
        raise ReduceError(
            f"reduce=sample does not fit {rows.layer}: reduce.k={k} is more than its "
            f"{sample.num_candidates} tokens. Give a smaller reduce.k."
        )
    return sample


def _of_map(config: SampleOptions, rows: RowLayout) -> TokenSample:
    """Return the sample of the positions of a map, in row-major order."""
    to_map = map_view("sample", rows)
    _, num_rows, num_columns = reduced_shape(to_map, rows.shape)

    def view(x: torch.Tensor) -> torch.Tensor:
        return to_map(x).flatten(2).transpose(1, 2)

    grid = (num_rows, num_columns)
    return TokenSample(view, 0, num_rows * num_columns, grid, config.num_tokens, config.seed)


def _of_tokens(config: SampleOptions, rows: RowLayout) -> TokenSample:
    """Return the sample of the patch tokens, or of all tokens."""
    prefix = rows.num_prefix_tokens if config.candidates == "patches" else 0
    grid = token_grid(rows.shape[0], rows.input_size, prefix)
    if grid is None and config.candidates == "patches":
        raise ReduceError(
            f"reduce=sample does not fit {rows.layer}: its {rows.shape[0]} tokens are not {prefix} "
            "prefix tokens and a grid of patches. Choose from all tokens with "
            "reduce.candidates=all."
        )
    count = rows.shape[0] - prefix
    return TokenSample(lambda x: x, prefix, count, grid or (0, 0), config.num_tokens, config.seed)


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
        if not self.stats:
            raise ConfigError(
                f"reduce={self.name} needs reduce.stats=FILE, the stats.h5 that job=stats made."
            )

    @property
    def statistics_path(self) -> str:
        """Path of the statistics."""
        return str(self.stats)

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
        return {"epsilon": self.epsilon, "zca": self.zca}


def _unbound(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Raise a FeatxError: the statistics have not been read."""
    raise FeatxError(f"reduce={config.name} of {rows.layer} is bound without its statistics.")


register(
    "pca",
    "Projection on the principal components of the statistics of job=stats.",
    ProjectionOptions,
    needs_statistics=True,
)(_unbound)
register(
    "whiten",
    "Projection by the statistics of job=stats to uncorrelated values of variance 1.",
    WhitenOptions,
    needs_statistics=True,
)(_unbound)
