"""What each layer gives and takes in a pass: its values, its time, its memory.

The trace says which layers there are; here they are measured on a picture. Every function runs the
model once or some times, keeps no tensor of it, and takes its hooks away.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from featx.base.devices import synchronise
from featx.base.nested_tensors import Path, elements
from featx.layers.call_hooks import OpenCall, every_call
from featx.layers.operations import OperationRecorder, unwatched

CallKey = tuple[str, int]
"""A module's first dotted name, and which of its calls, from 1: as in a Trace."""

MIN_RUNS, MAX_RUNS, ENOUGH_S = 3, 15, 3.0
"""Passes that are timed: after so many seconds no further one is begun."""


@dataclass(frozen=True)
class Values:
    """What a tensor holds.

    Attributes:
        dtype: 'float32', 'bfloat16', ...
        minimum, mean, maximum: of the finite values; None where there are none.
        zeros: share of values that are 0, in [0, 1]; None of an empty tensor.
        nonfinite: how many are NaN or infinite.
        count: how many values there are.
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
    """What goes into a call and what comes out of it, as it is at that moment: way in -> values."""

    inputs: Mapping[Path, Values]
    outputs: Mapping[Path, Values]

    @property
    def nonfinite(self) -> int:
        """Of all outputs."""
        return sum(values.nonfinite for values in self.outputs.values())


@dataclass(frozen=True)
class Times:
    """Medians over some warm passes.

    Attributes:
        total: ms of each call, with the calls inside it.
        own: ms of each call without them.
        pass_ms: of the whole pass without hooks.
        runs: how many passes.
    """

    total: Mapping[CallKey, float]
    own: Mapping[CallKey, float]
    pass_ms: float
    runs: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one call.

    Attributes:
        output: of the tensors it gives, whether they are new or its input's own.
        added: device memory that is taken after it and was not before; None but on CUDA.
        peak: device memory that it takes while it runs, over what was taken before; likewise.
    """

    output: int
    added: int | None = None
    peak: int | None = None


def summarise(x: torch.Tensor) -> Values:
    """What a tensor of any dtype holds, on any device."""
    dtype = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu()
    x = (torch.view_as_real(x) if x.is_complex() else x).double()
    finite = x[torch.isfinite(x)]
    some = finite.numel() > 0
    return Values(
        dtype=dtype,
        minimum=float(finite.min()) if some else None,
        mean=float(finite.mean()) if some else None,
        maximum=float(finite.max()) if some else None,
        zeros=float((x == 0).double().mean()) if x.numel() else None,
        nonfinite=x.numel() - finite.numel(),
        count=x.numel(),
    )


def measure_values(module: nn.Module, x: torch.Tensor) -> dict[CallKey, CallValues]:
    """One pass; what goes into every call and comes out of it, in the order in which they end.

    A tensor is looked at when it is made, before a later in-place operation can change it.
    """
    found: dict[CallKey, CallValues] = {}

    def begin(call: OpenCall, inputs: list[Any]) -> None:
        call.note = {path: summarise(t) for path, t in elements(inputs).items()}

    def end(call: OpenCall, number: int, output: Any) -> None:
        outputs = {path: summarise(t) for path, t in elements(output).items()}
        found[call.name, number] = CallValues(call.note, outputs)

    with every_call(module, begin, end):
        module(x.clone())
    return found


def measure_operations(module: nn.Module, x: torch.Tensor) -> dict[str, dict[Path, Values]]:
    """One pass; what the operations give that no module owns, by name, at that moment."""
    found: dict[str, dict[Path, Values]] = {}

    def seen(name: str, module: str, function: Any, result: Any) -> None:
        with unwatched():
            found[name] = {path: summarise(t) for path, t in elements(result).items()}

    watch = OperationRecorder(module, seen)
    with contextlib.ExitStack() as handles:
        for handle in watch.attach():
            handles.callback(handle.remove)
        with watch:
            module(x.clone())
    return found


def first_nonfinite(found: Mapping[CallKey, CallValues]) -> tuple[CallKey, bool] | None:
    """The first call that gives NaN or infinity, or None where no call does.

    Returns:
        the call; whether its input was finite still, so that the call is to blame.
    """
    for key, values in found.items():
        if values.nonfinite:
            return key, not any(given.nonfinite for given in values.inputs.values())
    return None


