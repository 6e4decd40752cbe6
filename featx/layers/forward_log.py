"""The forward log: one line for every module call while a forward pass runs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.base import elements, synchronise
from featx.errors import ModelError
from featx.layers.call_hooks import OpenCall, every_call


def log_forward(module: nn.Module, x: torch.Tensor, log: Callable[[str], None]) -> None:
    """Run one forward pass and log every call when it ends.

    A line holds the name, the class, the shapes of inputs and outputs, the dtype, and the
    milliseconds of the call including inner calls; the number of non-finite values follows. A call
    with inner calls also has a line when it starts, which ends in dots.

    Args:
        module: model in eval mode; the caller enters no_grad and autocast.
        x: (B, 3, H, W) normalised images on the device of the module.
        log: function that is called with each line.

    Raises:
        ModelError: the forward pass fails; the last lines name the call.
    """
    lines = _Lines(module, x.device, log)
    with every_call(dict(module.named_modules()), lines.begin, lines.end) as open_calls:
        try:
            module(x)
        except Exception as error:
            if not open_calls:
                raise
            lines.log_failure(open_calls[-1], error)
            raise ModelError(_failure_text(open_calls, error)) from error


_WHOLE = "(the model)"
"""Name of the model itself in the log."""


class _Lines:
    """The lines of one forward pass; times exclude the time that logging takes."""

    def __init__(self, module: nn.Module, device: torch.device, log: Callable[[str], None]) -> None:
        self._device = device
        self._log = log
        self._logging_s = 0.0
        self._all_finite = True
        names = [name or _WHOLE for name, _ in module.named_modules()]
        self._name_width = max(len(name) + 2 * name.count(".") for name in names)
        self._type_width = max(len(type(m).__name__) for m in module.modules())

    def begin(self, call: OpenCall, inputs: list[Any]) -> None:
        """Record the inputs of a call, and write the starting line of its parent."""
        synchronise(self._device)
        started_at = time.perf_counter()
        outer = call.parent
        if outer is not None and not outer.data.has_start_line:
            outer.data.has_start_line = True
            self._log(f"{self._head(outer, outer.name)} -> ...")
        call.data = _CallState(
            _shapes(inputs), any(_num_nonfinite(t) for t in elements(inputs).values())
        )
        ended_at = time.perf_counter()
        self._logging_s += ended_at - started_at
        call.data.started_at = ended_at - self._logging_s

    def end(self, call: OpenCall, number: int, output: Any) -> None:
        """Write the line of a call."""
        synchronise(self._device)
        ended_at = time.perf_counter()
        milliseconds = 1e3 * (ended_at - self._logging_s - call.data.started_at)
        name = f"{call.name}@{number}" if number > 1 else call.name
        tensors = elements(output)
        dtypes = ", ".join(
            dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors.values())
        )
        text = f"{self._head(call, name)} -> {_shapes(output)}"
        self._log(
            f"{text:<{self._name_width + self._type_width + 33}}  {dtypes or '-':<8}"
            f"{milliseconds:>8.2f} ms{self._alarm(call, output)}"
        )
        self._logging_s += time.perf_counter() - ended_at

    def log_failure(self, call: OpenCall, error: Exception) -> None:
        """Write the line of a call that raised an exception."""
        self._log(f"{self._head(call, call.name)} -> {type(error).__name__}")

    def _head(self, call: OpenCall, name: str) -> str:
        """Name, class and input shapes of a call, indented by depth."""
        indented = "  " * max(0, call.depth - 1) + (name or _WHOLE)
        kind = type(call.module).__name__
        return f"{indented:<{self._name_width}}  {kind:<{self._type_width}}  {call.data.shapes}"

    def _alarm(self, call: OpenCall, output: Any) -> str:
        """Number of non-finite values in an output, and whether the input had some; or ''."""
        num_nonfinite = sum(_num_nonfinite(t) for t in elements(output).values())
        if not num_nonfinite:
            return ""
        text = f"  {num_nonfinite:,} NOT FINITE"
        if self._all_finite:
            text += ", as some of its input" if call.data.has_nonfinite_input else ", the first"
        self._all_finite = False
        return text


class _CallState:
    """State of a call between its start and its end.

    Attributes:
        shapes: shapes of the inputs.
        has_nonfinite_input: whether an input has a non-finite value.
        has_start_line: whether the starting line was written.
        started_at: seconds of the clock at the start, minus the time of logging so far.
    """

    def __init__(self, shapes: str, has_nonfinite_input: bool) -> None:
        self.shapes = shapes
        self.has_nonfinite_input = has_nonfinite_input
        self.has_start_line = False
        self.started_at = 0.0


def _num_nonfinite(x: torch.Tensor) -> int:
    """Number of values that are NaN or infinite."""
    return int((~torch.isfinite(x)).sum())


def _shapes(value: Any) -> str:
    """Shapes of all tensors in a nested value, batch included; equal shapes are counted."""
    counts: dict[str, int] = {}
    for tensor in elements(value).values():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        counts[shape] = counts.get(shape, 0) + 1
    listed = [shape if n == 1 else f"{n} of {shape}" for shape, n in counts.items()]
    return ", ".join(listed) or "no tensor"


def _failure_text(open_calls: list[OpenCall], error: Exception) -> str:
    """Message for an exception, with the innermost call and the line of code outside torch."""
    call = open_calls[-1]
    outer = [c.name or _WHOLE for c in reversed(open_calls[:-1])]
    frames = traceback.extract_tb(error.__traceback__)
    library = str(Path(torch.__file__).parent)
    where = [f for f in frames if not f.filename.startswith(library)][-1]
    message = " ".join(str(error).split())
    return (
        f"the pass failed in {call.name or _WHOLE} ({type(call.module).__name__})"
        f"{', inside ' + ', '.join(outer) if outer else ''}: {type(error).__name__}: {message} "
        f"({where.filename}, line {where.lineno}). The lines above show the output of every layer "
        "before it."
    )
