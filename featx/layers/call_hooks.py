"""Hooks that report calls of modules: of every module, or of named layers in loops of the user."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from featx.base import (
    ModuleHooks,
    ModuleSetting,
    TensorHooks,
    elements,
    log_message,
    refuse_scripted,
)
from featx.errors import LayerError
from featx.layers.attention import plain_attention
from featx.layers.layer_hooks import LayerHooks, with_element
from featx.layers.layer_names import CapturePoint, with_capture
from featx.layers.own_nodes import own_node


@dataclass(eq=False)
class OpenCall:
    """A module call that has not ended.

    Attributes:
        name: first dotted name of the module, '' for the model itself.
        module: the module.
        parent: the enclosing call, or None for the model itself.
        backward: id of the backward pass that runs the call again (checkpoints), or -1.
        data: value that the `begin` callback stores for the `end` callback.
    """

    name: str
    module: nn.Module
    parent: OpenCall | None
    backward: int = -1
    data: Any = None

    @property
    def enclosing(self) -> list[OpenCall]:
        """The enclosing calls, innermost first."""
        return [] if self.parent is None else [self.parent, *self.parent.enclosing]


@dataclass
class Edge:
    """A tensor between modules.

    Attributes:
        producers: calls that returned it, innermost first.
        consumers: last calls that took it; their number is limited, because a model may take the
            same tensor in every pass.
    """

    producers: list[OpenCall] = field(default_factory=list)
    consumers: deque[OpenCall] = field(default_factory=lambda: deque(maxlen=64))


_SeenViews = list[tuple[int, Callable[[torch.Tensor], None]]]
"""For each view of a tensor, the version at which it was seen, and what follows its gradient once
something has been written to their memory since."""


class RunningCalls(threading.local):
    """Calls of the pass of one thread; each thread sees its own.

    Attributes:
        opened: the calls that have not ended, innermost last. After an exception these are the
            calls that it interrupted.
        num_ended: name of a module -> number of its calls that have ended.
    """

    def __init__(self) -> None:
        self.opened: list[OpenCall] = []
        self.num_ended: dict[str, int] = {}


@contextlib.contextmanager
def every_call(
    model: nn.Module,
    begin: Callable[[OpenCall, list[object]], None],
    end: Callable[[OpenCall, int, object], None],
    on_gradient: Callable[[Edge, torch.Tensor], None] | None = None,
    names: Collection[str] | None = None,
) -> Iterator[RunningCalls]:
    """Report each call of each module inside the block; the hooks are removed at its end.

    Calls that torch.compile traces are not reported, because compiled code runs no hooks.

    Args:
        model: the model.
        begin: called before each call with (the call, its arguments).
        end: called after it with (the call, its number among the calls of the module in this pass,
            from 1, its output).
        on_gradient: called in backward passes with each gradient that reaches a tensor between
            modules; None to follow no gradients.
        names: dotted names of the modules whose calls are reported; None for all.

    Yields:
        The calls that are running.

    Raises:
        ModelError: the model or a module in it is TorchScript.
    """
    modules = dict(model.named_modules())
    refuse_scripted(modules)
    running = RunningCalls()
    tensor_hooks = TensorHooks()
    edges = WeakTensorKeyDictionary()  # tensor -> its version, and its edge
    views = WeakTensorKeyDictionary()  # tensor -> _SeenViews

    def edges_of(tensors: Iterable[torch.Tensor]) -> Iterator[Edge]:
        for tensor in tensors:
            if on_gradient is None or not tensor.requires_grad:
                continue
            base = tensor if tensor._base is None else tensor._base
            views_of_base: _SeenViews = views.setdefault(base, [])  # type: ignore[no-untyped-call]
            while views_of_base and views_of_base[0][0] != base._version:
                _, follow_written = views_of_base.pop(0)
                follow_written(base)
            # A write in place makes it a different tensor for autograd, with other hooks.
            version, edge = edges.get(tensor, (None, None))  # type: ignore[no-untyped-call]
            if edge is None or version != tensor._version:
                edge = Edge()
                receive = functools.partial(on_gradient, edge)
                tensor_hooks.add(tensor, receive)
                edges[tensor] = tensor._version, edge
                if tensor is not base:
                    offset = int(tensor.storage_offset() - base.storage_offset())
                    place = tensor.size(), tensor.stride(), offset
                    follow_written = functools.partial(
                        tensor_hooks.add_to_written_view, base.grad_fn, place, receive
                    )
                    views_of_base.append((base._version, follow_written))
            yield edge

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # A new pass; an exception may have interrupted the one before.
        if name == "" and not is_inner_call(module):
            running.opened.clear()
            running.num_ended.clear()
        # A checkpoint interrupts the calls that it runs again once it has what it needs of them.
        backward = torch._C._current_graph_task_id()
        while running.opened and running.opened[-1].backward not in (-1, backward):
            running.opened.pop()
        call = OpenCall(name, module, running.opened[-1] if running.opened else None, backward)
        running.opened.append(call)
        arguments = [*args, *kwargs.values()]
        if on_gradient is not None and torch.is_grad_enabled():
            for edge in edges_of(elements(arguments).values()):
                edge.consumers.append(call)
        begin(call, arguments)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: object) -> object:
        if torch.compiler.is_compiling() or all(c.module is not module for c in running.opened):
            return None
        running.num_ended[name] = running.num_ended.get(name, 0) + 1
        while (call := running.opened.pop()).module is not module:
            pass  # the model caught an exception from this inner call
        end(call, running.num_ended[name], output)
        if on_gradient is None or not torch.is_grad_enabled():
            return None
        output = _with_own_nodes(output, [*args, *kwargs.values()])
        for edge in edges_of(elements(output).values()):
            edge.producers.append(call)
        return output

    with ModuleHooks() as hooks, contextlib.ExitStack() as stack:
        stack.callback(tensor_hooks.remove)
        chosen = modules if names is None else {name: modules[name] for name in names}
        hooks.add_all(chosen, before, after)
        yield running


def _with_own_nodes(output: object, arguments: object) -> object:
    """Return the output of a module with nodes of their own for views, whose gradients are read.

    An output that is a view of an input stays one: the model may read the input again after it has
    changed the output in place, and the gradient of that change must not be lost.
    """
    bases = [x._base if x._is_view() else x for x in elements(arguments).values()]
    for path, tensor in elements(output).items():
        is_of_input = any(tensor._base is base for base in bases)
        if tensor.requires_grad and tensor._is_view() and not is_of_input:
            output = with_element(output, path, own_node(tensor))
    return output


class LoopHooks(LayerHooks):
    """Hooks in loops of the user, where any call is a pass, in any thread.

    Inside a call of the model itself, the calls of a layer are counted from the start of that call.
    Outside of one, as in `model.forward_features(x)`, nothing tells where a pass starts, so each
    call of a layer stands for itself.

    Attributes:
        threads: ids of the threads that have called a layer.
        has_run: whether the model itself has been called.
    """

    in_loop = True

    def __init__(self, model: nn.Module, points: Sequence[CapturePoint]) -> None:
        super().__init__(model, points)
        self._requests = [with_capture(point.layer, point.capture) for point in points]
        self.threads: set[int] = set()
        self.has_run = False

    def _attach(self, hooks: ModuleHooks) -> None:
        self._stack.enter_context(uncompiled(self._model))
        self._stack.enter_context(plain_attention(self._model, self._requests))
        super()._attach(hooks)
        hooks.add(self._model, before=self._begin, first=True)
        hooks.add(self._model, after=self._end, always=True)
        self._stack.enter_context(self.recording)

    def _begin(self, module: nn.Module, args: object, kwargs: object) -> None:
        if not is_recomputed() and not is_inner_call(module):
            self._refuse_replaced()
            self.reset()
            self.record.is_open = self.has_run = True

    def _refuse_replaced(self) -> None:
        """Raise LayerError if the model has another module, without hooks, in place of a layer.

        Operations of a new module would be taken for those of the module around it.
        """
        for points in self._points.values():
            point = points[0]
            module: nn.Module | None = self._model
            for part in filter(None, point.module.split(".")):
                module = getattr(module, "_modules", {}).get(part)
            if module is not self._modules[point.module]:
                raise LayerError(
                    f"{point.name}: another module has taken the place of {point.module!r} since "
                    "the block began. Replace modules before the block."
                )
        operations = [point for points in self._operations.values() for point in points]
        modules = dict(self._model.named_modules(remove_duplicate=False)) if operations else {}
        for name in (n for n, module in modules.items() if module is not self._modules.get(n)):
            for point in operations:
                if not point.module or f"{name}.".startswith(f"{point.module}."):
                    raise LayerError(
                        f"{point.name}: the module {name!r} is new since the block began, so its "
                        "operations have no names. Replace modules before the block."
                    )

    def _end(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if not is_inner_call(module):
            self.end_pass(output)

    def why_unseen(self) -> str:
        """Sentence about calls that no hook sees, or ''."""
        if any(isinstance(module, nn.DataParallel) for module in self._model.modules()):
            return (
                " nn.DataParallel runs copies of the model on several devices, which have no "
                "hooks: call model.module, or use DistributedDataParallel."
            )
        if not self.threads and has_compiled():
            return f" {COMPILED_UNSEEN}"
        return ""

    def points_of_call(
        self, key: tuple[str, str], points: list[CapturePoint]
    ) -> list[CapturePoint]:
        self.threads.add(threading.get_ident())
        return super().points_of_call(key, points)

    def _operation(self, name: str, module: str, function: object, result: object) -> object:
        self.threads.add(threading.get_ident())
        if not self.record.is_open:
            self.record.operations.clear()
        return super()._operation(name, module, function, result)


COMPILED_UNSEEN = (
    "Compiled code calls no hooks that are added later: give featx the object that you call, the "
    "result of torch.compile, and call the model itself instead of a compiled function around it."
)


def has_compiled() -> bool:
    """Return whether this process has compiled code; many packages only import torch._dynamo."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["stats"]["unique_graphs"])


