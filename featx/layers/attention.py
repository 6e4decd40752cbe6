"""Access to attention weights, which most modules compute but do not return.

nn.MultiheadAttention returns its weights as a second result if asked to. The attention modules of
timm pass theirs to `attn_drop`, unless they use a fused kernel (`fused_attn`), which never
materialises them. The weights are (N, heads, T, S), and each row over S sums to 1.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from featx.base import ModuleHooks, ModuleSetting, glob_to_regex
from featx.errors import LayerError
from featx.layers.layer_names import split_capture
from featx.layers.operations import hide_operations

HIDDEN = ("matmul", "matmul_1", "softmax")
"""Names of the operations of plain attention that the fused kernel does not call."""

_NEED, _AVERAGE = "need_weights", "average_attn_weights"
"""Arguments of nn.MultiheadAttention.forward that decide about its weights."""


_kernel = ModuleSetting("fused_attn")


@contextlib.contextmanager
def plain_attention(module: nn.Module, requests: Sequence[str]) -> Iterator[list[str]]:
    """Switch fused kernels that hide requested weights or operations off inside the block.

    Requests are names, globs and presets of layers, with the kind of capture after a colon. The
    names of the modules with these kernels are yielded.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    fused = {
        name: m
        for name, m in module.named_modules()
        if getattr(m, "fused_attn", False) is True or m in _kernel
    }
    needed: set[str] = set()
    for request in requests:
        name, capture = split_capture(request)
        pattern = re.compile(glob_to_regex(re.sub(r"\[\d+\]$|@\d+$", "", name)))
        if capture == "attention":
            is_preset = name in ("all", "leaves")
            needed.update(each for each in fused if is_preset or pattern.fullmatch(each))
        elif not any(pattern.fullmatch(each) for each in names):
            needed.update(
                each for each in fused if any(pattern.fullmatch(f"{each}.{op}") for op in HIDDEN)
            )
    plain = [name for name in fused if name in needed]
    with _kernel.changed({fused[name]: False for name in plain}):
        yield plain


def source_of_weights(module: nn.Module) -> nn.Module | None:
    """The module whose calls show attention weights; None if featx cannot read those of `module`.

    It is nn.MultiheadAttention itself, or a subclass that is called like it, and the module to
    which timm's attention passes its weights.
    """
    if isinstance(module, nn.MultiheadAttention):
        arguments = inspect.signature(module.forward).parameters
        if {_NEED, _AVERAGE} <= arguments.keys():
            return module
    dropout = getattr(module, "attn_drop", None)
    return dropout if isinstance(dropout, nn.Module) else None


def hook_weights(
    hooks: ModuleHooks, name: str, module: nn.Module, take: Callable[[torch.Tensor], None]
) -> None:
    """Attach hooks that pass the weights of each call, (N, heads, T, S), to `take`."""
    source = source_of_weights(module)
    if source is module:
        _hook_multihead(hooks, module, take)
        return
    if source is None:
        softmax = f"the softmax operation that computes them, such as {name + '.softmax'!r}."
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if chosen not in (None, "eager"):  # transformers
            softmax = (
                f"{softmax} {type(module).__name__} computes none now (attn_implementation="
                f"{chosen!r}): load the model with attn_implementation='eager'."
            )
        raise LayerError(
            f"{name}:attention: featx cannot read the attention weights of a "
            f"{type(module).__name__}, only those of nn.MultiheadAttention and of timm's modules. "
            f"Name {softmax}"
        )

    def before(module: nn.Module, args: Any, kwargs: object) -> None:
        if args and isinstance(args[0], torch.Tensor):
            take(args[0])

    hooks.add(source, before)


class _CallArguments(threading.local):
    """The running calls of a thread, as (need_weights, average_attn_weights) were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool]] = []


def _hook_multihead(
    hooks: ModuleHooks, module: nn.Module, take: Callable[[torch.Tensor], None]
) -> None:
    """Attach hooks to nn.MultiheadAttention that request weights per head.

    The caller of the module receives weights only if it asked for them, averaged if it asked so:
    the model computes as without the hooks.
    """
    requests, parameters = _CallArguments(), inspect.signature(module.forward).parameters
    # torch.compile of torch 2.14 does not trace Signature.bind.
    names, changed = tuple(parameters), {_NEED: True, _AVERAGE: False}
    defaults = {name: parameters[name].default for name in changed}

    def before(module: nn.Module, args: Any, kwargs: Any) -> object:
        positional = dict(zip(names, args, strict=False))
        given = {**defaults, **positional, **kwargs}
        requests.calls.append((bool(given[_NEED]), bool(given[_AVERAGE])))
        positional |= {name: changed[name] for name in changed if name in positional}
        others = {name: changed[name] for name in changed if name not in positional}
        return tuple(positional.values()), {**kwargs, **others}

    def after(module: nn.Module, args: object, kwargs: object, output: Any) -> object:
        value, weights = output
        needs_weights, average = requests.calls.pop()
        take(weights)
        with hide_operations():
            returned_weights = weights.mean(dim=-3) if average else weights
        return value, returned_weights if needs_weights else None

    hooks.add(module, before)
    hooks.add(module, after=after, first=True)


def are_weights(values: torch.Tensor) -> bool:
    """Return whether values are at least 0, and sum to 1 in the last dimension."""
    sums = values.sum(-1)
    return bool(values.min() >= 0) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def check_weights(name: str, weights: torch.Tensor) -> None:
    """Raise LayerError for weights that are below 0, or do not sum to 1 in the last dimension."""
    if not are_weights(weights):
        sums = weights.sum(-1)
        raise LayerError(
            f"{name}: the tensor that the module returns as attention weights has rows whose sums "
            f"are not 1, but {sums.min():.3g} to {sums.max():.3g}. Name an operation or a layer "
            "inside it."
        )
