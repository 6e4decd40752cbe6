"""Hooks that record the gradients at the inputs and outputs of the modules of a model."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from featx.analysis.gradients.norms import norm_of_norms
from featx.base import TensorHooks, elements, may_fire
from featx.layers import OpenCall, every_call, with_own_nodes


@dataclass
class Edge:
    """A tensor between modules, and the norms of the gradients that came back through it.

    Attributes:
        norms: one scalar tensor per backward pass, on the device of the gradient.
        handle: handle of the tensor hook.
    """

    norms: list[torch.Tensor] = field(default_factory=list)
    norm: float | None = None
    """Norm over all of `norms`, set when the norms of a step are copied to the CPU. None if no
    gradient came."""
    handle: Any = None

    @property
    def may_have_gradient(self) -> bool:
        """Whether a gradient came or may still come, because the graph of the tensor exists."""
        return bool(self.norms) or may_fire(self.handle)

    @property
    def is_nonfinite(self) -> bool:
        """Whether the norm is NaN or infinite."""
        return self.norm is not None and not math.isfinite(self.norm)


@dataclass
class ModuleCall:
    """One forward call of a module.

    Attributes:
        layer: name of the module.
        start: number of the call, in the order in which calls begin.
        inputs: edges of the input tensors.
        outputs: edges of the output tensors.
        end: number of the last call that began inside this one.
    """

    layer: str
    start: int
    inputs: list[Edge]
    outputs: list[Edge] = field(default_factory=list)
    end: int = 0

    @property
    def edges(self) -> Iterator[Edge]:
        """All edges, inputs first."""
        yield from self.inputs
        yield from self.outputs


class GradientHooks:
    """Hooks of tensors at the inputs and outputs of each module.

    A full backward hook of torch would give the same gradients, but it replaces each output by a
    view, and models that write in place fail on it (ReLU in ResNet, `+=`).

    Args:
        measure: function gradient -> norm as a scalar on the device; called as each gradient
            passes.
        begin: called before each forward pass of the whole model that records a graph.
    """

    def __init__(
        self, measure: Callable[[torch.Tensor], torch.Tensor], begin: Callable[[], None]
    ) -> None:
        self._measure = measure
        self._begin = begin
        self._stack = contextlib.ExitStack()
        self._tensor_hooks = TensorHooks()
        self._edges = WeakTensorKeyDictionary()
        self._num_calls = 0
        self._prune_at = 1024
        self._calls: list[ModuleCall] = []

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Register the hooks on named modules."""
        self._stack.enter_context(every_call(modules, self._begin_call, self._end_call))

    def detach(self) -> None:
        """Remove all hooks, also from graphs that still exist."""
        self._stack.close()
        self._tensor_hooks.remove()
        self._edges.clear()
        self._calls.clear()

    def forget(self) -> None:
        """Start a new step. Calls whose graph still exists are kept without their norms."""
        for call in self._calls:
            for edge in call.edges:
                edge.norms, edge.norm = [], None
        self._prune()

    def edges(self) -> list[Edge]:
        """Return every edge once."""
        return list({id(edge): edge for call in self._calls for edge in call.edges}.values())

    def layer_norms(self) -> dict[str, float]:
        """Return the norm at the outputs of each module that a gradient reached, over its calls."""
        norms: dict[str, list[float]] = {}
        for call in self._calls:
            output_norms = [edge.norm for edge in call.outputs if edge.norm is not None]
            if output_norms:
                norms.setdefault(call.layer, []).extend(output_norms)
        return {name: norm_of_norms(parts) for name, parts in norms.items()}

    def origins(self, bad_modules: Collection[str]) -> list[str]:
        """Return the innermost modules that turned finite gradients into non-finite ones.

        Args:
            bad_modules: modules with a parameter whose gradient is not finite.
        """
        # A module that is called several times may, in one of its calls, only have passed on a
        # non-finite gradient that it was given.
        passed_on = {
            call.layer for call in self._calls if any(e.is_nonfinite for e in call.outputs)
        }
        own_modules = set(bad_modules) - passed_on
        bad = [
            c for c in self._calls if c.layer in own_modules or any(e.is_nonfinite for e in c.edges)
        ]
        bad_starts = sorted(call.start for call in bad)
        sources = []
        for call in self._calls:
            edges = [edge for edge in call.outputs if edge.norm is not None]
            has_bad = call.layer in own_modules or any(e.is_nonfinite for e in call.inputs)
            if (
                edges
                and not any(e.is_nonfinite for e in edges)
                and (has_bad or _holds(call, bad_starts))
            ):
                sources.append(call)
        source_starts = sorted(call.start for call in sources)
        return list(dict.fromkeys(c.layer for c in sources if not _holds(c, source_starts)))

    def nonfinite_input_norms(self, layers: Iterable[str]) -> list[float]:
        """Return the non-finite norms at the inputs of some modules."""
        names = set(layers)
        calls = [call for call in self._calls if call.layer in names]
        return [e.norm for c in calls for e in c.inputs if e.norm is not None and e.is_nonfinite]

    def _begin_call(self, open_call: OpenCall, inputs: list[Any]) -> None:
        """Start a call and hook its inputs."""
        if not torch.is_grad_enabled():
            return
        if open_call.name == "":
            self._begin()
        self._num_calls += 1
        call = ModuleCall(open_call.name, self._num_calls, self._edges_of(inputs))
        open_call.data = call, list(elements(inputs).values())

    def _end_call(self, open_call: OpenCall, number: int, output: Any) -> Any:
        """End a call and hook its outputs, which go on as nodes of their own if they are views."""
        if open_call.data is None or not torch.is_grad_enabled():
            return None
        call, inputs = open_call.data
        output = with_own_nodes(output, inputs)
        call.outputs = self._edges_of(output)
        call.end = self._num_calls
        self._calls.append(call)
        if len(self._calls) >= self._prune_at:
            self._prune()
        return output

    def _edges_of(self, value: Any) -> list[Edge]:
        """Return the edges of all tensors in a nested value; hook those without a hook."""
        edges = []
        for tensor in elements(value).values():
            if not tensor.requires_grad:
                continue
            # A write in place makes it a different tensor for autograd, which needs a new hook.
            version, edge = self._edges.get(tensor, (None, None))  # type: ignore[no-untyped-call]
            if edge is None or version != tensor._version:
                edge = Edge()
                edge.handle = self._tensor_hooks.add(tensor, self._receiver(edge))
                self._edges[tensor] = (tensor._version, edge)
            edges.append(edge)
        return edges

    def _receiver(self, edge: Edge) -> Callable[[torch.Tensor], None]:
        """Return a tensor hook that records the norm of each gradient at an edge."""

        def receive(grad: torch.Tensor) -> None:
            edge.norms.append(self._measure(grad))

        return receive

    def _prune(self) -> None:
        """Drop calls that no gradient can reach any more, such as those of an evaluation pass.

        Only outputs are checked, since an input may be a leaf, which stays alive.
        """
        self._calls = [
            call for call in self._calls if any(e.may_have_gradient for e in call.outputs)
        ]
        self._prune_at = 2 * len(self._calls) + 1024


def _holds(call: ModuleCall, starts: list[int]) -> bool:
    """Return whether one of the sorted starts lies inside a call."""
    return bisect_right(starts, call.end) > bisect_right(starts, call.start)
