"""Hooks at named layers, which take, replace or follow tensors while a model runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from featx.base import ElementPath, ModuleHooks, TensorHooks, elements, shapes_of
from featx.errors import LayerError
from featx.layers.attention import hook_weights
from featx.layers.layer_names import CapturePoint, pick_path
from featx.layers.operations import OperationRecorder, hide_operations
from featx.layers.own_nodes import SharedOutput, own_node, share_memory


def path_to(value: object, point: CapturePoint) -> ElementPath:
    """Path to the tensor of a nested value that a capture point means.

    Raises LayerError if it does not exist, or the capture point is ambiguous.
    """
    if isinstance(value, torch.Tensor) and point.path == ():
        return ()
    return pick_path(point.name, shapes_of(value), point.path)


def pick(value: object, point: CapturePoint) -> torch.Tensor:
    """The tensor of a nested value that a capture point means; raises as `path_to`."""
    return elements(value)[path_to(value, point)]


def with_element(value: Any, path: ElementPath, new: torch.Tensor) -> Any:
    """A nested value with one tensor replaced; the containers around it are copied."""
    if not path:
        return new
    step, *rest = path
    if isinstance(value, Mapping):
        step = next(key for key in value if str(key) == str(step))
    is_object = not isinstance(value, Mapping | tuple | list)  # a dataclass
    new = with_element(getattr(value, str(step)) if is_object else value[step], tuple(rest), new)
    kind: Any = type(value)
    if is_object or isinstance(value, MutableMapping | list):  # with attributes and default factory
        value = copy.copy(value)
        if is_object:
            object.__setattr__(value, str(step), new)  # also if it is frozen
        else:
            value[step] = new
        return value
    if isinstance(value, Mapping):
        return kind({**value, step: new})
    items = list(value)
    items[int(step)] = new
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types
        return kind(items)
    replaced: Any = tuple.__new__(kind, items)  # without the arguments that named tuples take
    if hasattr(value, "__dict__"):
        vars(replaced).update(vars(value))
    return replaced


def lazy_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, part of the graph; on a CPU its memory is copied only when one of the two is written.

    `nn.ReLU(inplace=True)` after a layer, or `out += identity`, changes a tensor that a hook has
    already seen. Compiled code has no such copies, but finds out itself what it need not copy.
    """
    is_traced = torch.compiler.is_compiling()
    # On CUDA torch 2.14 copies the memory on the default stream, which does not wait for the
    # stream that computes the values, and `record_stream` has no effect on such a tensor
    # (`copy_data` and `recordStream` in c10/cuda/CUDACachingAllocator.cpp).
    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    # The lazy copy of a quantised tensor has no scale, and reading it crashes torch 2.14.
    if is_plain and not is_traced and not tensor.is_quantized:
        # Memory that torch's own allocator has not made cannot be shared in this way.
        with contextlib.suppress(RuntimeError):
            return tensor._lazy_clone()
    return tensor.clone()


