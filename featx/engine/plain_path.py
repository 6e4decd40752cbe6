"""Rows of layers by the plain path of a model: its own forward pass, without featx's engine.

It computes in eval mode and float32, with the parameters as they were loaded and no BatchNorm
folded, to the end of the forward pass. Hooks of PyTorch alone keep the tensors; the embedding is
what the model's library itself computes (`Backbone.embedding`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from featx.base import ModuleHooks
from featx.engine.device_model import DeviceModel
from featx.layers import REDUCTIONS, CapturePoint, ChosenLayers, StoredReduce, bound_reduction, pick
from featx.models import eval_mode

_HOOKED = ("input", "output")
"""Kinds of captures that hooks of PyTorch keep as well."""

_UNCHANGED = ("none", "flatten")
"""Reductions that leave an embedding as it is."""


def explain_missing_plain_path(point: CapturePoint, reduce: StoredReduce) -> str | None:
    """Explain why rows have no counterpart on the plain path; None if they have one."""
    if point.operation:
        return "operations have no hook of PyTorch"
    if point.capture not in _HOOKED:
        return f"{point.capture} has no hook of PyTorch"
    if REDUCTIONS.get(reduce.name).needs_statistics:
        return f"reduce={reduce.name} may enlarge differences"
    return None


def plain_rows(
    model: DeviceModel, chosen: ChosenLayers, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Compute rows by the plain path of a model without hooks, from normalised float32 images.

    They are dataset name -> (B, ...) float32 on the CPU. `explain_missing_plain_path` must accept
    the captures. Raises ModelError if the forward pass fails.
    """
    with model.named_failure(x), torch.no_grad(), eval_mode(model.module):
        library = model.backbone.embedding
        are_embeddings = all(p.name == "embedding" and r.name in _UNCHANGED for p, r in chosen)
        if library is not None and are_embeddings:
            rows = {"embedding": library.compute(x.clone())}
        else:
            values = _capture_values(model.module, chosen, x)
            rows = {
                point.name: bound_reduction(reduce, model.row_layout(point, value))(value)
                for point, reduce in chosen
                if (value := values.get(point.name)) is not None
            }
    return {name: value.float().cpu() for name, value in rows.items()}


def _capture_values(
    module: nn.Module, chosen: ChosenLayers, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Copies of the captured tensors of one forward pass, by hooks of PyTorch."""
    values: dict[str, torch.Tensor] = {}
    calls: dict[str, int] = {}

    def keep(point: CapturePoint, value: object) -> None:
        calls[point.name] = calls.get(point.name, 0) + 1
        if calls[point.name] == (point.call or 1):
            values[point.name] = pick(value, point).detach().clone()

    def before(point: CapturePoint, _: nn.Module, args: Any, kwargs: Any) -> None:
        keep(point, [*args, *kwargs.values()])

    def after(point: CapturePoint, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        keep(point, output)

    with ModuleHooks() as hooks:
        for point, _ in chosen:
            part = module.get_submodule(point.module)
            if point.capture == "input":
                hooks.add(part, functools.partial(before, point))
            else:
                hooks.add(part, after=functools.partial(after, point))
        module(x.clone())
    return values
