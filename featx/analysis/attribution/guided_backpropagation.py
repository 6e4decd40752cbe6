"""Guided backpropagation: rectifiers that let only positive gradients pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from featx.base import After, ModuleHooks, TensorHooks
from featx.errors import ModelError

_RECTIFIERS = (nn.ReLU, nn.ReLU6)
_RECTIFIER_NODES = ("ReluBackward", "HardtanhBackward")
_OTHER_ACTIVATIONS = ("Silu", "Gelu", "Hardswish", "LeakyRelu", "Elu", "Mish", "Softplus", "Prelu")


@contextlib.contextmanager
def guided_rectifiers(module: nn.Module) -> Iterator[None]:
    """Let only positive gradients pass backwards through a module's rectifiers, inside the block.

    J. T. Springenberg et al., Striving for Simplicity, 2015. The output of each call of a rectifier
    has its own hook, so rectifiers that are called several times, work in place or are shared
    between layers are handled correctly.
    """

    gradients = TensorHooks()

    def hook(rectifier: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            gradients.add(output, lambda gradient: gradient.clamp(min=0))

    with _hooked_rectifiers(module, hook):
        yield


def _hooked_rectifiers(module: nn.Module, hook: After) -> ModuleHooks:
    """Return hooks that run after each call of a ReLU or ReLU6."""
    hooks = ModuleHooks()
    for part in module.modules():
        if isinstance(part, _RECTIFIERS):
            hooks.add(part, after=hook)
    return hooks


def check_rectifiers(module: nn.Module, x: torch.Tensor) -> None:
    """Check that all activations of a model are rectifier modules, for guided backpropagation."""
    calls: list[str] = []

    def count(rectifier: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(type(rectifier).__name__)

    with _hooked_rectifiers(module, count), torch.enable_grad():
        output = module(x.clone().requires_grad_().clone())
    nodes = list(_graph_nodes(output)) if isinstance(output, torch.Tensor) else []
    num_unseen = sum(node.startswith(_RECTIFIER_NODES) for node in nodes) - len(calls)
    other_activations = sorted(
        {kind for kind in _OTHER_ACTIVATIONS for node in nodes if node.startswith(kind)}
    )
    reason = ""
    if other_activations:
        reason = f"it has {', '.join(other_activations)}"
    elif num_unseen > 0:
        reason = f"{num_unseen} of its rectifiers are calls of F.relu, which no hook sees"
    elif not calls:
        reason = "it has none"
    if reason:
        raise ModelError(
            "guided_gradcam needs a model whose activations are all nn.ReLU or nn.ReLU6 modules, "
            f"and {reason}. Use attribute.method=gradcam, or integrated_gradients for fine detail."
        )


def _graph_nodes(output: torch.Tensor) -> Iterator[str]:
    """Yield the name of every operation in the autograd graph of a tensor."""
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node.name()
        pending.extend(following for following, _ in node.next_functions)
