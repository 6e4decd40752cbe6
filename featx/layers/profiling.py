"""Measurement of the layers of a model: values, time and memory of every call.

Every function runs one or more forward passes, keeps no tensor, and removes its hooks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featx.base import ElementPath, elements, synchronise
from featx.layers.call_hooks import OpenCall, every_call
from featx.layers.operations import OperationRecorder, hide_operations

CallKey = tuple[str, int]
"""First dotted name of a module, and the number of its call from 1, as in a Trace."""

MIN_RUNS, MAX_RUNS, ENOUGH_S = 3, 15, 3.0
"""Smallest and largest number of timed passes, and seconds after which no further pass starts."""


@dataclass(frozen=True)
class Values:
    """Summary of the values of a tensor.

    Attributes:
        dtype: 'float32', 'bfloat16', ...
        minimum: minimum of the finite values; None if there are none.
        mean: mean of the finite values; None if there are none.
        maximum: maximum of the finite values; None if there are none.
        zeros: share of values that are 0, in [0, 1]; None for an empty tensor.
        nonfinite: number of values that are NaN or infinite.
        count: number of values.
    """

    dtype: str
    minimum: float | None
    mean: float | None
    maximum: float | None
    zeros: float | None
    nonfinite: int
    count: int


@dataclass(frozen=True)
class CallValues:
    """Values of the tensors of a call at the time of the call, by their paths."""

    inputs: Mapping[ElementPath, Values]
    outputs: Mapping[ElementPath, Values]

    @property
    def nonfinite(self) -> int:
        """Number of non-finite values in all outputs."""
        return sum(values.nonfinite for values in self.outputs.values())


@dataclass(frozen=True)
class Times:
    """Median times over some passes after a warm-up.

    Attributes:
        total: milliseconds of each call, including inner calls.
        own: milliseconds of each call without inner calls.
        pass_ms: milliseconds of the whole forward pass without hooks.
        runs: number of passes.
    """

    total: Mapping[CallKey, float]
    own: Mapping[CallKey, float]
    pass_ms: float
    runs: int


@dataclass(frozen=True)
class Memory:
    """Memory of one call, in bytes.

    Attributes:
        output: size of the returned tensors, also of those that are views of the input.
        added: device memory that is allocated after the call and was not before; None except on
            CUDA.
        peak: largest device memory during the call, above what was allocated before; None except on
            CUDA.
    """

    output: int
    added: int | None = None
    peak: int | None = None


def summarise(x: torch.Tensor) -> Values:
    """Summary of the values of a tensor of any dtype on any device."""
    dtype = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu()
    x = x.dequantize() if x.is_quantized else x
    x = (torch.view_as_real(x) if x.is_complex() else x).double()
    finite = x[torch.isfinite(x)]
    has_values = finite.numel() > 0
    return Values(
        dtype=dtype,
        minimum=float(finite.min()) if has_values else None,
        mean=float(finite.mean()) if has_values else None,
        maximum=float(finite.max()) if has_values else None,
        zeros=float((x == 0).double().mean()) if x.numel() else None,
        nonfinite=x.numel() - finite.numel(),
        count=x.numel(),
    )


def measure_values(
    module: nn.Module, x: torch.Tensor
) -> tuple[dict[CallKey, CallValues], dict[str, dict[ElementPath, Values]]]:
    """Summarise the values in one forward pass: those of every call, and of every operation.

    A tensor is read when it is made, before a later in-place operation can change it.
    """
    values_of_call: dict[CallKey, CallValues] = {}
    values_of_operation: dict[str, dict[ElementPath, Values]] = {}

    def summaries(value: object) -> dict[ElementPath, Values]:
        with hide_operations():
            return {path: summarise(tensor) for path, tensor in elements(value).items()}

    def begin(call: OpenCall, inputs: list[object]) -> None:
        call.data = summaries(inputs)

    def end(call: OpenCall, number: int, output: object) -> None:
        values_of_call[call.name, number] = CallValues(call.data, summaries(output))

    def on_operation(name: str, module: str, function: object, result: object) -> None:
        values_of_operation[name] = summaries(result)

    recorder = OperationRecorder(module, on_operation)
    with recorder.attach(), every_call(module, begin, end), recorder:
        module(x.clone())
    return values_of_call, values_of_operation


def first_nonfinite(values_of_call: Mapping[CallKey, CallValues]) -> tuple[CallKey, bool] | None:
    """The first call whose output is not finite, and whether its inputs were; None without one."""
    for key, values in values_of_call.items():
        if values.nonfinite:
            return key, not any(value.nonfinite for value in values.inputs.values())
    return None


def measure_times(module: nn.Module, x: torch.Tensor) -> Times:
    """Time every call in some warm passes, and as many whole passes without hooks.

    On CUDA and MPS the times come from events, without synchronisation in between. If the device is
    faster than the host, as with small batches, the time of a layer is that of its kernel launches.
    """
    mark, elapsed = _clock(x.device)
    pass_times: list[float] = []
    total_times: dict[CallKey, list[float]] = {}
    own_times: dict[CallKey, list[float]] = {}
    module(x.clone())
    started_at = time.perf_counter()
    while len(pass_times) < MIN_RUNS or (
        len(pass_times) < MAX_RUNS and time.perf_counter() - started_at < ENOUGH_S
    ):
        image = x.clone()
        synchronise(x.device)
        start = mark()
        module(image)
        stop = mark()
        synchronise(x.device)
        pass_times.append(elapsed(start, stop))
        for key, (total, own) in _timed_pass(module, x.clone(), mark, elapsed).items():
            total_times.setdefault(key, []).append(total)
            own_times.setdefault(key, []).append(own)
    return Times(
        total={key: statistics.median(values) for key, values in total_times.items()},
        own={key: statistics.median(values) for key, values in own_times.items()},
        pass_ms=statistics.median(pass_times),
        runs=len(pass_times),
    )


def _timed_pass(
    module: nn.Module,
    x: torch.Tensor,
    mark: Callable[[], object],
    elapsed: Callable[[Any, Any], float],
) -> dict[CallKey, tuple[float, float]]:
    """Call -> (milliseconds, milliseconds without inner calls) in one forward pass."""
    marks: dict[CallKey, tuple[object, object]] = {}
    inside: dict[CallKey, list[CallKey]] = {}

    def begin(call: OpenCall, inputs: list[object]) -> None:
        call.data = mark(), []

    def end(call: OpenCall, number: int, output: object) -> None:
        key = call.name, number
        started_at, inside[key] = call.data
        marks[key] = started_at, mark()
        if call.parent is not None:
            call.parent.data[1].append(key)

    with every_call(module, begin, end):
        module(x)
    synchronise(x.device)
    total = {key: elapsed(*pair) for key, pair in marks.items()}
    return {key: (total[key], total[key] - sum(total[k] for k in inside[key])) for key in total}


def _clock(device: torch.device) -> tuple[Callable[[], object], Callable[[Any, Any], float]]:
    """Functions that take a time mark and give the milliseconds between two marks.

    Marks of a GPU can be read after `synchronise`.
    """
    if device.type == "cpu":
        return time.perf_counter, lambda start, end: 1e3 * (end - start)
    events: Any = torch.cuda.Event if device.type == "cuda" else torch.mps.event.Event

    def mark() -> object:
        event = events(enable_timing=True)
        event.record()
        return event

    return mark, lambda start, end: float(start.elapsed_time(end))


def measure_memory(module: nn.Module, x: torch.Tensor) -> dict[CallKey, Memory]:
    """Measure the memory of every call in one forward pass; device memory on CUDA only.

    The figures of CUDA come from torch's allocator, which counts a tensor before its kernel runs,
    so no synchronisation is needed. They hold for a warm model, whose libraries have already
    allocated their workspaces.
    """
    device = x.device
    memory_of_call: dict[CallKey, Memory] = {}
    image = x.clone()

    def note_peak(call: OpenCall | None) -> None:
        """Assign the peak since the last call of this function to all open calls."""
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        while call is not None:
            call.data[1] = max(call.data[1], peak)
            call = call.parent

    def begin(call: OpenCall, inputs: list[object]) -> None:
        if device.type == "cuda":
            note_peak(call.parent)
            call.data = [torch.cuda.memory_allocated(device)] * 2

    def end(call: OpenCall, number: int, output: object) -> None:
        output_bytes = sum(t.numel() * t.element_size() for t in elements(output).values())
        if device.type != "cuda":
            memory_of_call[call.name, number] = Memory(output_bytes)
            return
        note_peak(call)
        before, peak = call.data
        added = torch.cuda.memory_allocated(device) - before
        memory_of_call[call.name, number] = Memory(output_bytes, added, peak - before)

    with every_call(module, begin, end):
        module(image)
    return memory_of_call


@dataclass(frozen=True)
class Profile:
    """Measurements of the calls of a forward pass; those not requested are empty.

    Attributes:
        values: inputs and outputs of each call, for one image.
        operations: name of an operation -> path -> values, for one image.
        times: times for a batch, or None.
        memory: memory of each call for a batch.
    """

    values: Mapping[CallKey, CallValues]
    operations: Mapping[str, Mapping[ElementPath, Values]]
    times: Times | None
    memory: Mapping[CallKey, Memory]


def profile(module: nn.Module, x: torch.Tensor, kinds: Sequence[str]) -> Profile:
    """Measure a model on a batch.

    Args:
        module: model in eval mode; the caller enters no_grad and autocast.
        x: (B, 3, H, W) normalised images on the device of the module; values are those of the first
            image.
        kinds: some of 'values', 'times', 'memory'.
    """
    values, operations = measure_values(module, x[:1]) if "values" in kinds else ({}, {})
    return Profile(
        values=values,
        operations=operations,
        times=measure_times(module, x) if "times" in kinds else None,
        memory=measure_memory(module, x) if "memory" in kinds else {},
    )
