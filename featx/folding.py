"""BatchNorm folded into the convolution before it: one pass over the map less, the same numbers.

In eval mode y = (conv(x) - mean) / sqrt(var + eps) * gamma + beta is a convolution with other
weights and another bias (Jacob et al. 2018, arXiv:1712.05877, section 3.2). Equal to rounding.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from featx.taps.nested import elements

_CONVOLUTIONS = frozenset({"Conv2d", "Conv2dSame"})
"""Classes whose forward uses weight and bias as nn.Conv2d does; a standardised weight would not."""

_NORMS = frozenset({"BatchNorm2d", "BatchNormAct2d"})
"""torch's own, and timm's with the activation inside."""


Pair = tuple[nn.Conv2d, nn.BatchNorm2d]


def foldable_pairs(module: nn.Module, x: torch.Tensor, kept: Collection[str]) -> list[Pair]:
    """The convolutions whose output goes straight into a BatchNorm, and nowhere else.

    Found in one pass and proven in a second. None where anybody else reads such an output.

    Args:
        module: in eval mode.
        x: (B, 3, H, W) to run it on.
        kept: names of modules that stay as they are, because somebody looks at them.
    """
    names = dict(module.named_modules(remove_duplicate=False))
    untouched = {id(names[name]) for name in kept if name in names}
    calls: dict[int, int] = {}
    made: dict[int, tuple[nn.Conv2d, torch.Tensor]] = {}
    found: list[Pair] = []

    def convolved(conv: Any, args: Any, output: torch.Tensor) -> None:
        calls[id(conv)] = calls.get(id(conv), 0) + 1
        made[id(output)] = conv, output  # kept, so that no other tensor gets its id

    def normalised(norm: Any, args: Any) -> None:
        calls[id(norm)] = calls.get(id(norm), 0) + 1
        if args and id(args[0]) in made:
            found.append((made[id(args[0])][0], norm))

    with contextlib.ExitStack() as stack:
        for part in module.modules():
            if id(part) in untouched:
                continue
            name = type(part).__name__
            if isinstance(part, nn.Conv2d) and name in _CONVOLUTIONS and _is_plain(part):
                stack.callback(part.register_forward_hook(convolved).remove)
            elif isinstance(part, nn.BatchNorm2d) and name in _NORMS and _is_plain(part):
                stack.callback(part.register_forward_pre_hook(normalised).remove)
        with torch.no_grad():
            module(x.clone())
    pairs = [pair for pair in found if all(calls[id(part)] == 1 for part in pair)]
    return [] if _read_elsewhere(module, x, pairs) else pairs


def _read_elsewhere(module: nn.Module, x: torch.Tensor, pairs: list[Pair]) -> bool:
    """Whether anything but its BatchNorm reads the output of a convolution.

    Each convolution gives NaN, which its BatchNorm finds replaced by the true output: NaN behind
    any other module, or at the end, comes from another reader.
    """
    true: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    convolutions = {id(conv) for conv, _ in pairs}
    seen: list[bool] = []

    def hide(conv: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        hidden = torch.full_like(output, torch.nan)
        true[id(hidden)] = hidden, output
        return hidden

    def reveal(norm: Any, args: Any) -> Any:
        return (true[id(args[0])][1],) if id(args[0]) in true else None

    def look(part: Any, args: Any, output: Any) -> None:
        if id(part) not in convolutions:
            seen.extend(bool(tensor.isnan().any()) for tensor in elements(output).values())

    with contextlib.ExitStack() as stack:
        for part in module.modules():
            stack.callback(part.register_forward_hook(look).remove)
        for conv, norm in pairs:
            stack.callback(conv.register_forward_hook(hide).remove)
            stack.callback(norm.register_forward_pre_hook(reveal).remove)
        with torch.no_grad():
            module(x.clone())
    return any(seen)


@contextlib.contextmanager
def folded(pairs: list[Pair]) -> Iterator[None]:
    """The pairs folded, until the block ends; the modules come back with their own parameters."""
    before = [(conv, dict(conv._parameters)) for conv, _ in pairs]
    try:
        for conv, norm in pairs:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            weight, bias = fuse_conv_bn_weights(
                conv.weight,
                conv.bias,
                norm.running_mean,
                norm.running_var,
                norm.eps,
                norm.weight,
                norm.bias,
            )
            conv.weight, conv.bias = weight.requires_grad_(False), bias.requires_grad_(False)
            passed_on = _activated if hasattr(norm, "act") else _unchanged
            norm.forward = types.MethodType(passed_on, norm)  # type: ignore[method-assign]
        yield
    finally:
        for conv, parameters in before:
            conv._parameters.update(parameters)
        for _, norm in pairs:
            norm.__dict__.pop("forward", None)


def _unchanged(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


def _activated(norm: Any, x: torch.Tensor) -> Any:
    """What timm's BatchNormAct2d does after its normalisation."""
    return norm.act(norm.drop(x))


def _is_plain(part: nn.Module) -> bool:
    """Neither parametrised (weight_norm), nor with a forward of somebody's own, nor training."""
    own = hasattr(part, "parametrizations") or "forward" in part.__dict__ or part.training
    return not own and getattr(part, "running_mean", part) is not None
