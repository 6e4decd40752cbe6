"""Tracing: one forward pass that records every module call and every operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name
from torch.utils.flop_counter import flop_registry

from featx.base import ModuleHooks, ObservingMode, ProcessSetting, shapes_of
from featx.layers.attention import WeightShapes
from featx.layers.operations import OperationRecorder
from featx.layers.trace import Call, Operation, Trace


def trace_forward(module: nn.Module, x: torch.Tensor) -> Trace:
    """Run one whole forward pass and record every call of a module and every operation.

    Args:
        module: model in eval mode.
        x: (B, 3, H, W) normalised images on the device of the module.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    first_names = {id(m): name for name, m in module.named_modules()}
    every_name = {
        name: first_names[id(m)] for name, m in module.named_modules(remove_duplicate=False)
    }
    counter = FlopCounter()
    call_log = _Calls(len(x), lambda: float(counter.total))
    operation_log = _Operations(call_log.calls)
    recorder = OperationRecorder(module, operation_log.add)
    with recorder.attach(), ModuleHooks() as hooks:
        call_log.attach(hooks, module, operation_log.mark_returned)
        # Fused attention kernels hide their operations from the FLOP counter.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, recorder:
            module(x)
    return Trace(call_log.calls, every_name, len(x), operation_log.operations)


class FlopCounter(ObservingMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations by the formulas of torch, as its FlopCounterMode does.

    Attributes:
        total: operations so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            # An operation without a formula may consist of operations that have one.
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=output)
        return output


class _Calls:
    """Records the calls of a pass, in the order in which they end.

    Args:
        batch_size: number of images in the pass.
        flops: function that returns the number of floating-point operations so far.

    Attributes:
        calls: the calls so far.
    """

    def __init__(self, batch_size: int, flops: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self._batch_size = batch_size
        self._flops = flops
        self._started: dict[str, list[float]] = {}
        self._weights = WeightShapes()

    def attach(
        self, hooks: ModuleHooks, model: nn.Module, on_end: Callable[[str, Any], None]
    ) -> None:
        """Attach hooks that record the calls of every module.

        Args:
            hooks: the hooks, to which these are added.
            model: the model.
            on_end: called with (name, output) when a call ends.
        """

        def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            self._started.setdefault(name, []).append(self._flops())

        def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            on_end(name, output)
            self._add(name, module, args, kwargs, output)

        for module in model.modules():
            self._weights.attach(hooks, module)
        hooks.add_all(model.named_modules(), before, after)

    def _add(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call that has ended."""
        attention = self._weights.of_call(module, args, kwargs)
        flops = self._flops() - self._started[name].pop()
        self.calls.append(
            Call(
                module=name,
                number=1 + sum(call.module == name for call in self.calls),
                type_name=type(module).__name__,
                is_leaf=not any(True for _ in module.children()),
                is_linear=_is_linear(module),
                num_parameters=sum(p.numel() for p in module.parameters()),
                outputs=shapes_of(output),
                inputs=shapes_of([*args, *kwargs.values()]),
                mflops=flops / self._batch_size / 1e6,
                attention={} if attention is None else {(): attention},
            )
        )


class _Operations:
    """Records the operations of a pass, with their place among the calls.

    Args:
        calls: list to which the calls of the pass are added.

    Attributes:
        operations: the operations so far.
    """

    def __init__(self, calls: list[Call]) -> None:
        self.operations: list[Operation] = []
        self._calls = calls
        self._last: Any = None

    def add(self, name: str, module: str, function: Any, result: Any) -> None:
        """Record an operation; a callback of `OperationRecorder`."""
        function_name = resolve_name(function) or function.__name__
        num_calls_before = len(self._calls)
        self.operations.append(
            Operation(name, module, function_name, shapes_of(result), num_calls_before, False)
        )
        self._last = result

    def mark_returned(self, module: str, output: Any) -> None:
        """Mark the last operation if the module that has just ended returned its result."""
        if self._last is not None and self.operations[-1].module == module and output is self._last:
            self.operations[-1] = replace(self.operations[-1], is_returned=True)
        self._last = None


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is nn.Linear or a 1 x 1 convolution."""
    pointwise = isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1}
    return isinstance(module, nn.Linear) or pointwise


# Switches off the fused kernel of nn.TransformerEncoderLayer, which calls no sub-module.
no_fast_path = ProcessSetting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)
