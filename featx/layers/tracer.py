"""Tracing: one forward pass, and the record of every module call and every operation in it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name
from torch.utils.flop_counter import flop_registry

from featx.base import ElementPath, ModuleHooks, ObservingMode, ProcessSetting, shapes_of
from featx.config import PRESETS
from featx.layers.attention import hook_weights, source_of_weights
from featx.layers.call_hooks import OpenCall, every_call
from featx.layers.layer_names import CapturePoint
from featx.layers.operations import OperationRecorder


@dataclass(frozen=True)
class Call:
    """One call of one module in the trace.

    Attributes:
        module: dotted name of the module.
        number: number of the call among those of the module, from 1.
        type_name: class name of the module.
        is_leaf: whether the module has no sub-modules.
        is_linear: whether the module is nn.Linear or a 1 x 1 convolution.
        num_parameters: number of parameters of the module and its sub-modules.
        outputs: path into the output -> shape, including the batch dimension.
        inputs: path into the arguments -> shape, including the batch dimension.
        mflops: millions of floating-point operations per image, two per multiply-add.
        attention: shapes of the attention weights, if the module gives access to them.
        gives_map: whether the module is a convolution, batch normalisation or pooling of torch,
            whose output is (B, C, H, W).
    """

    module: str
    number: int
    type_name: str
    is_leaf: bool
    is_linear: bool
    num_parameters: int
    outputs: Mapping[ElementPath, tuple[int, ...]]
    inputs: Mapping[ElementPath, tuple[int, ...]]
    mflops: float = 0.0
    attention: Mapping[ElementPath, tuple[int, ...]] = field(default_factory=dict)
    gives_map: bool = False

    def tensors(self, capture: str) -> Mapping[ElementPath, tuple[int, ...]]:
        """Path -> shape of the tensors that a kind of capture finds in this call."""
        if capture == "attention":
            return self.attention
        return self.outputs if capture in ("output", "grad_output") else self.inputs


@dataclass(frozen=True)
class Operation:
    """One operation that the forward of a module calls itself.

    Attributes:
        name: name as in torch.fx, such as 'layer1.0.add_1'.
        module: dotted name of the module whose forward called it.
        function: full name of the function, such as 'torch.nn.functional.relu'.
        outputs: path into the result -> shape, including the batch dimension.
        num_calls_before: number of module calls that had ended before it, which gives its place
            among them.
        is_returned: whether the module returned this result immediately.
    """

    name: str
    module: str
    function: str
    outputs: Mapping[ElementPath, tuple[int, ...]]
    num_calls_before: int
    is_returned: bool


@dataclass(frozen=True)
class Trace:
    """One forward pass: every module call, in the order in which the calls ended.

    Attributes:
        calls: the calls; the root module is last.
        names: every dotted name of every module -> its first name; shared modules have several.
        batch_size: number of images in the pass.
        operations: the operations in the order in which they ran.
        library_embedding: the capture point that equals the embedding as defined by the model's
            library, and the reduction, 'none' or 'flatten', that makes it a vector; None if the
            library defines none or the embedding was not requested.
        library_stages: names of the tensors that equal the stages of the model's library, if these
            are not the outputs of modules that it names; None otherwise.
        undecided: name of the last linear layer, if the output of the model depends on the image in
            other ways than through this layer; otherwise, or if the embedding was not requested,
            None.
        by_module: name of a module -> its calls.
        by_operation: name of an operation -> the operation.
        map_shapes: shapes of rows that a convolution or the like returns, (C, H, W), but no linear
            layer or LayerNorm, (H, W, C).
        known_cubes: those of them with three equal sides that `cubes_of_maps` has found to be
            (C, H, W) wherever they occur; None if it has not been asked.
    """

    calls: Sequence[Call]
    names: Mapping[str, str]
    batch_size: int
    operations: Sequence[Operation] = ()
    library_embedding: tuple[CapturePoint, str] | None = None
    library_stages: Sequence[str] | None = None
    undecided: str | None = None
    known_cubes: frozenset[tuple[int, ...]] | None = None
    by_module: dict[str, list[Call]] = field(init=False, default_factory=dict)
    by_operation: dict[str, Operation] = field(init=False, default_factory=dict)
    map_shapes: set[tuple[int, ...]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        turned: set[tuple[int, ...]] = set()  # (H, W, C)
        for call in self.calls:
            self.by_module.setdefault(call.module, []).append(call)
            shapes = {s[1:] for s in call.outputs.values() if s[:1] == (self.batch_size,)}
            if call.gives_map:
                self.map_shapes.update(shapes)
            elif call.type_name in ("Linear", "LayerNorm"):
                turned.update(shapes)
        self.map_shapes.difference_update(turned)
        for operation in self.operations:
            self.by_operation[operation.name] = operation

    def operations_up_to(self, points: Sequence[CapturePoint]) -> list[str]:
        """Operations of all modules with a captured operation, up to the last captured one.

        If a pass runs other operations, the same names mean other things.
        """
        wanted = {point.operation for point in points if point.operation}
        modules = {self.by_operation[name].module for name in wanted}
        names = [each.name for each in self.operations if each.module in modules]
        last = max((i for i, name in enumerate(names) if name in wanted), default=-1)
        return names[: last + 1]

    def call_name(self, call: Call) -> str:
        """The name of a call for the option `layers`: the module's name, with its number if needed.

        The number is also needed if the module is named like a preset.
        """
        numbered = len(self.by_module[call.module]) > 1 or call.module in PRESETS
        return f"{call.module}@{call.number}" if numbered else call.module

    def known_names(self) -> list[str]:
        """All names that the option `layers` accepts: modules, then operations."""
        return [*(name for name in self.names if name), *self.by_operation]


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
