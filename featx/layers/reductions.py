"""Reductions: functions from a captured tensor to the stored row, computed on the device.

The shape of a row decides what a reduction means: (C,) is a vector, (T, C) are tokens, (C, H, W) or
(H, W, C) is a map. Which of these two a map is follows from the proportions of the input. If they
do not tell, the reduction is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from featx.config import ReduceConfig
from featx.errors import ReduceError

Reduction = Callable[[torch.Tensor], torch.Tensor]
"""Function from the layer's tensor, (B, ...), to the stored rows, (B, ...)."""

VIEWS = frozenset({"none", "flatten", "cls"})
"""Reductions whose result may share memory with the layer's tensor."""

_GEM_FLOOR = 1e-6
"""Smallest value that gem uses; smaller ones are raised to it."""


def reduction(
    config: ReduceConfig,
    layer: str,
    row_shape: tuple[int, ...],
    input_size: tuple[int, int],
    num_prefix_tokens: int,
    has_class_token: bool = True,
) -> Reduction:
    """The function of a reduction for tensors of one shape.

    Sums are computed in float32 for every dtype.

    Args:
        config: name and parameters of the reduction.
        layer: name of the layer, for messages.
        row_shape: shape of the layer's tensor without the batch dimension.
        input_size: (height, width) of the backbone's input in pixels.
        num_prefix_tokens: number of class and register tokens of the backbone.
        has_class_token: whether the first of them is a class token.

    Raises:
        ReduceError: the reduction does not fit this shape.
    """
    name = config.name
    if name == "none":
        return lambda x: x
    if name == "flatten":
        return lambda x: x.reshape(len(x), -1)
    if name in ("avg", "max", "gem"):
        pool = {"avg": _avg, "max": _max, "gem": _gem(float(config.args.get("p", 3.0)))}[name]
        axes = _pooled_axes(name, layer, row_shape, input_size)
        return lambda x: pool(x, axes)
    if name in ("cls", "patch_avg"):
        _check_tokens(name, layer, row_shape, input_size, num_prefix_tokens)
        if name == "cls":
            if not has_class_token:
                raise ReduceError(
                    f"reduce=cls does not fit {layer}: the {num_prefix_tokens} tokens in front of "
                    "this backbone's patch tokens are register tokens, and it has no class token. "
                    "Use reduce=patch_avg, which leaves them out, or avg, none or flatten."
                )
            return lambda x: x[:, 0]
        return lambda x: _avg(x[:, num_prefix_tokens:], (1,))
    return _grid(int(config.args["size"]), layer, row_shape, input_size, num_prefix_tokens)


