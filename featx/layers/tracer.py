"""Tracing: one forward pass that records every module call and every operation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name
from torch.utils.flop_counter import flop_registry

from featx.base import ModuleHooks, ObservingMode, ProcessSetting, shapes_of
from featx.layers.attention import hook_weights, source_of_weights
from featx.layers.call_hooks import OpenCall, every_call
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
    calls: list[Call] = []
    operations: list[Operation] = []
    attention: dict[int, tuple[int, ...]] = {}
    last: list[object] = []  # result of the last operation, until a call ends

    def add_operation(name: str, module: str, function: Any, result: object) -> None:
        called = resolve_name(function) or function.__name__
        operations.append(Operation(name, module, called, shapes_of(result), len(calls), False))
        last[:] = [result]

    def add_weights(module: nn.Module, weights: torch.Tensor) -> None:
        attention[id(module)] = tuple(weights.shape)

    def begin(call: OpenCall, inputs: list[object]) -> None:
        call.data = counter.total, shapes_of(inputs)

    def end(call: OpenCall, number: int, output: object) -> None:
        if last and operations[-1].module == call.name and output is last[0]:
            operations[-1] = replace(operations[-1], is_returned=True)
        last.clear()
        total, inputs = call.data
        weights = attention.pop(id(call.module), ())
        is_pointwise = isinstance(call.module, nn.Conv2d) and set(call.module.kernel_size) == {1}
        calls.append(
            Call(
                module=call.name,
                number=number,
                type_name=type(call.module).__name__,
                is_leaf=not any(True for _ in call.module.children()),
                is_linear=isinstance(call.module, nn.Linear) or is_pointwise,
                num_parameters=sum(p.numel() for p in call.module.parameters()),
                outputs=shapes_of(output),
                inputs=inputs,
                mflops=float(counter.total - total) / len(x) / 1e6,
                attention={(): weights} if len(weights) == 4 else {},
                gives_map=isinstance(call.module, _OF_MAPS),
            )
        )

    recorder = OperationRecorder(module, add_operation)
    with recorder.attach(), ModuleHooks() as hooks:
        for each in module.modules():
            if source_of_weights(each) is not None:
                hook_weights(hooks, "", each, functools.partial(add_weights, each))
        # Fused attention kernels hide their operations from the FLOP counter.
        with (
            every_call(module, begin, end),
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            counter,
            recorder,
        ):
            module(x)
    return Trace(calls, every_name, len(x), operations)


class FlopCounter(ObservingMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations by the formulas of torch, as its FlopCounterMode does.

    Attributes:
        total: operations so far; a multiplication and an addition are two.
    """

    total = 0

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


_OF_MAPS = (
    *(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
"""Modules whose output is (B, C, H, W)."""


# Switches off the fused kernel of nn.TransformerEncoderLayer, which calls no sub-module.
no_fast_path = ProcessSetting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)