def measure_times(module: nn.Module, x: torch.Tensor) -> Times:
    """Time every call in some warm passes, and as many passes without hooks.

    On CUDA and MPS by events, which wait for nothing: where the device is faster than what feeds
    it, as for small batches, a layer's time is that of its launches.
    """
    mark, elapsed = _clock(x.device)
    whole: list[float] = []
    totals: dict[CallKey, list[float]] = {}
    owns: dict[CallKey, list[float]] = {}
    module(x.clone())
    begun = time.perf_counter()
    while len(whole) < MIN_RUNS or (
        len(whole) < MAX_RUNS and time.perf_counter() - begun < ENOUGH_S
    ):
        image = x.clone()
        synchronise(x.device)
        start = mark()
        module(image)
        stop = mark()
        synchronise(x.device)
        whole.append(elapsed(start, stop))
        for key, (total, own) in _timed_pass(module, x.clone(), mark, elapsed).items():
            totals.setdefault(key, []).append(total)
            owns.setdefault(key, []).append(own)
    return Times(
        total={key: statistics.median(values) for key, values in totals.items()},
        own={key: statistics.median(values) for key, values in owns.items()},
        pass_ms=statistics.median(whole),
        runs=len(whole),
    )


@dataclass
class _Span:
    """When a call began and ended, and the calls directly inside it."""

    begun: Any = None
    ended: Any = None
    inside: list[_Span] = field(default_factory=list)


def _timed_pass(
    module: nn.Module,
    x: torch.Tensor,
    mark: Callable[[], Any],
    elapsed: Callable[[Any, Any], float],
) -> dict[CallKey, tuple[float, float]]:
    """(ms, own ms) of every call of one pass."""
    spans: dict[CallKey, _Span] = {}

    def begin(call: OpenCall, inputs: list[Any]) -> None:
        call.note = _Span()
        call.note.begun = mark()

    def end(call: OpenCall, number: int, output: Any) -> None:
        call.note.ended = mark()
        spans[call.name, number] = call.note
        if call.parent is not None:
            call.parent.note.inside.append(call.note)

    with every_call(module, begin, end):
        module(x)
    synchronise(x.device)

    def length(span: _Span) -> float:
        return elapsed(span.begun, span.ended)

    return {
        key: (length(span), length(span) - sum(length(inner) for inner in span.inside))
        for key, span in spans.items()
    }


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """(a mark in time, ms between two marks); marks of a GPU are read after `synchronise`."""
    if device.type == "cpu":
        return time.perf_counter, lambda begun, ended: 1e3 * (ended - begun)
    events: Any = torch.cuda.Event if device.type == "cuda" else torch.mps.event.Event

    def mark() -> Any:
        event = events(enable_timing=True)
        event.record()
        return event

    return mark, lambda begun, ended: float(begun.elapsed_time(ended))


def measure_memory(module: nn.Module, x: torch.Tensor) -> dict[CallKey, Memory]:
    """One pass; the bytes that every call gives, and on CUDA those that it takes.

    CUDA's figures are its allocator's own, which is told of every tensor before the kernel runs, so
    nothing has to be waited for. They hold for a warm model: what libraries take once and keep
    is there already.
    """
    device = x.device
    found: dict[CallKey, Memory] = {}
    image = x.clone()

    def note_peak(call: OpenCall | None) -> None:
        """The peak since the last look belongs to all calls that go on."""
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        while call is not None:
            call.note[1] = max(call.note[1], peak)
            call = call.parent

    def begin(call: OpenCall, inputs: list[Any]) -> None:
        if device.type == "cuda":
            note_peak(call.parent)
            call.note = [torch.cuda.memory_allocated(device)] * 2

    def end(call: OpenCall, number: int, output: Any) -> None:
        output_bytes = sum(t.numel() * t.element_size() for t in elements(output).values())
        if device.type != "cuda":
            found[call.name, number] = Memory(output_bytes)
            return
        note_peak(call)
        before, peak = call.note
        added = torch.cuda.memory_allocated(device) - before
        found[call.name, number] = Memory(output_bytes, added, peak - before)

    with every_call(module, begin, end):
        module(image)
    return found


@dataclass(frozen=True)
class Profile:
    """What was measured of the calls of a pass; what was not asked for is empty.

    Attributes:
        values: on one picture.
        operations: of those that no module owns, the values that they give on that picture.
        times, memory: of a batch.
    """

    values: Mapping[CallKey, CallValues]
    operations: Mapping[str, Mapping[Path, Values]]
    times: Times | None
    memory: Mapping[CallKey, Memory]


def profile(module: nn.Module, x: torch.Tensor, kinds: Sequence[str]) -> Profile:
    """Measure a model on a batch.

    Args:
        module: in eval mode; called under the caller's no_grad and autocast.
        x: (B, 3, H, W), normalised, on the module's device; values are those of the first picture.
        kinds: some of 'values', 'times', 'memory'.
    """
    return Profile(
        values=measure_values(module, x[:1]) if "values" in kinds else {},
        operations=measure_operations(module, x[:1]) if "values" in kinds else {},
        times=measure_times(module, x) if "times" in kinds else None,
        memory=measure_memory(module, x) if "memory" in kinds else {},
    )
