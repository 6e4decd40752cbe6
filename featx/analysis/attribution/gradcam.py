"""Grad-CAM, and the capture of a layer's output and gradient that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from featx import layers
from featx.base import ModuleHooks
from featx.errors import LayerError, ReduceError
from featx.layers import CapturePoint, RowLayout, path_to, pick, with_element
from featx.models import Backbone


def grad_cam(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Compute Grad-CAM: relu(sum_c w_c A_c), with w_c the mean gradient of channel c over
    positions.

    R. R. Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
    Localization, ICCV 2017.

    Returns:
        (B, h, w) float32, at least 0.
    """
    weights = gradients.float().mean((2, 3))
    return torch.einsum("bc,bchw->bhw", weights, activations.float()).relu()


@contextlib.contextmanager
def capture_output(module: nn.Module, point: CapturePoint | None) -> Iterator[list[torch.Tensor]]:
    """Keep the output of a layer during the block, so that its gradient can be computed.

    The model continues with a copy, because an in-place activation may follow. If no tensor before
    the layer requires a gradient, the graph begins here.

    Yields:
        list that receives the output of every matching call.
    """
    outputs: list[torch.Tensor] = []
    if point is None:
        yield outputs
        return
    calls = 0

    def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Keep the output of the requested call, and return a copy to the model."""
        nonlocal calls
        calls += 1
        if point.call not in (None, calls):
            return output
        tensor = pick(output, point)
        if torch.is_grad_enabled() and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        outputs.append(tensor)
        return with_element(output, path_to(output, point), tensor.clone())

    layers = dict(module.named_modules(remove_duplicate=False))
    with ModuleHooks() as hooks:
        hooks.add(layers[point.module], after=hook)
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
