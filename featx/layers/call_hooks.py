"""Hooks that report every call of every module in a forward pass while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    model: nn.Module,
    begin: Callable[[OpenCall, list[Any]], None],
    end: Callable[[OpenCall, int, Any], None],
) -> Iterator[list[OpenCall]]:
    """Report each call of each module inside the block; the hooks are removed at its end.

    Args:
        model: the model; the block runs one forward pass.
        begin: called before each call with (the call, its arguments).
        end: called after it with (the call, its number among the calls of the module, from 1, its
            output).

    Yields:
        The calls that have not ended, innermost last. After an exception these are the calls that
        it interrupted.
    """
    open_calls: list[OpenCall] = []
    num_ended: dict[str, int] = {}

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = OpenCall(name, module, open_calls[-1] if open_calls else None)
        open_calls.append(call)
        begin(call, [*args, *kwargs.values()])

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        num_ended[name] = num_ended.get(name, 0) + 1
        while (call := open_calls.pop()).module is not module:
            pass  # the model caught an exception from this inner call
        end(call, num_ended[name], output)

    with ModuleHooks() as hooks:
        hooks.add_all(model.named_modules(), before, after)
        yield open_calls
