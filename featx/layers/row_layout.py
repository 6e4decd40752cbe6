"""Layout of a layer's rows: which of its dimensions are channels, and where its positions lie.

(C,) is a vector, (T, C) are tokens, (C, H, W) or (H, W, C) is a map. A map of the shape that a
convolution of the model returns is (C, H, W); if its three sides are equal, a pass at another size
of the input has to show it. Otherwise the proportions of the input tell which of the two it is; if
they do not, the reduction is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from featx.config import CAPTURES
from featx.errors import ReduceError
from featx.types import LayerSpec, TokenGeometry

if TYPE_CHECKING:
    import torch

    from featx.layers.tracer import Trace
    from featx.models import Backbone

Reduction: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Function from the layer's tensor, (B, ...), to the stored rows, (B, ...)."""


@dataclass(frozen=True)
class RowLayout:
    """Shape of a layer's rows, and what is known about their dimensions.

    Attributes:
        layer: name of the layer, for messages.
        shape: shape of the tensor without the batch dimension.
        input_size: (height, width) of the backbone's input in pixels.
        num_prefix_tokens: number of class and register tokens of the backbone.
        has_class_token: whether the first of them is a class token.
        is_map: whether the rows are known to be (C, H, W), whatever their proportions.
        is_attention: whether the values are attention weights (heads, T, S); None if not known,
            then the name tells.
    """

    layer: str
    shape: tuple[int, ...]
    input_size: tuple[int, int]
    num_prefix_tokens: int = 0
    has_class_token: bool = True
    is_map: bool = False
    is_attention: bool | None = None


def channels_last(option: str, rows: RowLayout) -> bool:
    """Return whether a map is (H, W, C) rather than (C, H, W).

    Raises ReduceError, in the name of an option such as 'reduce=avg', if it could be both or
    neither, and for attention weights.
    """
    is_attention = rows.is_attention
    if is_attention is None:
        is_attention = re.search(r":attention$|\bsoftmax(_\d+)?(:\w+)?$", rows.layer) is not None
    # The products before the softmax show by a number of tokens that is no size of a map: 197 at an
    # input of 224 pixels.
    _, height, width = rows.shape
    prefix, size = rows.num_prefix_tokens, rows.input_size
    if prefix > 0 and height == width and token_grid(height, size, prefix) is not None:
        is_attention |= size[0] % height > 0

    if rows.is_map and not is_attention:
        return False
    first, last = map_layouts(rows.shape, rows.input_size)
    if first != last and not is_attention:
        return first
    which = "could be (C, H, W) or (H, W, C)" if first else "is no map of the input's proportions"
    if is_attention:
        which = "is that of attention weights (heads, T, S), no map"
    advice = "Leave the layer out with layers=."
    if option.startswith("reduce="):
        advice = f"Use none or flatten for this layer, for example 'layers={{{rows.layer}: none}}'."
    elif option == "stats.observation=position":
        advice = f"Use stats.observation=image. {advice}"
    raise ReduceError(
        f"{option} does not fit {rows.layer}: its row shape {rows.shape} {which}, so its channels "
        "are unknown.",
        advice,
    )


def map_layouts(shape: tuple[int, ...], input_size: tuple[int, int]) -> tuple[bool, bool]:
    """Return whether rows may be maps (H, W, C), and (C, H, W), by the proportions of the input."""
    for has_size in (is_map_size, is_rounded_map_size):
        first, last = has_size(shape[:2], input_size), has_size(shape[1:], input_size)
        if first or last:
            break
    if first and not last and input_size[0] % shape[0]:
        # Channels and rows may have the proportions by chance, such as 40 channels of 50 x 62
        # positions at 100 x 125 pixels. Rows that divide the input are taken for a stride.
        last = is_rounded_map_size(shape[1:], input_size)
    return first, last


def is_known_map(shape: tuple[int, ...], input_size: tuple[int, int], trace: Trace | None) -> bool:
    """Return whether rows have the shape of a map (C, H, W) that a convolution or the like of the
    model returns, and the proportions of the input.
    """
    if trace is None or len(shape) != 3 or shape not in trace.map_shapes:
        return False
    if is_cube(shape):  # (96, 96, 96) of ConvNeXt-T at 384 pixels is the shape of both layouts
        return shape in (trace.known_cubes or ())
    return _has_proportions(shape[1:], input_size)


