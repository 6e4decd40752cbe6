"""Forward hooks that capture tensors of a running module and leave it as it was."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from featx.base import are_equal, elements
from featx.errors import LayerError
from featx.layers.attention import weight_hooks
from featx.layers.expected_pass import ANYTHING, Expected
from featx.layers.operations import OperationRecorder, hide_operations, module_hook
from featx.layers.output_elements import path_to, pick, with_element
from featx.layers.trace import CapturePoint

Keep = Callable[[CapturePoint, torch.Tensor], torch.Tensor]
"""Function that receives a captured tensor as the layer made it, and returns the tensor to keep."""


class StopForward(BaseException):
    """Ends a forward pass after the last capture.

    It is a BaseException so that no `except Exception` in a model catches it.
    """


@dataclass
class PassRecord:
    """Tensors and events that the hooks have captured in one forward pass.

    Gradients arrive after the forward pass, possibly after another pass has started, so they are
    written into the record of the pass to which they belong.

    Attributes:
        values: capture name -> tensor that `keep` returned, of the last call if there are several.
        fired: names of the captures in the order in which they fired.
        calls: (id of a module, kind of capture) -> number of calls so far.
        operations: operations of the modules with a captured operation, in order.
        num_until_capture: length of `operations` when the last captured operation had run.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    num_until_capture: int = 0


class _SharedRecord:
    """One record, shared by all threads."""

    def __init__(self, make: Callable[[], PassRecord]) -> None:
        self.current = make()


class _RecordPerThread(threading.local):
    """One record per thread: that of its current or last pass."""

    def __init__(self, make: Callable[[], PassRecord]) -> None:
        self.current = make()


