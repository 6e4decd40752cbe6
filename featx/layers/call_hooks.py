"""Hooks that report every call of every module while a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featx.base import ModuleHooks


@dataclass
class OpenCall:
    """A module call that has not ended.

    Attributes:
        name: first dotted name of the module, '' for the model itself.
        module: the module.
        parent: the enclosing call, or None for the model itself.
        data: value that the `begin` callback stores for the `end` callback.
    """

    name: str
    module: nn.Module
    parent: OpenCall | None
    data: Any = None

    @property
    def depth(self) -> int:
        """Number of enclosing calls."""
        return 0 if self.parent is None else 1 + self.parent.depth


@contextlib.contextmanager
def every_call(
    modules: Mapping[str, nn.Module],
    begin: Callable[[OpenCall, list[Any]], None],
    end: Callable[[OpenCall, int, Any], Any],
) -> Iterator[list[OpenCall]]:
    """Report each call of each module inside the block; the hooks are removed at its end.

    Calls that torch.compile traces are not reported, because compiled code runs no hooks.

    Args:
        modules: dotted name -> module; '' is the model itself.
        begin: called before each call with (the call, its arguments).
        end: called after it with (the call, its number among the calls of the module in this pass,
            from 1, its output); it may return another output.

    Yields:
        The calls that have not ended, innermost last. After an exception these are the calls that
        it interrupted.
    """
    open_calls: list[OpenCall] = []
    num_ended: dict[str, int] = {}

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if name == "":  # a new pass; an exception may have interrupted the one before
            open_calls.clear()
            num_ended.clear()
        call = OpenCall(name, module, open_calls[-1] if open_calls else None)
        open_calls.append(call)
        begin(call, [*args, *kwargs.values()])

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or all(c.module is not module for c in open_calls):
            return None
        num_ended[name] = num_ended.get(name, 0) + 1
        while (call := open_calls.pop()).module is not module:
            pass  # the model caught an exception from this inner call
        return end(call, num_ended[name], output)

    with ModuleHooks() as hooks:
        hooks.add_all(modules.items(), before, after)
        yield open_calls
