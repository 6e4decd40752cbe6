"""Grad-CAM, and the capture of a layer's output and gradient that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from featx import layers
from featx.errors import LayerError, ReduceError
from featx.layers import CapturePoint, RowLayout, edit
from featx.models import Backbone


def grad_cam(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Compute Grad-CAM: relu(sum_c w_c A_c), with w_c the mean gradient of channel c over
    positions. Return (B, h, w) float32, at least 0.

    R. R. Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
    Localization, ICCV 2017.
    """
    weights = gradients.float().mean((2, 3))
    return torch.einsum("bc,bchw->bhw", weights, activations.float()).relu()


@contextlib.contextmanager
def capture_output(module: nn.Module, point: CapturePoint | None) -> Iterator[list[torch.Tensor]]:
    """Yield a list that receives the output of a layer in the block, for its gradient to be
    computed.

    The model continues with a copy, because an in-place activation may follow. If no tensor before
    the layer requires a gradient, the graph begins here. Raises LayerError if the model ran without
    the layer.
    """
    outputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        outputs.append(tensor)
        return tensor.clone()

    with contextlib.nullcontext() if point is None else edit(module, {point.name: keep}):
        yield outputs


def layer_map_view(
    name: str, row_shape: tuple[int, ...], backbone: Backbone
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that turns a layer's tensor (B, ...) into (B, C, h, w)."""
    try:
        return layers.map_view(
            "grid",
            RowLayout(name, row_shape, backbone.preprocess.crop, backbone.num_prefix_tokens),
        )
    except ReduceError as error:
        raise LayerError(
            f"{name} gives rows of shape {row_shape}, expected a map (C, h, w) or (h, w, C) with "
            "the proportions of the image, or patch tokens (T, C). job=layers lists every layer."
        ) from error