class CaptureHooks:
    """Hooks for some capture points of one module; a context manager that removes them.

    Args:
        module: the model.
        points: capture points.
        keep: function (capture point, tensor) -> tensor that is called inside the hook, while the
            tensor is as the layer made it; for example a reduction and a cast.
        expected: what each pass of `forward` must do, and whether it ends early.
        score: function from the output of the model to the (B,) numbers whose gradients are taken;
            required by `forward` if a capture is a gradient.
        optional: names of captures that do not fire if the output of the module lacks their
            element.
        per_thread: whether passes run in several threads at the same time, each with its own
            record.

    Attributes:
        numbers: (B,) result of `score` in the last pass.
        recording: context manager that records operations if any are captured; `forward` enters it.
        thread: id of the only thread whose module calls are captured, as in `threading.get_ident`;
            None for all threads. Operations are not limited by it.
    """

    record_type: type[PassRecord] = PassRecord

    def __init__(
        self,
        module: nn.Module,
        points: Sequence[CapturePoint],
        keep: Keep = lambda point, x: x,
        expected: Expected = ANYTHING,
        score: Callable[[Any], torch.Tensor] | None = None,
        optional: Sequence[str] = (),
        per_thread: bool = False,
    ) -> None:
        self._module = module
        self._score = score
        self._keep = keep
        self._expected = expected
        self._handles: list[Any] = []
        records = _RecordPerThread if per_thread else _SharedRecord
        self._records = records(self.record_type)
        self.numbers: torch.Tensor | None = None
        self.thread: int | None = None
        self._points: dict[tuple[int, str], list[CapturePoint]] = {}
        self._operations: dict[str, list[CapturePoint]] = {}
        self._optional = set(optional)
        modules = dict(module.named_modules(remove_duplicate=False))
        for point in points:
            if point.operation:
                self._operations.setdefault(point.operation, []).append(point)
            else:
                self._points.setdefault((id(modules[point.module]), point.capture), []).append(
                    point
                )
        self._by_id = {id(m): m for m in modules.values()}
        self._modules_with_operations = {point.module for point in points if point.operation}
        self.recording: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    @property
    def record(self) -> PassRecord:
        """Record of the last pass; with `per_thread`, of the last pass of the calling thread."""
        return self._records.current

    @property
    def fired(self) -> list[str]:
        """Names of the captures in the order in which they fired in the last pass."""
        return self._records.current.fired

    def __enter__(self) -> CaptureHooks:
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def _attach(self) -> None:
        """Register all hooks."""
        if self._operations:
            _refuse_compiled(self._module, next(iter(self._operations)))
            self.recording = self._recorder = OperationRecorder(self._module, self._operation)
            self._handles += self._recorder.attach()
        # Attention first: its hooks run before the others, which then see the output as the
        # surrounding layers do.
        for (identity, capture), points in sorted(
            self._points.items(), key=lambda item: item[0][1] != "attention"
        ):
            hooked = self._by_id[identity]
            key = identity, capture
            if capture == "attention":
                take = functools.partial(self._take, key, points)
                self._handles += weight_hooks(points[0].module, hooked, take)
                continue
            if capture == "input":
                hook: Any = self._input_hook(key, points)
                handle = hooked.register_forward_pre_hook(
                    module_hook(hooked, hook), with_kwargs=True
                )
            elif capture == "grad_input":
                hook = self._grad_input_hook(key, points)
                handle = hooked.register_forward_pre_hook(
                    module_hook(hooked, hook), with_kwargs=True
                )
            elif capture == "grad_output":
                hook = self._grad_output_hook(key, points)
                handle = hooked.register_forward_hook(module_hook(hooked, hook))
            else:
                hook = self._output_hook(key, points)
                handle = hooked.register_forward_hook(module_hook(hooked, hook))
            self._handles.append(handle)

    def __exit__(self, *error: object) -> None:
        self._detach()
        self.reset()

    def _detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Start the record of another pass."""
        self._records.current = self.record_type()
        if self._operations:
            self._recorder.reset()

    @property
    def num_calls(self) -> dict[tuple[str, str], int]:
        """(module, kind of capture) -> number of calls of the module in the last pass."""
        num_by_key = self._records.current.calls
        return {
            (points[0].module, key[1]): num_by_key.get(key, 0)
            for key, points in self._points.items()
        }

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run one forward pass and return the captured tensors.

        Args:
            x: (B, 3, H, W) normalised images on the device of the model.

        Returns:
            capture name -> tensor that `keep` returned.

        Raises:
            RunError: the pass differs from the expected one.
        """
        self.reset()
        if self._score is None:
            with contextlib.suppress(StopForward), self.recording:
                self._module(x)
        else:
            self._backward(x)
        record = self._records.current
        calls = {} if self._expected.calls is None else self.num_calls
        self._expected.check(record.fired, calls, record.operations, record.num_until_capture)
        return record.values

    def _backward(self, x: torch.Tensor) -> None:
        """Run a forward and a backward pass.

        The gradient is that of the sum over all images, which for each image is the gradient of its
        own number.
        """
        assert self._score is not None
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            # A model may write to its input, which autograd does not allow for a leaf.
            model_input = leaf.clone()
            with self.recording:
                output = self._module(model_input)
            numbers = self._score(output)
            total = numbers.sum()
        self.numbers = numbers.detach()
        torch.autograd.grad(total, leaf, allow_unused=True)

    def _output_hook(self, key: tuple[int, str], points: list[CapturePoint]) -> Any:
        """Hook that captures outputs."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._keep_all(
                self._points_with_element(self._points_of_call(key, points), output), output
            )

        return hook

    def _input_hook(self, key: tuple[int, str], points: list[CapturePoint]) -> Any:
        """Hook that captures inputs."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._take(key, points, [*args, *kwargs.values()])

        return hook

    def _grad_output_hook(self, key: tuple[int, str], points: list[CapturePoint]) -> Any:
        """Hook that captures the gradient of an output."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for point in self._points_with_element(self._points_of_call(key, points), output):
                self._await_gradient(point, pick(output, point))

        return hook

    def _grad_input_hook(self, key: tuple[int, str], points: list[CapturePoint]) -> Any:
        """Hook that gives the layer a copy of its input and captures the gradient of the copy.

        The gradient of the input itself would include that of other layers which read it. A view
        would save memory, but its hook is lost if the layer writes to it.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            arguments = [*args, *kwargs.values()]
            for point in self._points_of_call(key, points):
                path = path_to(arguments, point)
                with hide_operations():
                    input_copy = elements(arguments)[path].clone()
                self._await_gradient(point, input_copy)
                arguments = with_element(arguments, path, input_copy)
            return tuple(arguments[: len(args)]), dict(
                zip(kwargs, arguments[len(args) :], strict=True)
            )

        return hook

    def _await_gradient(self, point: CapturePoint, tensor: torch.Tensor) -> None:
        """Capture the gradient of a tensor when the backward pass reaches it.

        Raises:
            LayerError: the tensor requires no gradient.
        """
        if not tensor.requires_grad:
            raise LayerError(
                f"{point.name}: no gradient passes there. It is under torch.no_grad(), or depends "
                "neither on an input nor on a parameter that requires gradients."
            )

        record = self._records.current

        def store_gradient(gradient: torch.Tensor) -> None:
            with hide_operations():
                self._store(record, point, gradient)
            record.fired.append(point.name)

        tensor.register_hook(store_gradient)  # type: ignore[no-untyped-call]

    def _points_of_call(
        self, key: tuple[int, str], points: list[CapturePoint]
    ) -> list[CapturePoint]:
        """Count a call of a module, and return the captures of this call.

        There are none if the call belongs to a thread that is not captured.
        """
        if self.thread is not None and self.thread != threading.get_ident():
            return []
        calls = self._records.current.calls
        number = calls.get(key, 0) + 1
        calls[key] = number
        return [point for point in points if point.call is None or point.call == number]

    def _points_with_element(self, points: list[CapturePoint], output: Any) -> list[CapturePoint]:
        """The captures without those that are optional and whose element is missing."""
        if not self._optional:
            return points
        elements_by_path = elements(output)
        return [
            point
            for point in points
            if point.name not in self._optional or point.path in elements_by_path
        ]

    def _take(self, key: tuple[int, str], points: list[CapturePoint], value: Any) -> None:
        """Capture tensors of a value of one call."""
        self._keep_all(self._points_of_call(key, points), value)

    def _operation(self, name: str, module: str, function: Any, result: Any) -> None:
        """Record an operation, and capture its result if requested."""
        if module not in self._modules_with_operations:
            return
        record = self._records.current
        record.operations.append(name)
        points = self._operations.get(name, [])
        if points:
            record.num_until_capture = len(record.operations)
        for point in points:
            if point.is_gradient:
                self._await_gradient(point, pick(result, point))
        self._keep_all([point for point in points if not point.is_gradient], result)

    def _keep_all(self, points: list[CapturePoint], value: Any) -> None:
        """Capture tensors of `value`, and end the pass after the last expected one."""
        record = self._records.current
        for point in points:
            with hide_operations():
                self._store(record, point, pick(value, point))
            record.fired.append(point.name)
        if points and self._expected.ends_after(record.fired):
            raise StopForward

    def _store(self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor) -> None:
        """Put a captured tensor into the record of its pass."""
        record.values[point.name] = self._keep(point, tensor)


def _refuse_compiled(module: nn.Module, operation: str) -> None:
    """Raise LayerError if the model is compiled, where operations are invisible."""
    compiled = (
        m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule"
        for m in module.modules()
    )
    if any(compiled):
        raise LayerError(
            f"{operation!r}: operations cannot be seen in a model that is compiled. Capture them "
            "in the model as it was before torch.compile, or name a module."
        )


class Copies:
    """Copies of captured tensors, to find those that are overwritten later in the pass.

    `nn.ReLU(inplace=True)` after a layer, or `out += identity`, changes a tensor that a hook has
    already seen. Only these tensors need a copy in a run. They are found by comparing values.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; a `Keep` function. Gradients are copied but not compared."""
        copy = tensor.detach().clone()
        if not point.is_gradient:
            self._pairs[point.name] = tensor.detach(), copy
        return copy

    def overwritten(self) -> frozenset[str]:
        """Names of the captures that need a copy. Call it after the pass; it drops the tensors."""
        pairs, self._pairs = self._pairs, {}
        return frozenset(name for name, (x, copy) in pairs.items() if not are_equal(x, copy))
