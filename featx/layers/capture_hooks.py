"""Forward hooks that take tensors out of a running module and leave it as it was."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from featx.base.nested_tensors import elements
from featx.errors import LayerError, RunError
from featx.layers.attention import weight_hooks
from featx.layers.operations import OperationRecorder, of_module, unwatched
from featx.layers.output_elements import path_to, pick, with_element
from featx.layers.trace import CapturePoint

Keep = Callable[[CapturePoint, torch.Tensor], torch.Tensor]


class StopForward(BaseException):
    """Ends a forward pass after the last tap; no `except Exception` in a model swallows it."""


@dataclass(frozen=True)
class Expected:
    """What a pass does, as an earlier one has shown; a pass that does anything else is an error.

    Attributes:
        fired: names of the taps in the order in which they fire; None where it is not known yet.
        operations: what `Trace.operations_up_to` says of the taps; None where any may run.
        calls: (module, kind of capture) -> how often the module is called in a whole pass; None
            where any number will do. Not looked at where the pass is ended early.
        stop: end the pass by an exception after the last of `fired`; not under torch.compile, which
            drops what nobody reads by itself, and not where gradients are taken, which come after
            the pass.
    """

    fired: Sequence[str] | None = None
    operations: Sequence[str] | None = None
    calls: Mapping[tuple[str, str], int] | None = None
    stop: bool = False

    def ends_after(self, fired: Sequence[str]) -> bool:
        """Whether the pass is to be ended now that these have fired."""
        return self.stop and self.fired is not None and len(fired) >= len(self.fired)

    def check(
        self,
        fired: Sequence[str],
        calls: Mapping[tuple[str, str], int],
        done: Sequence[str],
        num_done: int,
    ) -> None:
        """Compare a pass with what was expected.

        Args:
            fired: names of taps, in order.
            calls: (module, kind of capture) -> how often the module was called.
            done: operations of the modules that have one tapped, in order.
            num_done: how many of them there were when the last tapped one had run.

        Raises:
            RunError: it has done something else.
        """
        if self.calls is not None and not self.stop:
            check_calls(calls, self.calls)
        missing = [name for name in self.fired or () if name not in fired]
        if not missing:
            self._check_operations(done, num_done)
        if self.fired is not None and list(fired) != list(self.fired):
            raise RunError(
                f"the forward pass differs from the probe's: {missing or list(fired)} "
                f"{'did not fire' if missing else 'fired'}, expected {list(self.fired)}. The model "
                "does different things for different batches; featx cannot vouch for its rows."
            )

    def _check_operations(self, done: Sequence[str], num_done: int) -> None:
        if self.operations is None or list(done[:num_done]) == list(self.operations):
            return
        done = done[: max(num_done, len(self.operations))]
        pairs = itertools.zip_longest(done, self.operations, fillvalue="nothing")
        instead, meant = next(pair for pair in pairs if pair[0] != pair[1])
        raise RunError(
            f"the forward pass differs from the probe's: {instead} ran, expected {meant}. "
            "The model does different things for different batches, so a name means different "
            "operations; featx cannot vouch for its rows."
        )


def check_calls(
    calls: Mapping[tuple[str, str], int], expected: Mapping[tuple[str, str], int]
) -> None:
    """Compare how often modules were called in two passes.

    Args:
        calls, expected: (module, kind of capture) -> how often; a module that is not there was not
            called.

    Raises:
        RunError: they differ.
    """
    for place, before in expected.items():
        if (now := calls.get(place, 0)) != before:
            raise RunError(
                f"the layer {place[0]!r} is called {_times(now)} in a pass over images, and was "
                f"called {_times(before)} in the first pass. The model does different things for "
                "different batches, so the name stands for different things; featx cannot vouch "
                "for its rows. Choose a layer that is called equally often for any image."
            )


def _times(count: int) -> str:
    return {0: "not at all", 1: "once"}.get(count, f"{count} times")


ANYTHING = Expected()
"""Of a pass that nobody has seen yet."""


@dataclass
class PassRecord:
    """What the hooks have seen of one forward pass.

    Gradients arrive after the pass, maybe after another one has begun: they are written into the
    record of the pass that they belong to.

    Attributes:
        values: capture name -> what `keep` returned, the last call's where there are several.
        fired: names in the order in which they fired.
        calls: (id of a module, kind of capture) -> calls so far.
        done: operations of the modules that have one captured, in order.
        num_done: length of `done` when the last captured operation had run.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    num_done: int = 0


