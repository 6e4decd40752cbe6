"""Every call of every module of one pass, told to an observer while it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class OpenCall:
    """A module call that goes on.

    Attributes:
        name: the module's first dotted name, '' for the model itself.
        target: the module.
        parent: the call that it is a part of; None for the model itself.
        note: what the observer of its begin leaves for that of its end.
    """

    name: str
    target: nn.Module
    parent: OpenCall | None
    note: Any = None

    @property
    def depth(self) -> int:
        """How many calls it is inside of."""
        return 0 if self.parent is None else 1 + self.parent.depth


@contextlib.contextmanager
def every_call(
    module: nn.Module,
    begin: Callable[[OpenCall, list[Any]], None],
    end: Callable[[OpenCall, int, Any], None],
) -> Iterator[list[OpenCall]]:
    """Tell of each call of each module while the block runs; the hooks go with it.

    Args:
        module: the model; one pass inside the block.
        begin: before a call: (the call, its arguments).
        end: after it: (the call, its number among the module's calls, from 1, its output).

    Yields:
        The calls that go on, the innermost last; after an exception, those it broke off.
    """
    going_on: list[OpenCall] = []
    ended: dict[str, int] = {}

    def hooks_of(name: str) -> tuple[Any, Any]:
        def before(target: nn.Module, args: Any, kwargs: Any) -> None:
            call = OpenCall(name, target, going_on[-1] if going_on else None)
            going_on.append(call)
            begin(call, [*args, *kwargs.values()])

        def after(target: nn.Module, args: Any, output: Any) -> None:
            ended[name] = ended.get(name, 0) + 1
            while (call := going_on.pop()).target is not target:
                pass  # a call whose exception the model caught
            end(call, ended[name], output)

        return before, after

    with contextlib.ExitStack() as handles:
        for name, target in module.named_modules():
            before, after = hooks_of(name)
            handles.callback(target.register_forward_pre_hook(before, with_kwargs=True).remove)
            handles.callback(target.register_forward_hook(after).remove)
        yield going_on