def is_cube(shape: tuple[int, ...]) -> bool:
    """Return whether rows have three equal sides, which tell nothing about their order."""
    return len(shape) == 3 and len(set(shape)) == 1


def size_beside(input_size: tuple[int, int]) -> tuple[int, int]:
    """Return another size of the input, at which `cubes_of_maps` takes the second trace.

    It is smaller, its sides have another ratio, and strides up to 32 divide them where possible.
    """
    height, width = input_size[0] * 3 // 4, input_size[1] // 2
    return height - (height > 64) * height % 32, width - (width > 64) * width % 32


def cubes_of_maps(
    trace: Trace, other: Trace, other_size: tuple[int, int]
) -> frozenset[tuple[int, ...]]:
    """Return the cubes among `trace.map_shapes` that are (C, H, W) wherever they occur in a trace.

    They are so if a pass at another size of the input keeps their first side, and changes the other
    two to the proportions of that size. (H, W, C), and tokens in groups, keep their last side.

    Args:
        trace: trace at the size of the backbone.
        other: trace at another size.
        other_size: (height, width) of that.
    """
    if [(c.module, c.number) for c in trace.calls] != [(c.module, c.number) for c in other.calls]:
        return frozenset()
    others = {operation.name: operation.outputs for operation in other.operations}
    pairs = [(each.outputs, others.get(each.name, {})) for each in trace.operations]
    for one, two in zip(trace.calls, other.calls, strict=True):
        pairs += [(one.outputs, two.outputs), (one.inputs, two.inputs)]
        pairs += [(one.attention, two.attention)]
    turned = set()
    for shapes, other_shapes in pairs:
        for path, shape in shapes.items():
            rows, sides = shape[1:], other_shapes.get(path, ())[2:]
            keeps_channels = other_shapes.get(path, ())[1:2] == rows[:1]
            is_resized = len(sides) == 2 and not set(rows) & set(sides)
            if not (keeps_channels and is_resized and _has_proportions(sides, other_size)):
                turned.add(rows)
    return frozenset(filter(is_cube, trace.map_shapes - turned))


def _has_proportions(sides: tuple[int, ...], input_size: tuple[int, int]) -> bool:
    """Return whether (rows, columns) have the proportions of the input, to within 1."""
    return is_map_size(sides, input_size) or is_rounded_map_size(sides, input_size)


def is_heat_map(shape: tuple[int, ...], capture: str) -> bool:
    """Return whether rows are heat maps (H, W) of job=attribute, which have no channels, and not
    tokens (T, C)."""
    return len(shape) == 2 and capture not in CAPTURES


def is_map_size(sides: tuple[int, ...], input_size: tuple[int, int]) -> bool:
    """Return whether (rows, columns) have the proportions of the input."""
    return sides[0] * input_size[1] == sides[1] * input_size[0]


def is_rounded_map_size(sides: tuple[int, ...], input_size: tuple[int, int]) -> bool:
    """Return whether (rows, columns) are the sides of the input over one number, to within 1.

    A stride that does not divide the sides rounds them: 200 x 300 pixels become 7 x 10 positions.
    A square stays square.
    """
    (rows, columns), (height, width) = sides, input_size
    is_near = height * (columns - 1) < width * (rows + 1)
    return height != width and is_near and width * (rows - 1) < height * (columns + 1)


