"""Recording of operations in a module's forward, such as `out += identity` or a softmax.

They are named as in torch.fx (torchvision's `get_graph_node_names`): the path of the module whose
forward calls them and the plain name of the function, numbered from the second one on:
`layer1.0.add`, `blocks.0.attn.softmax`, `layer1.0.add_1`. torch.fx traces the source of a model
once. The recorder here observes real forward passes, so it needs no second model and allows any
control flow.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from featx.base import ModuleHooks

OnOperation = Callable[[str, str, Callable[..., object], object], object]
"""Callback (name, dotted name of the module, function, result); it may return another result."""

_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
)
"""Names of Python operators that exist in reflected and in-place forms as well."""

_AS_OPERATOR = {"div": "truediv", "remainder": "mod", "and": "and_", "or": "or_"}
"""PyTorch's name for `a / b`, `a % b`, `a & b`, `a | b` -> the name in Python's `operator` module,
which torch.fx uses."""


class OperationRecorder(TorchFunctionMode):
    """Reports every operation in the forwards of a model while it is entered and attached.

    An operation counts if it takes a tensor and returns one. As in torch.fx, operations inside a
    module of torch.nn belong to that module and are not reported; the model itself is never such a
    leaf.

    PyTorch calls a mode only for operations of the thread that entered it; forward passes in other
    threads are not seen.
    """

    def __init__(self, module: nn.Module, on_operation: OnOperation) -> None:
        super().__init__()
        self._model = module
        self._on_operation = on_operation
        self._modules = {name for name, _ in module.named_modules(remove_duplicate=False)}
        self._running: list[tuple[str, bool]] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._thread: int | None = None

    def __enter__(self) -> OperationRecorder:
        self._thread = threading.get_ident()
        self.reset()  # the pass before may have run in another thread
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def attach(self) -> ModuleHooks:
        """Attach hooks that track whose forward is running, and return them."""
        hooks, modules = ModuleHooks(), dict(self._model.named_modules())
        # Frames begin before the hooks of captures run, and end after them.
        hooks.add_all(modules, self._begin_frame, first=True)
        hooks.add_all(modules, after=self._end_frame, always=True)
        return hooks

    def reset(self) -> None:
        """Start counting again for a new forward pass."""
        if self._is_recorded_thread():
            self._running.clear()
            self._counts.clear()

    def _is_recorded_thread(self) -> bool:
        """Return whether operations of the calling thread are reported."""
        return self._thread in (None, threading.get_ident())

    def _begin_frame(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        """Push a frame: the name of a module, and whether its operations are reported."""
        if not self._is_recorded_thread():
            return
        if not self._running:
            # Outside a call of the model itself, each call of a module counts its own operations.
            prefix = f"{name}." if name else ""
            self._counts = {
                key: n for key, n in self._counts.items() if not f"{key[0]}.".startswith(prefix)
            }
        self._running.append((name, name == "" or not _is_closed(module)))

    def _end_frame(self, name: str, module: nn.Module, *_: object) -> None:
        """Pop a frame, and those of inner calls that an exception interrupted."""
        while self._is_recorded_thread() and self._running and self._running.pop()[0] != name:
            pass

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._running and _has_tensor(result) and _has_tensor((args, tuple(kwargs.values()))):
            module, is_open = self._running[-1]
            if is_open:
                name = self._free_name(module, plain_name(func))
                changed = self._on_operation(name, module, func, result)
                return result if changed is None else changed
        return result

    def _free_name(self, module: str, plain: str) -> str:
        """The next free name of this kind in a module; names of modules are not reused."""
        stem = f"{module}.{plain}" if module else plain
        while True:
            number = self._counts.get((module, plain), 0)
            self._counts[module, plain] = number + 1
            name = f"{stem}_{number}" if number else stem
            if name not in self._modules:
                return name


def plain_name(function: Any) -> str:
    """Name of a function in torch.fx: `__radd__`, `add_` and `add` are all 'add'."""
    name = str(function.__name__)
    if name == "__get__":  # a property, such as x.mT
        return str(function.__self__.__name__)
    if name.startswith("__"):
        name = name.strip("_")
        if name[:1] in ("r", "i") and name[1:] in _OPERATORS:
            name = name[1:]
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


def _is_closed(module: nn.Module) -> bool:
    """Return whether operations inside a module are its own: the leaf rule of torch.fx."""
    package = type(module).__module__
    return package.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)


def _has_tensor(value: object) -> bool:
    """Return whether a value is a tensor, or a tuple or list with a tensor at any depth."""
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, tuple | list) and any(_has_tensor(part) for part in value)