def _avg(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Mean over the axes, summed in float32."""
    return x.mean(axes, dtype=torch.float32)


def _max(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Maximum over the axes."""
    return x.amax(axes)


def _gem(p: float) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]:
    """Generalised mean: (1/n sum max(x, 1e-6)^p)^(1/p).

    F. Radenovic, G. Tolias, O. Chum, Fine-tuning CNN Image Retrieval with No Human Annotation, IEEE
    TPAMI 41(7), 2019, equation 6. Here p is given, not learned.
    """

    def gem(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        return x.float().clamp(min=_GEM_FLOOR).pow(p).mean(axes).pow(1 / p)

    return gem


def _pooled_axes(
    name: str, layer: str, row_shape: tuple[int, ...], input_size: tuple[int, int]
) -> tuple[int, ...]:
    """Axes of (B, *row_shape) that pooling removes.

    Raises:
        ReduceError: rows are neither tokens nor a map.
    """
    if len(row_shape) == 2:
        return (1,)
    if len(row_shape) == 3:
        last = channels_last(f"reduce={name}", layer, row_shape, input_size)
        return (1, 2) if last else (2, 3)
    raise ReduceError(
        f"reduce={name} does not fit {layer}: its rows have shape {row_shape}, expected tokens "
        "(T, C) or a map (C, H, W). Use none or flatten for this layer, for example "
        f"layers={{{layer}: none}}."
    )


def channels_last(
    asked: str, layer: str, row_shape: tuple[int, ...], input_size: tuple[int, int]
) -> bool:
    """Whether a map is (H, W, C) rather than (C, H, W).

    Args:
        asked: option that needs to know, such as 'reduce=avg', for messages.
        layer: name of the layer, for messages.
        row_shape: shape of the map, three dimensions.
        input_size: (height, width) of the backbone's input in pixels.

    Raises:
        ReduceError: it could be both, or neither.
    """
    height, width = input_size
    first = row_shape[0] * width == row_shape[1] * height
    last = row_shape[1] * width == row_shape[2] * height
    if first != last:
        return first
    which = "could be (C, H, W) or (H, W, C)" if first else "is no map of the input's proportions"
    raise ReduceError(
        f"{asked} does not fit {layer}: its row shape {row_shape} {which}, so its channels "
        "are unknown. Use its rows unreduced (reduce=none or flatten, "
        "stats.observation=image)."
    )


def channel_axis(
    reduced: str, layer: str, row_shape: tuple[int, ...], input_size: tuple[int, int]
) -> int:
    """The axis of (B, *row_shape) that holds the features; other axes are positions.

    Args:
        reduced: name of the reduction that made the rows.
        layer: name of the layer, for messages.
        row_shape: shape of a row after the reduction.
        input_size: (height, width) of the backbone's input in pixels.

    Raises:
        ReduceError: the axis cannot be determined.
    """
    if len(row_shape) == 1 or reduced == "grid":
        return 1
    if len(row_shape) == 2:
        return 2
    if len(row_shape) == 3:
        return 3 if channels_last("stats.observation=position", layer, row_shape, input_size) else 1
    raise ReduceError(
        f"stats.observation=position does not fit {layer}: its rows have shape {row_shape}, "
        "expected a vector, tokens (T, C) or a map (C, H, W). Use stats.observation=image."
    )


def positions_last(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Rearrange (B, ..., C, ...) to (B, P, C), one row for each of P positions.

    Args:
        x: features.
        axis: axis of x that holds the C features.
    """
    moved = x.movedim(axis, -1)
    return moved.reshape(len(x), -1, moved.shape[-1])


def token_grid(
    num_tokens: int, input_size: tuple[int, int], num_prefix_tokens: int
) -> tuple[int, int] | None:
    """(rows, columns) of the patch tokens, or None if they form no grid.

    Args:
        num_tokens: number of tokens, prefix included.
        input_size: (height, width) of the backbone's input in pixels.
        num_prefix_tokens: number of class and register tokens.
    """
    patches = num_tokens - num_prefix_tokens
    height, width = input_size
    for rows in range(1, patches + 1):
        columns = rows * width // height
        if rows * columns == patches and columns * height == rows * width:
            return rows, columns
    return None


def _check_tokens(
    name: str,
    layer: str,
    row_shape: tuple[int, ...],
    input_size: tuple[int, int],
    num_prefix_tokens: int,
) -> None:
    """Check that rows are prefix tokens and a grid of patch tokens.

    Raises:
        ReduceError: they are not, or reduce=cls is requested without a class token.
    """
    why = ""
    if len(row_shape) != 2:
        why = f"its rows have shape {row_shape}, expected tokens (T, C)"
    elif name == "cls" and num_prefix_tokens == 0:
        why = "this backbone has no class token in front of its patch tokens"
    elif token_grid(row_shape[0], input_size, num_prefix_tokens) is None:
        why = (
            f"its {row_shape[0]} tokens are not {num_prefix_tokens} prefix tokens and a grid of "
            "patches, so it has no class token where the backbone's last layers have one"
        )
    if why:
        raise ReduceError(f"reduce={name} does not fit {layer}: {why}. Try avg, none or flatten.")


def map_view(
    asked: str,
    layer: str,
    row_shape: tuple[int, ...],
    input_size: tuple[int, int],
    num_prefix_tokens: int,
) -> Reduction:
    """The function from a map or patch tokens, (B, *row_shape), to (B, C, rows, columns).

    Tokens are taken in row-major order; `featx.layers.position_checks` checks that they are.

    Args:
        asked: name of the reduction, for messages.
        layer: name of the layer, for messages.
        row_shape: shape of the layer's tensor without the batch dimension.
        input_size: (height, width) of the backbone's input in pixels.
        num_prefix_tokens: number of class and register tokens of the backbone.

    Raises:
        ReduceError: the rows are neither a map with the proportions of the input nor such tokens.
    """
    if len(row_shape) == 2:
        _check_tokens(asked, layer, row_shape, input_size, num_prefix_tokens)
        cells = token_grid(row_shape[0], input_size, num_prefix_tokens)
        assert cells is not None

        def to_map(x: torch.Tensor) -> torch.Tensor:
            patches = x[:, num_prefix_tokens:]
            return patches.transpose(1, 2).reshape(len(x), -1, *cells)

        return to_map
    if len(row_shape) != 3:
        raise ReduceError(
            f"reduce={asked} does not fit {layer}: its rows have shape {row_shape}, expected a map "
            "or patch tokens."
        )
    if channels_last(f"reduce={asked}", layer, row_shape, input_size):
        return lambda x: x.permute(0, 3, 1, 2)
    return lambda x: x


def has_known_positions(
    layer: str, row_shape: tuple[int, ...], input_size: tuple[int, int]
) -> bool:
    """Whether the shape alone shows where positions lie, as in a map (C, H, W) of convolutions.

    Tokens (T, C) may be in any order, and tokens in groups, (T, N, C), look like (H, W, C).

    Args:
        layer: name of the layer, for messages.
        row_shape: shape of a map or of tokens.
        input_size: (height, width) of the backbone's input in pixels.

    Raises:
        ReduceError: the rows could be (C, H, W) or (H, W, C), or neither.
    """
    return len(row_shape) == 3 and not channels_last("reduce=grid", layer, row_shape, input_size)


def _grid(
    size: int,
    layer: str,
    row_shape: tuple[int, ...],
    input_size: tuple[int, int],
    num_prefix_tokens: int,
) -> Reduction:
    """The reduction to means over size x size cells of a map or of patch tokens.

    The result is (B, C, size, size).
    """
    to_map = map_view("grid", layer, row_shape, input_size, num_prefix_tokens)
    # A meta tensor has a shape but no memory.
    rows, columns = to_map(torch.empty(1, *row_shape, device="meta")).shape[2:]
    if min(rows, columns) < size:
        raise ReduceError(
            f"reduce=grid does not fit {layer}: {size} x {size} cells are more than its "
            f"{rows} x {columns} positions. Give a smaller reduce.size."
        )
    return lambda x: F.adaptive_avg_pool2d(to_map(x).float(), size)