def positions_last(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Rearrange (B, ..., C, ...), with C at `axis`, to (B, P, C): one row for each position."""
    moved = x.movedim(axis, -1)
    return moved.reshape(len(x), -1, moved.shape[-1])


def mean(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Return the mean over the axes, summed in float32."""
    import torch

    return x.mean(axes, dtype=torch.float32)


def reduced_shape(function: Reduction, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a row of a shape after a reduction."""
    import torch

    # A meta tensor has a shape but no memory.
    return tuple(function(torch.empty(1, *shape, device="meta")).shape[1:])


def token_grid(
    num_tokens: int, input_size: tuple[int, int], num_prefix_tokens: int
) -> tuple[int, int] | None:
    """Return (rows, columns) of the patch tokens, or None if they form no grid."""
    patches = num_tokens - num_prefix_tokens
    height, width = input_size
    for rows in range(1, patches + 1):
        columns = rows * width // height
        if rows * columns == patches and is_map_size((rows, columns), input_size):
            return rows, columns
    return None


def check_tokens(name: str, rows: RowLayout) -> tuple[int, int]:
    """Check that rows are prefix tokens and a grid of patch tokens."""
    why, cells = "", None
    if len(rows.shape) != 2:
        why = f"its rows have shape {rows.shape}, expected tokens (T, C)"
    elif name == "cls" and rows.num_prefix_tokens == 0:
        why = "this backbone has no class token in front of its patch tokens"
    else:
        cells = token_grid(rows.shape[0], rows.input_size, rows.num_prefix_tokens)
        why = (
            f"its {rows.shape[0]} tokens are not {rows.num_prefix_tokens} prefix tokens and a grid "
            "of patches with the proportions of the input"
        )
    if cells is None:
        raise ReduceError(
            f"reduce={name} does not fit {rows.layer}: {why}.", "Try avg, none or flatten."
        )
    return cells


def map_view(name: str, rows: RowLayout) -> Reduction:
    """Return the function from a map or patch tokens to (B, C, rows, columns).

    Tokens are taken in row-major order; `featx.layers.position_checks` checks that they are. Raises
    ReduceError, in the name of a reduction, if the rows are neither a map with the proportions of
    the input nor such tokens.
    """
    if len(rows.shape) == 2:
        cells, num_prefix_tokens = check_tokens(name, rows), rows.num_prefix_tokens

        def to_map(x: torch.Tensor) -> torch.Tensor:
            patches = x[:, num_prefix_tokens:]
            return patches.transpose(1, 2).reshape(len(x), -1, *cells)

        return to_map
    if len(rows.shape) != 3:
        raise ReduceError(
            f"reduce={name} does not fit {rows.layer}: its rows have shape {rows.shape}, expected "
            "a map or patch tokens."
        )
    if channels_last(f"reduce={name}", rows):
        return lambda x: x.permute(0, 3, 1, 2)
    return lambda x: x


def has_known_positions(rows: RowLayout) -> bool:
    """Return whether the shape alone shows where positions lie, as in a map (C, H, W).

    Tokens (T, C) may be in any order, and tokens in groups, (T, N, C), look like (H, W, C). Raises
    ReduceError if the rows could be (C, H, W) or (H, W, C), or neither.
    """
    return len(rows.shape) == 3 and not channels_last("reduce=grid", rows)


def presumed_map(rows: RowLayout) -> Reduction | None:
    """Return the function to the map of rows whose shape alone does not show where positions lie,
    (B, C, rows, columns); None if it does, or if the rows are no map.
    """
    for num_prefix_tokens in (rows.num_prefix_tokens, 0):  # those before a class token is added
        with contextlib.suppress(ReduceError):
            presumed = replace(rows, num_prefix_tokens=num_prefix_tokens)
            if not has_known_positions(presumed):
                return map_view("none", presumed)
    return None


_CAPTURES = ("output", "input", "grad_output", "grad_input")
"""Captures whose rows have the shape of the layer's tensor; those of attention have none."""


def token_geometries(
    specs: Sequence[LayerSpec], backbone: Backbone, trace: Trace | None = None
) -> dict[str, TokenGeometry]:
    """Return the places of the tokens of each dataset whose rows are tokens or maps."""
    size = backbone.preprocess.crop
    found: dict[str, TokenGeometry] = {}
    for spec in specs:
        if spec.capture not in _CAPTURES or spec.reduce not in ("none", "map", "grid", "align"):
            continue
        shape = spec.shape
        if spec.reduce != "none":  # (C, rows, columns), also of tokens
            found[spec.name] = TokenGeometry(0, False, (shape[1], shape[2]), size)
        elif len(shape) == 2:
            # Layers before the class token is added, such as the patch embedding, have no prefix.
            for prefix in sorted({backbone.num_prefix_tokens, 0}, reverse=True):
                if (grid := token_grid(shape[0], size, prefix)) is not None:
                    has_class_token = prefix > 0 and backbone.has_class_token
                    found[spec.name] = TokenGeometry(prefix, has_class_token, grid, size)
                    break
        elif len(shape) == 3:
            rows = RowLayout(spec.name, shape, size, is_map=is_known_map(shape, size, trace))
            with contextlib.suppress(ReduceError):  # its shape is ambiguous
                last = channels_last("reduce=none", rows)
                grid = shape[:2] if last else shape[1:]
                found[spec.name] = TokenGeometry(0, False, grid, size)
    return found
