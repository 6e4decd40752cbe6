"""Hooks that report every call of every module in a forward pass while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


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
    going_on: list[OpenCall] = []
    ended: dict[str, int] = {}

    def hooks_of(name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = OpenCall(name, module, going_on[-1] if going_on else None)
            going_on.append(call)
            begin(call, [*args, *kwargs.values()])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            ended[name] = ended.get(name, 0) + 1
            while (call := going_on.pop()).module is not module:
                pass  # the model caught an exception from this inner call
            end(call, ended[name], output)

        return before, after

    with contextlib.ExitStack() as handles:
        for name, submodule in model.named_modules():
            before, after = hooks_of(name)
            handles.callback(submodule.register_forward_pre_hook(before, with_kwargs=True).remove)
            handles.callback(submodule.register_forward_hook(after).remove)
        yield going_on