def is_recomputed() -> bool:
    """Return whether this code runs in a backward pass, where checkpoints call layers again."""
    return torch._C._current_graph_task_id() != -1


def is_inner_call(module: nn.Module) -> bool:
    """Return whether the running call of a module is inside another one of it, in a model that
    calls itself.
    """
    if torch.compiler.is_compiling():
        return False
    # The stack knows it also after an exception for which torch runs no hooks, such as Ctrl-C.
    frame: FrameType | None = sys._getframe()
    num_running = 0
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        num_running += is_call and frame.f_locals["self"] is module
        frame = frame.f_back
    return num_running > 1


_forward, _compiled_call = ModuleSetting("forward"), ModuleSetting("_compiled_call_impl")


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Call the original code of compiled modules inside the block.

    Compiled code has no operations, and calls only hooks that existed when it was compiled.
    """
    forwards: dict[nn.Module, object] = {}
    compiled_calls: dict[nn.Module, object] = {}
    modules: list[Any] = list(model.modules())
    for module in modules:
        # What torch.compile returns for another module calls that one.
        if any(each.__name__ == "OptimizedModule" for each in type(module).__mro__):
            forwards[module] = module._orig_mod.__call__
            continue
        compiled_calls[module] = None
        # A forward method that is compiled by itself: torch.compiler.disable has these attributes
        # too, and decorators around a function copy them.
        forward = module.forward
        original = getattr(forward, "_torchdynamo_orig_callable", None)
        if original is None or getattr(forward, "_torchdynamo_disable", False):
            continue
        is_bare = getattr(forward, "__wrapped__", None) is original
        if is_bare:
            is_method = isinstance(forward, MethodType)
            forwards[module] = MethodType(original, module) if is_method else original
    with (
        _forward.changed(forwards) as changed,
        _compiled_call.changed(compiled_calls) as compiled,
    ):
        if changed or compiled:
            _announce_uncompiled()
        yield


@functools.cache
def _announce_uncompiled() -> None:
    log_message(
        "the model is compiled; hooks see its original code, which runs instead of the compiled "
        "code until the hooks are removed"
    )
