"""Folding of BatchNorm into the convolution before it, which saves one pass over the map.

In eval mode, y = (conv(x) - mean) / sqrt(var + eps) * gamma + beta is a convolution with other
weights and another bias (Jacob et al. 2018, arXiv:1712.05877, section 3.2). The results are equal
up to rounding.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from featx.base import ModuleHooks, ObservingMode, elements

_CONVOLUTIONS = frozenset({"Conv2d", "Conv2dSame"})
"""Classes whose forward uses weight and bias as nn.Conv2d does. Classes that standardise their
weight do not."""

_NORMS = frozenset({"BatchNorm2d", "BatchNormAct2d"})
"""torch's own BatchNorm, and timm's with dropout and activation inside."""


Pair = tuple[nn.Conv2d, nn.BatchNorm2d]
"""A convolution and the BatchNorm that reads its output."""


def foldable_pairs(module: nn.Module, x: torch.Tensor, captured: Collection[str]) -> list[Pair]:
    """Convolutions whose output is read by one BatchNorm and by nothing else.

    They are found in one forward pass, from the tensors that operations read and modules return,
    not from values, so a reader whose result is masked for these images is found as well. A reader
    that does not run in this pass is missed: do not fold a model whose control flow depends on the
    data.

    Args:
        module: model in eval mode.
        x: (B, 3, H, W) normalised images.
        captured: names of modules that must stay unchanged because they are captured.
    """
    names = dict(module.named_modules(remove_duplicate=False))
    untouched = {id(names[name]) for name in captured if name in names}
    readers = _Readers()
    with ModuleHooks() as hooks:
        for part in module.modules():
            name = type(part).__name__
            stays = id(part) in untouched or not _is_plain(part)
            if isinstance(part, nn.Conv2d) and name in _CONVOLUTIONS and not stays:
                hooks.add(part, after=readers.record_convolution)
                continue
            if isinstance(part, nn.BatchNorm2d) and name in _NORMS and not stays:
                hooks.add(part, readers.begin_norm)
            hooks.add(part, after=readers.record_output)
        with torch.no_grad(), readers:
            module(x.clone())

    # Their modules are called once, and nothing else reads the output of the convolution.
    return [
        (conv, norm)
        for conv, norm in readers.found
        if readers.calls[id(conv)] == readers.calls[id(norm)] == 1 and id(conv) not in readers.read
    ]


class _Readers(ObservingMode):  # type: ignore[no-untyped-call]
    """Records which modules and operations read the outputs of convolutions.

    Attributes:
        found: convolutions, each with a BatchNorm that has read its output.
        calls: id of a module -> number of its calls.
        read: ids of the convolutions whose output something else has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Pair] = []
        self.calls: Counter[int] = Counter()
        self.read: set[int] = set()
        # Memory address -> the convolution and its output. The outputs are kept alive so that no
        # other tensor is allocated at their address.
        self._made: dict[int, tuple[nn.Conv2d, torch.Tensor]] = {}
        # The BatchNorm that is running, and the memory of its input.
        self._norm: nn.Module | None = None
        self._taken: int | None = None

    def record_convolution(self, conv: Any, args: object, kwargs: object, output: Any) -> None:
        self.calls[id(conv)] += 1
        self._made[_memory(output)] = conv, output

    def begin_norm(self, norm: Any, args: Any, kwargs: object) -> None:
        self.calls[id(norm)] += 1
        memory = _memory(args[0]) if args else 0
        if memory in self._made and self._made[memory][1] is args[0]:
            self.found.append((self._made[memory][0], norm))
            self._norm, self._taken = norm, memory

    def record_output(self, part: nn.Module, args: object, kwargs: object, output: object) -> None:
        """Hook: a module has returned an output, which its caller may read."""
        if part is self._norm:  # its own reads are over
            self._norm, self._taken = None, None
        self._note(elements(output).values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        return func(*args, **kwargs)

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the convolutions whose outputs are among the tensors as read by something else."""
        for memory in map(_memory, tensors):
            if memory in self._made and memory != self._taken:
                self.read.add(id(self._made[memory][0]))


def _memory(tensor: torch.Tensor) -> int:
    """Address of the memory of a tensor, which its views share; 0 if it has none."""
    # A wrapper subclass, such as the int8 tensors of torchao, has no memory of its own.
    has_memory = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if has_memory else 0


@contextlib.contextmanager
def fold_pairs(pairs: list[Pair]) -> Iterator[None]:
    """Fold the pairs until the block ends; the modules then have their own parameters again."""
    weights = []
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
        for parameter in (weight, bias):
            parameter.requires_grad_(False)
        weights.append((weight, bias))
    parameters_before = [(conv, dict(conv._parameters)) for conv, _ in pairs]
    try:
        for (conv, norm), (weight, bias) in zip(pairs, weights, strict=True):
            conv._parameters.update(weight=weight, bias=bias)
            replacement = _activate if hasattr(norm, "act") else _pass_through
            norm.forward = types.MethodType(replacement, norm)  # type: ignore[method-assign]
        yield
    finally:
        for conv, parameters in parameters_before:
            conv._parameters.update(parameters)
        for _, norm in pairs:
            norm.__dict__.pop("forward", None)


def _pass_through(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replacement for the forward of a folded BatchNorm."""
    return x


def _activate(norm: Any, x: torch.Tensor) -> Any:
    """Replacement for the forward of a folded BatchNormAct2d: its dropout and activation."""
    return norm.act(norm.drop(x))


def _is_plain(part: nn.Module) -> bool:
    """Return whether a module in eval mode computes what its class defines from its parameters.

    Weights may be recomputed in each pass, by a parametrisation or by a hook (torch.nn.utils.prune,
    and the hook-based weight_norm and spectral_norm). A hook may also read the output that is
    folded away.
    """
    hooks = part._forward_pre_hooks or part._forward_hooks
    recomputes = hasattr(part, "parametrizations") or "forward" in part.__dict__ or bool(hooks)
    names = ["weight", "bias"]
    names += ["running_mean", "running_var"] if isinstance(part, nn.BatchNorm2d) else []
    registered = part._parameters.keys() | part._buffers.keys()
    if recomputes or part.training or not registered.issuperset(names):
        return False
    return getattr(part, "running_mean", part) is not None
