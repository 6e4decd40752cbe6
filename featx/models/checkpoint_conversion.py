"""Conversion of checkpoints whose names are those of the code that trained them.

timm keeps such a function, `checkpoint_filter_fn`, for most of its families. It is written for the
files that timm's authors have converted: it leaves tensors out without a message, and interpolates
those of another size. So its result is traced: autograd tells which tensors of the file each
result was made of, and by which operations.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featx.base import is_own_process
from featx.models.checkpoint_match import (
    CONSTANTS,
    COUNTER,
    TRAINING_ONLY,
    CheckpointMatch,
    first_part,
)

_REASONS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of a conversion that was given the tensors of another model."""

_EXACT = {
    "AccumulateGrad", "Add", "Alias", "AsStrided", "Cat", "Clone", "Copy", "Div", "Expand", "Flip",
    "Index", "IndexSelect", "Mul", "Narrow", "Neg", "Permute", "ReshapeAlias", "Select", "Slice",
    "Split", "SplitWithSizes", "Squeeze", "Stack", "Sub", "T", "ToCopy", "Transpose", "Unbind",
    "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
"""Operations of autograd that move values or change them one by one. All others, such as an
interpolation, mix values of several positions."""


@dataclass(frozen=True)
class Conversion:
    """Function of a library that gives the tensors of a checkpoint the names of a module.

    Attributes:
        name: import path of the function.
        function: function from name -> tensor and the module to name -> tensor.
        module: module to load.
    """

    name: str
    function: Callable[[dict[str, torch.Tensor], nn.Module], Mapping[str, Any]]
    module: nn.Module

    def apply(self, match: CheckpointMatch) -> CheckpointMatch | None:
        """Convert tensors behind a prefix; None if the function cannot take them."""
        leaves = {
            name: x.detach().requires_grad_() if x.is_floating_point() else x
            for name, x in match.tensors.items()
        }
        # Some of the functions print. The stdout of a command belongs to the result of its job;
        # that of a user's process, which other threads use too, stays as it is.
        stdout = sys.stderr if is_own_process() else sys.stdout
        with torch.enable_grad(), contextlib.redirect_stdout(stdout):
            try:
                result = self.function(dict(leaves), self.module)
            except _REASONS:
                return None
        tensors = {name: x for name, x in result.items() if isinstance(x, torch.Tensor)}
        names = {id(leaf): match.prefix + name for name, leaf in leaves.items()}
        traced = {name: _trace(x, names) for name, x in tensors.items()}
        sources = {name: origin for name, (origin, _) in traced.items()}
        used_names = {source for each in sources.values() for source in each}
        return replace(
            match,
            tensors={name: x.detach() for name, x in tensors.items()},
            sources=sources,
            conversion=self.name,
            computed=tuple(name for name, (_, is_exact) in traced.items() if not is_exact),
            lost=tuple(_lost_names(match, used_names)),
        )


def _trace(x: torch.Tensor, names: Mapping[int, str]) -> tuple[frozenset[str], bool]:
    """Return the origin of a converted tensor; `names` has id of a tensor of the file -> name.

    The names in the file are none for values that the function has made up. The second value is
    whether values were moved or changed one by one only.
    """
    if id(x) in names:
        return frozenset([names[id(x)]]), True
    sources, operations = set(), set()
    for node in _graph(x):
        operations.add(re.sub(r"Backward\d*$", "", type(node).__name__))
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            sources.add(names[id(variable)])
    return frozenset(sources), operations <= _EXACT


def _graph(x: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of autograd from which a tensor was computed."""
    visited, pending = set(), [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [following for following, _ in node.next_functions]
            yield node


def _lost_names(match: CheckpointMatch, used_names: Collection[str]) -> Iterator[str]:
    """Yield names in the file of tensors that a conversion leaves out of the parts that it takes.

    Tensors of zeros, of training only, and those that follow from the size of the model are none.
    """
    parts = {first_part(name.removeprefix(match.prefix)) for name in used_names}
    for inner, x in match.tensors.items():
        name = match.prefix + inner
        if name in used_names or first_part(inner) not in parts:
            continue
        if inner.endswith((COUNTER, *CONSTANTS)) or inner.startswith(TRAINING_ONLY):
            continue
        if bool((x != 0).any()):
            yield name


def timm_conversion(module: nn.Module) -> Conversion | None:
    """Return the conversion of timm for the family of a model, or None if it has none."""
    code = sys.modules[type(module).__module__]
    function = getattr(code, "checkpoint_filter_fn", None)
    if function is None:
        return None
    return Conversion(f"{code.__name__}.checkpoint_filter_fn", function, module)
