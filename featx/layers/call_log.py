"""`featx.watch`: every call of every module while a model runs, as lines, rows and a table."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from featx.base import check_is_module, elements, log_message, size_text, synchronise, table
from featx.layers.call_hooks import (
    COMPILED_UNSEEN,
    Edge,
    OpenCall,
    every_call,
    has_compiled,
    uncompiled,
)

_WHOLE = "(the model)"
"""Name of the model itself in the log."""


@dataclass
class CallRow:
    """One call of a module, or a gradient that comes back to its output."""

    layer: str
    """Dotted name of the module, with the number of its call from the second on: 'relu@2'; '' for
    the model itself."""
    type_name: str
    """Class name of the module."""
    depth: int
    """Number of enclosing calls."""
    is_backward: bool
    """Whether this is the backward pass of the call."""
    inputs: str
    """Shapes of the input tensors, batch included: '2x3x8x8', '2 of 2x4, scalar'."""
    outputs: str
    """Shapes of the output tensors, or of the gradient at one of them."""
    dtypes: str
    """Dtypes of the output tensors, or of the gradient."""
    devices: str
    """Devices of the output tensors, or of the gradient."""
    num_bytes: int
    """Memory of the output tensors, or of the gradient."""
    num_nonfinite: int
    """Number of NaN and infinite values in the output tensors, or in the gradient; 0 if they
    cannot be read, as on the meta device and inside torch.func."""
    milliseconds: float | None
    """Time of the call with inner calls; in the backward pass until the gradient reaches the input,
    None if it does not."""


@contextlib.contextmanager
def watch(
    model: nn.Module, show: Callable[[str], object] | None = None, keep_rows: int = 100_000
) -> Iterator[CallLog]:
    """Record every call of every module inside the block, forward and backward.

        with featx.watch(model) as log:
            model(x).sum().backward()
        print(log)

    The device is synchronised around each call, so that the times are those of the call; the model
    as a whole is slower. No tensor is kept. A compiled model runs its original code. The hooks are
    removed at the end of the block, also after an exception.

    Args:
        model: any torch.nn.Module, in train or eval mode.
        show: function that is called with a line when a call ends, such as `print`. A call with
            inner calls also has a line when it starts, which ends in dots.
        keep_rows: number of rows that are kept, the last ones.

    Yields:
        The log, whose rows appear while the model runs.

    Raises:
        ModelError: the model is no module, or TorchScript.
    """
    check_is_module(model)
    log = CallLog(model, show or (lambda line: None), keep_rows)
    calls = every_call(model, log._begin, log._end, log._record_gradient)
    with uncompiled(model), calls as running:
        try:
            yield log
        except Exception as error:
            if running.opened:
                log._end_by_error(running.opened[-1], error)
            raise
        if not log.rows and has_compiled():
            log_message(f"no call of the model was seen. {COMPILED_UNSEEN}")


@dataclass
class _CallState:
    """State of a call between its start and its end."""

    shapes: str
    has_nonfinite_input: bool
    name: str = ""
    started_at: float = 0.0
    has_start_line: bool = False
    backward: tuple[int, float, CallRow] | None = None
    """Id of a backward pass, when it reached the output, and its row."""


class CallLog:
    """Record of the calls in a `watch` block.

    Attributes:
        rows: the last rows, in the order in which calls end and gradients arrive.
        failure: the call that raised the exception which ended the block, and where; or ''.
    """

    def __init__(self, model: nn.Module, show: Callable[[str], object], keep_rows: int) -> None:
        self.rows: deque[CallRow] = deque(maxlen=keep_rows)
        self.failure = ""
        self._show = show
        self._logging_s = 0.0
        self._all_finite = True
        names = [name or _WHOLE for name, _ in model.named_modules()]
        self._name_width = max(len(name) + 2 * name.count(".") for name in names)
        self._type_width = max(len(type(m).__name__) for m in model.modules())

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Format the rows as a table."""
        header = ("layer", "type", "pass", "input", "output", "dtype", "device", "ms", "size")
        cells = [
            [
                "  " * max(0, row.depth - 1) + (row.layer or _WHOLE),
                row.type_name,
                "backward" if row.is_backward else "forward",
                row.inputs,
                row.outputs,
                row.dtypes,
                row.devices,
                "-" if row.milliseconds is None else f"{row.milliseconds:.2f}",
                size_text(row.num_bytes),
            ]
            for row in self.rows
        ]
        return table(header, cells, left=7, width=None)

    def _now(self, tensors: Sequence[torch.Tensor] = ()) -> float:
        """Seconds without the time of logging, when the devices of the tensors have no work."""
        for device in {x.device for x in tensors}:
            synchronise(device)
        return time.perf_counter() - self._logging_s

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        """Exclude the time of the block from the times of calls."""
        started_at = time.perf_counter()
        yield
        self._logging_s += time.perf_counter() - started_at

    def _begin(self, call: OpenCall, inputs: list[object]) -> None:
        """Record the inputs of a call, and write the starting line of its parent."""
        tensors = list(elements(inputs).values())
        self._now(tensors)
        with self._logging():
            outer = call.parent
            if outer is not None and not outer.data.has_start_line:
                outer.data.has_start_line = True
                self._show(f"{self._head(outer, outer.name)} -> ...")
            call.data = _CallState(_shapes(tensors), _num_nonfinite(tensors) > 0)
        call.data.started_at = self._now()

    def _end(self, call: OpenCall, number: int, output: object) -> None:
        tensors = list(elements(output).values())
        milliseconds = 1e3 * (self._now(tensors) - call.data.started_at)
        with self._logging():
            call.data.name = f"{call.name}@{number}" if number > 1 else call.name
            row = self._add(call, tensors, milliseconds)
            text = f"{self._head(call, call.data.name)} -> {row.outputs}"
            self._show(
                f"{text:<{self._name_width + self._type_width + 33}}  {row.dtypes or '-':<8}"
                f"{milliseconds:>8.2f} ms{self._alarm(call, row)}"
            )

    def _record_gradient(self, edge: Edge, gradient: torch.Tensor) -> None:
        """Record a gradient: it ends the backward pass of its consumers, and begins that of its
        producers."""
        now, backward = self._now([gradient]), torch._C._current_graph_task_id()
        for call in edge.consumers:
            if call.data.backward is not None and call.data.backward[0] == backward:
                _, started_at, row = call.data.backward
                row.milliseconds = 1e3 * (now - started_at)
        for call in edge.producers:
            with self._logging():
                row = self._add(call, [gradient], None)
                self._show(f"{self._head(call, call.data.name)} <- {row.outputs}")
            call.data.backward = backward, self._now(), row

    def _add(self, call: OpenCall, tensors: Sequence[torch.Tensor], ms: float | None) -> CallRow:
        """Add the row of a call, or of a gradient, whose time is not known yet."""
        row = CallRow(
            layer=call.data.name,
            type_name=type(call.module).__name__,
            depth=len(call.enclosing),
            is_backward=ms is None,
            inputs=call.data.shapes,
            outputs=_shapes(tensors),
            dtypes=", ".join(dict.fromkeys(str(x.dtype).partition(".")[2] for x in tensors)),
            devices=", ".join(dict.fromkeys(str(x.device) for x in tensors)),
            num_bytes=sum(x.numel() * x.element_size() for x in tensors),
            num_nonfinite=_num_nonfinite(tensors),
            milliseconds=ms,
        )
        self.rows.append(row)
        return row

    def _end_by_error(self, call: OpenCall, error: Exception) -> None:
        """Write the line of the innermost call that raised an exception, and describe it."""
        kind = type(error).__name__
        self._show(f"{self._head(call, call.name)} -> {kind}")
        outer = [c.name or _WHOLE for c in call.enclosing]
        frames = traceback.extract_tb(error.__traceback__)
        library = str(Path(torch.__file__).parent)
        where = [f for f in frames if not f.filename.startswith(library)][-1]
        self.failure = (
            f"the pass failed in {call.name or _WHOLE} ({type(call.module).__name__})"
            f"{', inside ' + ', '.join(outer) if outer else ''}: {kind}: "
            f"{' '.join(str(error).split())} ({where.filename}, line {where.lineno}). The lines "
            "above show the output of every layer before it."
        )

    def _head(self, call: OpenCall, name: str) -> str:
        indented = "  " * max(0, len(call.enclosing) - 1) + (name or _WHOLE)
        kind = type(call.module).__name__
        return f"{indented:<{self._name_width}}  {kind:<{self._type_width}}  {call.data.shapes}"

    def _alarm(self, call: OpenCall, row: CallRow) -> str:
        """Number of non-finite values in an output, and whether the input had some; or ''."""
        if not row.num_nonfinite:
            return ""
        text = f"  {row.num_nonfinite:,} NOT FINITE"
        if self._all_finite:
            text += ", as some of its input" if call.data.has_nonfinite_input else ", the first"
        self._all_finite = False
        return text


def _num_nonfinite(tensors: Sequence[torch.Tensor]) -> int:
    """Number of values that are NaN or infinite, in tensors whose values can be read."""
    number = 0
    for x in tensors:
        with contextlib.suppress(RuntimeError):  # meta, sparse, float8, or inside torch.func
            number += int((~torch.isfinite(x)).sum())
    return number


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    """Shapes of some tensors, batch included; equal shapes are counted."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        has_shape = not tensor.is_nested or tensor.layout != torch.strided
        shape = "x".join(map(str, tensor.shape)) or "scalar" if has_shape else "nested"
        counts[shape] = counts.get(shape, 0) + 1
    listed = [shape if n == 1 else f"{n} of {shape}" for shape, n in counts.items()]
    return ", ".join(listed) or "no tensor"
