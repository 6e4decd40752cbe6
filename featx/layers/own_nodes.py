"""Nodes of their own in the graph for tensors that share the memory of others.

The gradient of a layer that returns its input, or a view of it, is read from such a node. As the
graph then has two histories of one memory, writes in place have to be watched.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from featx.errors import LayerError


class _OwnNode(torch.autograd.Function):
    """The identity, over the same memory."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def own_node(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that is no view for autograd.

    If a view is changed in place, autograd rewrites the history of the tensor that it is a view of,
    and no gradient comes to the node of the view any more: nn.Linear on (B, T, C) before
    nn.ReLU(inplace=True). The new node has the gradient of the layer's output, as without the
    change. Values, memory and version counter are shared.
    """
    node: torch.Tensor = _OwnNode.apply(tensor)
    return node


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors lie in the same memory, whatever autograd knows of it."""
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


@dataclass(frozen=True)
class SharedOutput:
    """An output of a layer that has a node of its own over the memory of an input.

    If the model writes to one of the two and reads the other later, the graph lacks the write.

    Attributes:
        name: name of the capture.
        output: the output without its graph; its version counter is that of the memory.
        version: its version when the layer returned.
        memory: the input, or the tensor that the input is a view of; None if unknown.
        sources: nodes of the input and of `memory`.
        number: sequence number of the own node; nodes that are made later have larger ones.
    """

    name: str
    output: torch.Tensor
    version: int
    memory: torch.Tensor | None
    sources: frozenset[object]
    number: int

    @classmethod
    def of(cls, name: str, output: torch.Tensor, source: torch.Tensor) -> SharedOutput:
        """Begin to watch an output and the input `source`, which both require gradients."""
        memory = source if source._base is None else source._base
        sources = frozenset(map(_node_of, (source, memory)))
        number = _node_of(output)._sequence_nr()
        return cls(name, output.detach(), output._version, memory, sources, number)

    def check(self, results: Collection[torch.Tensor]) -> None:
        """Check at the end of a pass that its graph lacks no write.

        Args:
            results: tensors that the model returned, from which the graph is followed.

        Raises:
            LayerError: it lacks one, or there are no tensors from which this could be seen.
        """
        if self.output._version == self.version:
            return
        if self.memory is not None and _node_of(self.memory) not in self.sources:
            raise self._refusal("writes to the input in place later, so gradients would be wrong")
        if not results:
            raise self._refusal(
                "writes to it in place and returns no tensors, from which the reads of it are found"
            )
        nodes = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            next_nodes = {each for each, _ in node.next_functions if each is not None}
            if next_nodes & self.sources and node._sequence_nr() > self.number:
                raise self._refusal(
                    "writes to the output in place and reads the input again, so gradients would "
                    "be wrong"
                )
            nodes += next_nodes - seen
            seen |= next_nodes

    def refuse_if_written(self, gradient: torch.Tensor) -> None:
        """Hook for gradients of a pass whose end nothing tells."""
        if self.output._version != self.version:
            raise self._refusal(
                "writes to it in place; whether gradients are right can be checked in a call of "
                "the model itself, model(x), only"
            )

    def _refusal(self, what: str) -> LayerError:
        return LayerError(
            f"{self.name}: the layer returns its input or a view of it, and the model {what}. "
            "Capture the gradient of another layer, or set inplace=False."
        )


def _node_of(tensor: torch.Tensor) -> Any:
    """Node of a tensor in the graph; None if it requires no gradients."""
    return get_gradient_edge(tensor).node if tensor.requires_grad else None