def version_of(tensor: torch.Tensor) -> int:
    """Version counter of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


_Key = tuple[str, str]
"""Name of a module, and kind of capture."""


@dataclass
class PassRecord:
    """Tensors and events that the hooks have seen in one forward pass of one thread.

    Gradients arrive after the forward pass, possibly after another pass has started, so they are
    written into the record of the pass to which they belong.

    Attributes:
        taken: (name of a capture, its operation or '') -> what was kept of each of its calls, in
            the order in which they fired.
        calls: (name of a module, kind of capture) -> number of calls so far.
        operations: operations of the modules with a captured operation, in order.
        inputs: id of a running module -> names of captures, their inputs, the new nodes of these,
            and versions.
        given: id of a running module -> inputs that it may return, and their versions.
        shared: outputs over the memory of an input, of the pass that is running.
        is_open: whether the pass is running: a call of the model itself.
    """

    taken: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    calls: dict[_Key, int] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    inputs: dict[int, list[tuple[str, torch.Tensor, torch.Tensor, int]]] = field(
        default_factory=dict
    )
    given: dict[int, list[tuple[torch.Tensor, int]]] = field(default_factory=dict)
    shared: list[SharedOutput] = field(default_factory=list)
    is_open: bool = False

    @property
    def fired(self) -> list[str]:
        """Names of the captures, once for each call, in the order in which they fired first."""
        return [name for (name, _), values in self.taken.items() for _ in values]


class _Records(threading.local):
    """The record of the current or last pass of each thread."""

    def __init__(self) -> None:
        self.current = PassRecord()


class LayerHooks:
    """Hooks at some capture points of one model; a context manager that removes them.

    Subclasses implement `take`.

    Attributes:
        recording: context manager that records operations if any are captured.
        called_outside: name of a module -> id of the last thread that called it outside of a pass,
            as a thread does that the model starts.
    """

    runs_first = False
    """Whether the hooks run before those that the modules have."""
    in_loop = False
    """Whether the passes are those of a loop of the user, where layers are also called outside of
    one, and a name may mean an operation or an element of a module's output."""

    def __init__(self, model: nn.Module, points: Sequence[CapturePoint]) -> None:
        self._model = model
        self._records = _Records()
        self.called_outside: dict[str, int] = {}
        self._stack = contextlib.ExitStack()
        self._followed = TensorHooks()
        self._recorder: OperationRecorder | None = None
        self.recording: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._points: dict[_Key, list[CapturePoint]] = {}
        self._operations: dict[str, list[CapturePoint]] = {}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        for point in points:
            if point.operation:
                self._operations.setdefault(point.operation, []).append(point)
            else:
                self._points.setdefault((point.module, point.capture), []).append(point)
        self._modules_with_operations = {point.module for point in points if point.operation}
        self._ambiguous = {point.name for point in points if point.operation and self.in_loop}

    def take(
        self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Take a tensor as the layer made it; return the one that replaces it, or None."""
        raise NotImplementedError

    def receiver(self, record: PassRecord, point: CapturePoint) -> Callable[[torch.Tensor], object]:
        """Return the function that is called with each gradient of one call of a layer.

        What it returns, unless None, replaces the gradient.
        """

        def receive(gradient: torch.Tensor) -> torch.Tensor | None:
            with hide_operations():
                return self.take(record, point, gradient)

        return receive

    @property
    def record(self) -> PassRecord:
        """Record of the current or last pass of the calling thread."""
        return self._records.current

    def reset(self) -> None:
        """Start the record of another pass."""
        self._records.current = PassRecord()
        if self._recorder is not None:
            self._recorder.reset()

    def __enter__(self) -> Self:
        try:
            self._attach(self._stack.enter_context(ModuleHooks()))
        except BaseException:
            self.detach()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()
        self.reset()

    def detach(self) -> None:
        """Remove all hooks, also from graphs that still exist."""
        self._stack.close()
        self._followed.remove()
        self._recorder, self.recording = None, contextlib.nullcontext()

    def _attach(self, hooks: ModuleHooks) -> None:
        if self._operations:
            self.recording = self._recorder = OperationRecorder(
                self._model, self._operation, every_thread=self.in_loop
            )
            self._stack.enter_context(self._recorder.attach())
        # Attention first: its hooks run before the others, which then see the output as the
        # surrounding layers do.
        for key, points in sorted(self._points.items(), key=lambda item: item[0][1] != "attention"):
            (name, capture), hooked = key, self._modules[key[0]]
            if capture == "attention":
                hook_weights(hooks, name, hooked, functools.partial(self._see, key, points))
            elif capture in ("input", "grad_input"):
                before = functools.partial(self._before, key, points)
                after = self._end_of_inputs if capture == "grad_input" else None
                hooks.add(hooked, before, after, first=self.runs_first)
            else:
                note = self._note_versions if capture == "grad_output" else None
                after = functools.partial(self._see, key, points)
                hooks.add(hooked, note, after, first=self.runs_first)

    def _before(self, key: _Key, points: list[CapturePoint], _: Any, args: Any, kwargs: Any) -> Any:
        arguments = self._see(key, points, [*args, *kwargs.values()])
        if arguments is None:
            return None
        named = zip(kwargs, arguments[len(args) :], strict=True)
        return tuple(arguments[: len(args)]), dict(named)

    def _note_versions(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a module that may return one of its inputs itself."""
        inputs = elements([*args, *kwargs.values()]).values()
        self.record.given[id(module)] = [(tensor, version_of(tensor)) for tensor in inputs]

    def _see(self, key: _Key, points: list[CapturePoint], *received: Any) -> Any:
        """Take the tensors of one call of a module; return a value that replaces it, or None.

        They are in the last of the values that a hook has received, such as the output.
        """
        value = received[-1]
        points = self.points_of_call(key, points)
        if self._ambiguous and points:
            paths = elements(value)
            points = [p for p in points if p.name not in self._ambiguous or p.path in paths]
        value = self.take_all(points, value)
        if key[1] == "grad_output":
            self.record.given.pop(id(self._modules[key[0]]), None)
        return value

    def _end_of_inputs(self, module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
        """Hook after a module whose inputs have been replaced by nodes of their own.

        If the module wrote to an input, the model may read it again, so it gets the history of the
        node.
        """
        for name, tensor, node, version in self.record.inputs.pop(id(module), ()):
            if not node.requires_grad:
                raise LayerError(f"{name}: the layer detaches its input, so no gradient passes.")
            if node._version != version:
                arguments = elements([*args, *kwargs.values()]).values()
                if sum(share_memory(each, node) for each in arguments) > 1:
                    raise LayerError(
                        f"{name}: the layer gets one tensor twice and writes to it in place, so "
                        "gradients would be wrong. Capture the gradient of another layer."
                    )
                # The values are there already; autograd must not take this for another write.
                with _unsafe_preserve_version_counter(tensor), hide_operations():
                    tensor.copy_(node)
            if any(share_memory(each, node) for each in elements(output).values()):
                self._watch_shared(self.record, name, node, tensor)

    def points_of_call(self, key: _Key, points: list[CapturePoint]) -> list[CapturePoint]:
        """Count a call of a module, and return the captures of this call.

        Outside of a pass it has no number, and is captured in loops of the user only.
        """
        record = self.record
        if not record.is_open:
            self.called_outside[key[0]] = threading.get_ident()
            return points if self.in_loop else []
        number = record.calls[key] = record.calls.get(key, 0) + 1
        return [point for point in points if point.call is None or point.call == number]

    def _operation(self, name: str, module: str, function: object, result: object) -> object:
        """Record an operation, and take its result if requested."""
        if module not in self._modules_with_operations:
            return None
        self.record.operations.append(name)
        return self.take_all(self._operations.get(name, []), result)

    def take_all(self, points: list[CapturePoint], value: object) -> Any:
        """Take tensors of a value; return it with those that replace others, or None."""
        record, changed = self.record, None
        for point in points:
            now: Any = value if changed is None else changed
            path = path_to(now, point)
            tensor = elements(now)[path] if path else now
            with hide_operations():
                if point.is_gradient:
                    new = self._follow(record, point, tensor)
                else:
                    new = self.take(record, point, tensor)
            if new is not None and new is not tensor:
                changed = with_element(now, path, new)
        return changed

    def _follow(
        self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Capture the gradients of a tensor; return the one that replaces it, or None."""
        if not tensor.requires_grad and torch.is_inference_mode_enabled():
            raise LayerError(
                f"{point.name}: no gradient passes there under torch.inference_mode(). Leave that "
                "block, or use torch.no_grad() instead where featx itself runs the model."
            )
        if not tensor.requires_grad:
            raise LayerError(
                f"{point.name}: no gradient passes there. It is under torch.no_grad(), as in a "
                "checkpoint with use_reentrant=True (use_reentrant=False allows it), or depends "
                "neither on an input nor on a parameter that requires gradients."
            )
        call = id(self._modules[point.module])
        # The gradient of an input itself would include that of other layers which read it. Layers
        # such as nn.Identity, and dropout in eval mode, return their input.
        if point.capture == "grad_input":
            followed = own_node(tensor)
            inputs = record.inputs.setdefault(call, [])
            inputs.append((point.name, tensor, followed, followed._version))
        else:
            given = record.given.get(call, ())
            is_input = any(x is tensor and version == tensor._version for x, version in given)
            followed = own_node(tensor) if is_input or tensor._is_view() else tensor
            if followed is not tensor and any(share_memory(x, tensor) for x, _ in given):
                self._watch_shared(record, point.name, followed, tensor)
        self._followed.add(followed, self.receiver(record, point))
        return followed

    def _watch_shared(
        self, record: PassRecord, name: str, output: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Watch an output that has a node of its own over the memory of an input."""
        with hide_operations():
            shared = SharedOutput.of(name, output, source)
        if record.is_open:
            record.shared.append(shared)
            return
        # Nothing ends the pass. The hooks of a node must not refer to the node, as such a cycle
        # would never be freed.
        refuse = replace(shared, memory=None, sources=frozenset()).refuse_if_written
        for tensor in (output, source):
            self._followed.add(tensor, refuse)

    def end_pass(self, output: object) -> None:
        """End a call of the model itself; refuses it if its gradients would be wrong."""
        record = self.record
        record.is_open = False
        shared, record.shared = record.shared, []
        for each in shared if output is not None else ():  # None after an exception
            each.check(elements(output).values())
