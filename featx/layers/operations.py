"""Recording of operations in a module's forward, such as `out += identity` or a softmax.

They are named as in torch.fx (torchvision's `get_graph_node_names`): the path of the module whose
forward calls them and the plain name of the function, numbered from the second one on:
`layer1.0.add`, `blocks.0.attn.softmax`, `layer1.0.add_1`. torch.fx traces the source of a model
once. The recorder here observes real forward passes, so it needs no second model and allows any
control flow.
"""

from __future__ import annotations

import contextlib
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from featx.base import ModuleHooks

OnOperation = Callable[[str, str, Callable[..., object], object], object]
"""Callback (name, dotted name of the module, function, result); it may return another result."""

_AS_OPERATOR = {"div": "truediv", "remainder": "mod", "and": "and_", "or": "or_"}
"""PyTorch's name for `a / b`, `a % b`, `a & b`, `a | b` -> the name in Python's `operator` module,
which torch.fx uses."""


@dataclass
class _Frame:
    """A module whose call has not ended.

    Attributes:
        name: dotted name of the module.
        is_open: whether operations are reported: those of its forward, not of hooks before it.
        is_entry: whether the recorder was entered for this call.
    """

    name: str
    is_open: bool = False
    is_entry: bool = False


class _Frames(threading.local):
    """Running calls of a thread, and (module, function) -> number of operations so far."""

    def __init__(self) -> None:
        self.running: list[_Frame] = []
        self.counts: dict[tuple[str, str], int] = {}


class OperationRecorder(TorchFunctionMode):
    """Reports every operation in the forwards of a model while it is entered and attached.

    An operation counts if it takes a tensor and returns one. As in torch.fx, operations inside a
    module of torch.nn belong to that module and are not reported; the model itself is never such a
    leaf.

    PyTorch calls a mode only for operations of the thread that entered it, and not in
    `Tensor.backward`, where checkpoints compute layers again.

    Args:
        module: the model.
        on_operation: callback.
        every_thread: whether to report calls of modules in other threads and in backward passes.
    """

    def __init__(
        self, module: nn.Module, on_operation: OnOperation, every_thread: bool = False
    ) -> None:
        super().__init__()
        self._model = module
        self._on_operation = on_operation
        self._every_thread = every_thread
        self._modules = {name for name, _ in module.named_modules(remove_duplicate=False)}
        self._frames = _Frames()

    def __exit__(self, *error: object) -> None:
        # Blocks may end in another order than they began.
        above: list[TorchFunctionMode] = []
        while self._is_entered() and (mode := _pop_mode()) is not self:  # type: ignore[no-untyped-call]
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]

    def _is_entered(self) -> bool:
        """Return whether the calling thread has entered the recorder."""
        return any(mode is self for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """Attach hooks that track whose forward is running, inside the block."""
        modules = dict(self._model.named_modules())
        with ModuleHooks() as hooks:
            # Frames begin before the hooks of captures run, and end after them.
            hooks.add_all(modules, self._begin_frame, first=True)
            hooks.add_all(modules, self._open_frame, self._end_frames, always=True)
            yield

    def reset(self) -> None:
        """Start counting again for a new forward pass."""
        self._end_frames(None)
        self._frames.counts.clear()

    def _begin_frame(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        frames = self._frames
        if not frames.running:
            # Outside a call of the model itself, each call of a module counts its own operations.
            prefix = f"{name}." if name else ""
            frames.counts = {
                key: n for key, n in frames.counts.items() if not f"{key[0]}.".startswith(prefix)
            }
        frames.running.append(_Frame(name))

    def _open_frame(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        """Report the operations from here on, unless they are the module's own.

        This is the leaf rule of torch.fx: modules of torch.nn are leaves, apart from nn.Sequential.
        """
        frame = self._frames.running[-1]
        # A parametrised module, as of weight_norm, has a class of torch.nn.utils.parametrize.
        package = type_before_parametrizations(module).__module__
        is_of_torch = package.startswith(("torch.nn", "torch.ao.nn"))
        frame.is_open = name == "" or not is_of_torch or isinstance(module, nn.Sequential)
        if frame.is_open and self._every_thread and not self._is_entered():
            self.__enter__()  # type: ignore[no-untyped-call]
            frame.is_entry = True

    def _end_frames(self, name: str | None, *_: object) -> None:
        """End the frame of a module, and those of inner calls that an exception interrupted.

        Without a name all frames of the thread end.
        """
        while self._frames.running:
            frame = self._frames.running.pop()
            if frame.is_entry:
                self.__exit__()
            if frame.name == name:
                break

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        frame = self._frames.running[-1] if self._frames.running else None
        if frame is None or not frame.is_open or _is_hidden.get():
            return result
        if not (_has_tensor(result) and _has_tensor((args, tuple(kwargs.values())))):
            return result

        # The next free name of this kind in the module; names of modules are not reused.
        plain = plain_name(func)
        stem = f"{frame.name}.{plain}" if frame.name else plain
        number = self._frames.counts.get((frame.name, plain), 0)
        while (name := f"{stem}_{number}" if number else stem) in self._modules:
            number += 1
        self._frames.counts[frame.name, plain] = number + 1

        changed = self._on_operation(name, frame.name, func, result)
        return result if changed is None else changed


def plain_name(function: Any) -> str:
    """Name of a function in torch.fx: `__radd__`, `add_` and `add` are all 'add'.

    So is `torch.ops.aten.add.Tensor`, which programs of torch.export call.
    """
    name = str(getattr(function, "overloadpacket", function).__name__)
    if name == "__get__":  # a property, such as x.mT
        return str(function.__self__.__name__)
    if name.startswith("__"):
        name = name.strip("_")
        if name[:1] in ("r", "i") and hasattr(operator, f"__{name[1:]}__"):
            name = name[1:]  # the reflected form, or the one in place
        return _AS_OPERATOR.get(name, name)
    name = name.rstrip("_") or name
    is_method = getattr(torch.Tensor, name, None) is not None and not hasattr(function, "__self__")
    return _AS_OPERATOR.get(name, name) if is_method else name


def is_function_name(name: str) -> bool:
    """Return whether PyTorch has a function that would be named like this: 'add', 'softmax_2'."""
    plain = re.sub(r"_\d+$", "", name)
    known = any(hasattr(place, plain) for place in (torch.Tensor, torch, F))
    return known or hasattr(torch.Tensor, f"__{plain.rstrip('_')}__")


def hide_operations() -> contextlib.AbstractContextManager[object]:
    """Context in which operations of featx itself are hidden from every recorder."""
    # torch.compile supports neither a recorder nor the question whether there is one.
    if torch.compiler.is_compiling() or not torch._C._len_torch_function_stack():
        return contextlib.nullcontext()
    return torch._C.DisableTorchFunction()


_is_hidden: ContextVar[bool] = ContextVar("is_hidden", default=False)
"""Whether operations of a thread are hidden from recorders, but not from other modes."""


@contextlib.contextmanager
def user_operations() -> Iterator[None]:
    """Context in which a function of the user runs in a hook.

    Its operations are hidden from recorders. Modes of the user, such as torch.set_default_device,
    apply also inside `hide_operations`.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_function_stack():
        yield
        return
    token = _is_hidden.set(True)
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        _is_hidden.reset(token)


def _has_tensor(value: object) -> bool:
    """Return whether a value is a tensor, or a tuple or list with a tensor at any depth."""
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, tuple | list) and any(_has_tensor(part) for part in value)
