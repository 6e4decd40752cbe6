"""Places of the tokens of a stored layer, from the shape of its rows and the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from featx.errors import ReduceError
from featx.layers.reductions.row_layout import RowLayout, channels_last, token_grid
from featx.types import LayerSpec, TokenGeometry

if TYPE_CHECKING:
    from featx.models import Backbone

_CAPTURES = ("output", "input", "grad_output", "grad_input")
"""Captures whose rows have the shape of the layer's tensor; those of attention have none."""


def token_geometries(specs: Sequence[LayerSpec], backbone: Backbone) -> dict[str, TokenGeometry]:
    """Return the places of the tokens of each dataset whose rows are tokens or maps.

    Args:
        specs: datasets of a run.
        backbone: model of the run.
    """
    found = {spec.name: _geometry_of(spec, backbone) for spec in specs}
    return {name: places for name, places in found.items() if places is not None}


def _geometry_of(spec: LayerSpec, backbone: Backbone) -> TokenGeometry | None:
    """Return the places of the tokens of a dataset, or None if its shape is ambiguous."""
    if spec.capture not in _CAPTURES or spec.reduce not in ("none", "grid", "align"):
        return None
    size = backbone.preprocess.crop
    shape = spec.shape
    if spec.reduce != "none":  # (C, rows, columns), also of tokens
        return TokenGeometry(0, False, (shape[1], shape[2]), size)
    if len(shape) == 2:
        # Layers before the class token is added, such as the patch embedding, have no prefix.
        for prefix in sorted({backbone.num_prefix_tokens, 0}, reverse=True):
            if (grid := token_grid(shape[0], size, prefix)) is not None:
                has_class_token = prefix > 0 and backbone.has_class_token
                return TokenGeometry(prefix, has_class_token, grid, size)
    if len(shape) == 3:
        try:
            last = channels_last("reduce=none", RowLayout(spec.name, shape, size))
        except ReduceError:
            return None
        return TokenGeometry(0, False, shape[:2] if last else shape[1:], size)
    return None