class _OneRecord:
    """The record of the running pass, whichever thread runs it."""

    def __init__(self, make: Callable[[], PassRecord]) -> None:
        self.current = make()


class _RecordPerThread(threading.local):
    """The record of the pass that runs, or ran last, in the thread that asks."""

    def __init__(self, make: Callable[[], PassRecord]) -> None:
        self.current = make()


class CaptureHooks:
    """Forward hooks for some taps of one module; they go with the `with` block.

    Args:
        module: the model.
        taps: what to take.
        keep: what becomes of a tensor at once, while it is as the layer made it: (tap, tensor)
            -> tensor, such as a reduction and a cast.
        expected: what each pass of `forward` has to do, and whether it is ended early.
        score: what the module returns -> the numbers (B,) whose gradients are taken; needed by
            `forward` where a tap is a gradient.
        optional: names of taps that stay silent where a module's output lacks their element.
        per_thread: passes run in several threads at the same time, and each thread has a record
            of its own.

    Attributes:
        numbers: (B,) what `score` gave in the last pass.
        watch: sees operations where a tap is one; entered around the pass, by `forward` as well.
        thread: the one whose passes are seen, as `threading.get_ident` names it; None for all. Of
            modules only: operations, gradients and attention weights are seen of any thread.
    """

    record_type: type[PassRecord] = PassRecord

    def __init__(
        self,
        module: nn.Module,
        taps: Sequence[CapturePoint],
        keep: Keep = lambda tap, x: x,
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
        records = _RecordPerThread if per_thread else _OneRecord
        self._records = records(self.record_type)
        self.numbers: torch.Tensor | None = None
        self.thread: int | None = None
        self._taps: dict[tuple[int, str], list[CapturePoint]] = {}
        self._operations: dict[str, list[CapturePoint]] = {}
        self._optional = set(optional)
        modules = dict(module.named_modules(remove_duplicate=False))
        for tap in taps:
            if tap.operation:
                self._operations.setdefault(tap.operation, []).append(tap)
            else:
                self._taps.setdefault((id(modules[tap.module]), tap.capture), []).append(tap)
        self._by_id = {id(m): m for m in modules.values()}
        self._watched = {tap.module for tap in taps if tap.operation}
        self.watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    @property
    def record(self) -> PassRecord:
        """Of the last pass, with `per_thread` of the calling thread's."""
        return self._records.current

    @property
    def fired(self) -> list[str]:
        """Names in the order in which they fired in the last pass."""
        return self._records.current.fired

    def __enter__(self) -> CaptureHooks:
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def _attach(self) -> None:
        if self._operations:
            _refuse_compiled(self._module, next(iter(self._operations)))
            self.watch = self._watch = OperationRecorder(self._module, self._operation)
            self._handles += self._watch.attach()
        # Attention first: the other hooks see what the layers around see.
        for (identity, capture), taps in sorted(
            self._taps.items(), key=lambda item: item[0][1] != "attention"
        ):
            target = self._by_id[identity]
            key = identity, capture
            if capture == "attention":
                take = functools.partial(self._take, key, taps)
                self._handles += weight_hooks(taps[0].module, target, take)
                continue
            if capture == "input":
                hook: Any = self._input_hook(key, taps)
                handle = target.register_forward_pre_hook(of_module(target, hook), with_kwargs=True)
            elif capture == "grad_input":
                hook = self._grad_input_hook(key, taps)
                handle = target.register_forward_pre_hook(of_module(target, hook), with_kwargs=True)
            elif capture == "grad_output":
                hook = self._grad_output_hook(key, taps)
                handle = target.register_forward_hook(of_module(target, hook))
            else:
                hook = self._output_hook(key, taps)
                handle = target.register_forward_hook(of_module(target, hook))
            self._handles.append(handle)

    def __exit__(self, *error: object) -> None:
        self._detach()
        self.reset()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Begin the record of another pass."""
        self._records.current = self.record_type()
        if self._operations:
            self._watch.reset()

    @property
    def num_calls(self) -> dict[tuple[str, str], int]:
        """(module, kind of capture) -> how often a tapped module was called in the last pass."""
        made = self._records.current.calls
        return {(taps[0].module, key[1]): made.get(key, 0) for key, taps in self._taps.items()}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """One pass; returns what the taps gave.

        Raises:
            RunError: it does other things than expected.
        """
        self.reset()
        if self._score is None:
            with contextlib.suppress(StopForward), self.watch:
                self._module(x)
        else:
            self._backward(x)
        record = self._records.current
        calls = {} if self._expected.calls is None else self.num_calls
        self._expected.check(record.fired, calls, record.done, record.num_done)
        return record.values

    def _backward(self, x: torch.Tensor) -> None:
        """A pass with gradients: of the sum of all images' numbers, so of each image's own."""
        assert self._score is not None
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            # A copy: a model may write to its input, which a leaf does not allow.
            given = leaf.clone()
            with self.watch:
                output = self._module(given)
            numbers = self._score(output)
            total = numbers.sum()
        self.numbers = numbers.detach()
        torch.autograd.grad(total, leaf, allow_unused=True)

    def _output_hook(self, key: tuple[int, str], taps: list[CapturePoint]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._keep_all(self._present(self._meant(key, taps), output), output)

        return hook

    def _input_hook(self, key: tuple[int, str], taps: list[CapturePoint]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._take(key, taps, [*args, *kwargs.values()])

        return hook

    def _grad_output_hook(self, key: tuple[int, str], taps: list[CapturePoint]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tap in self._present(self._meant(key, taps), output):
                self._await_gradient(tap, pick(output, tap))

        return hook

    def _grad_input_hook(self, key: tuple[int, str], taps: list[CapturePoint]) -> Any:
        """The layer gets a copy of its input, for other layers that read it have other gradients.

        A view would do, but its hook is lost where the layer writes to it.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            for tap in self._meant(key, taps):
                path = path_to(given, tap)
                with unwatched():
                    own = elements(given)[path].clone()
                self._await_gradient(tap, own)
                given = with_element(given, path, own)
            return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

        return hook

    def _await_gradient(self, tap: CapturePoint, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            raise LayerError(
                f"{tap.name}: no gradient passes there. It is under torch.no_grad(), or depends "
                "neither on an input nor on a parameter that requires gradients."
            )

        record = self._records.current

        def arrived(gradient: torch.Tensor) -> None:
            with unwatched():
                self._store(record, tap, gradient)
            record.fired.append(tap.name)

        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _meant(self, key: tuple[int, str], taps: list[CapturePoint]) -> list[CapturePoint]:
        """Count a call of a module, and tell which taps mean this one."""
        if self.thread is not None and self.thread != threading.get_ident():
            return []
        calls = self._records.current.calls
        number = calls.get(key, 0) + 1
        calls[key] = number
        return [tap for tap in taps if tap.call is None or tap.call == number]

    def _present(self, taps: list[CapturePoint], output: Any) -> list[CapturePoint]:
        """Those whose element is there, where it need not be."""
        if not self._optional:
            return taps
        there = elements(output)
        return [tap for tap in taps if tap.name not in self._optional or tap.path in there]

    def _take(self, key: tuple[int, str], taps: list[CapturePoint], value: Any) -> None:
        self._keep_all(self._meant(key, taps), value)

    def _operation(self, name: str, module: str, function: Any, result: Any) -> None:
        """The watch saw an operation."""
        if module not in self._watched:
            return
        record = self._records.current
        record.done.append(name)
        taps = self._operations.get(name, [])
        if taps:
            record.num_done = len(record.done)
        for tap in taps:
            if tap.is_gradient:
                self._await_gradient(tap, pick(result, tap))
        self._keep_all([tap for tap in taps if not tap.is_gradient], result)

    def _keep_all(self, taps: list[CapturePoint], value: Any) -> None:
        record = self._records.current
        for tap in taps:
            with unwatched():
                self._store(record, tap, pick(value, tap))
            record.fired.append(tap.name)
        if taps and self._expected.ends_after(record.fired):
            raise StopForward

    def _store(self, record: PassRecord, tap: CapturePoint, tensor: torch.Tensor) -> None:
        """Put a captured tensor into the record of its pass."""
        record.values[tap.name] = self._keep(tap, tensor)


def _refuse_compiled(module: nn.Module, operation: str) -> None:
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
    """Copies of what taps give, and which of the tensors were written to again later in the pass.

    `nn.ReLU(inplace=True)` after a layer, or `out += identity`, changes a tensor that a hook has
    already seen; only these need a copy in a run. They are found by comparing values.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tap: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
        """As `Keep`; autograd adds to gradients, which are copied in any case."""
        copy = tensor.detach().clone()
        if not tap.is_gradient:
            self._pairs[tap.name] = tensor.detach(), copy
        return copy

    def overwritten(self) -> frozenset[str]:
        """The names of the taps that need a copy, once the pass has ended; forgets the tensors."""
        pairs, self._pairs = self._pairs, {}
        return frozenset(name for name, (x, copy) in pairs.items() if not _same_values(x, copy))


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every element, NaN to NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
