"""`featx.capture`: the tensors of named layers of any module."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from featx.base import are_equal, refuse_transformed
from featx.errors import LayerError
from featx.layers.call_hooks import LoopHooks, is_recomputed
from featx.layers.layer_hooks import PassRecord, lazy_copy, version_of
from featx.layers.layer_names import CapturePoint, parse_points, with_capture


@contextlib.contextmanager
def capture(model: nn.Module, layers: str | Sequence[str]) -> Iterator[Captured]:
    """Capture outputs, inputs or gradients of named layers inside the block.

        with featx.capture(model, ["layer4", "avgpool"]) as features:
            model(x)
            features["layer4"]          # (B, 2048, 7, 7), as the layer returned it

    Any call is a pass: `model(x)`, `model.forward_features(x)`, `model.encode_image(x)`. A call of
    the model itself, also one in its own forward, replaces all tensors of the calls before it, and
    counts the calls of a layer that is called several times. Outside of one, each layer has the
    tensor of its latest call. Reading returns the tensors of the reading thread: several threads
    may use one model, and each reads its own features. Passes of a deep copy of the model are not
    captured.

    A tensor is the layer's own output, part of the graph: `retain_grad`, `register_hook` and
    `torch.autograd.grad` work on it. If something has changed it in place since, a copy of what the
    layer returned is read, which refuses `retain_grad` and `register_hook`. The hooks are removed
    at the end of the block, also after an exception; the tensors can be read after it.

    Args:
        model: any torch.nn.Module, in train or eval mode.
        layers: one name or several. A name is the dotted name of a module; `relu@2` for the second
            call of a module that is called several times; `encoder[0]` or `block.hidden` for one
            element of a nested output; `layer4:input` for the input of a layer;
            `layer4:grad_output` or `layer4:grad_input` for gradients, available after
            `loss.backward()`; `layer1.0.add` for an operation in a module's forward, as torch.fx
            names it; `blocks.3.attn:attention` for the weights of an attention module.

    Yields:
        A mapping from the given names to tensors.

    Raises:
        LayerError: there is no such module; on access, the layer was not called in the last forward
            pass of this thread, or several times, or no gradient of that pass has arrived.
        ModelError: the model or one of these layers is TorchScript.
    """
    points = parse_points(model, [layers] if isinstance(layers, str) else layers)
    captured = Captured(model, points)
    with captured.hooks:
        yield captured


class _Call:
    """The tensor of one call of a layer."""

    def __init__(self, point: CapturePoint, tensor: torch.Tensor) -> None:
        self._name = point.name
        self._tensor, self._copy = tensor, lazy_copy(tensor)
        self._version = version_of(tensor)

    def read(self) -> torch.Tensor:
        """The layer's own tensor, or a copy if it was changed in place."""
        if not isinstance(self._copy, OverwrittenTensor) and not self._is_unchanged():
            self._copy = self._copy.as_subclass(OverwrittenTensor)
            self._copy.layer = self._name
        return self._copy if isinstance(self._copy, OverwrittenTensor) else self._tensor

    def _is_unchanged(self) -> bool:
        """Return whether the tensor still holds the values that the layer returned."""
        if version_of(self._tensor) != self._version:
            return False
        if self._tensor.layout != torch.strided or self._tensor.is_nested:
            return True
        # A write ends the sharing of memory, also one that `x.data` hides from the version counter.
        addresses = (torch._C._data_address(x) for x in (self._tensor, self._copy))  # type: ignore[attr-defined]
        return len(set(addresses)) == 1 or are_equal(self._tensor, self._copy)


class _Gradients(list[torch.Tensor]):
    """The gradients that have reached one call of a layer."""


class OverwrittenTensor(torch.Tensor):
    """Copy of a layer's tensor that was changed in place later, outside of the path of gradients.

    Attributes:
        layer: name of the layer.
    """

    layer = ""
    # Results of operations are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def retain_grad(self) -> NoReturn:
        self._refuse("retain_grad")

    def register_hook(self, hook: object) -> NoReturn:
        self._refuse("register_hook")

    def _refuse(self, method: str) -> NoReturn:
        raise LayerError(
            f"{self.layer}: {method} has no effect here. The tensor was changed in place after the "
            "layer had returned it, so what is read is a copy, which no gradient reaches. Capture "
            f"the gradient: {with_capture(self.layer.partition(':')[0], 'grad_output')!r}."
        )

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        plain = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _CaptureHooks(LoopHooks):
    """Hooks that put each call into the record of its forward pass."""

    def __exit__(self, *error: object) -> None:
        """Remove the hooks but keep the tensors, which may be read after the block."""
        self.detach()

    def take_all(self, points: list[CapturePoint], value: object) -> object:
        """Take the tensors of a value, unless a backward pass computes it again."""
        if not points or is_recomputed():
            return None
        refuse_transformed(points[0].name)
        return super().take_all(points, value)

    def take(self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor) -> None:
        self._add(record, point, _Call(point, tensor))

    def receiver(self, record: PassRecord, point: CapturePoint) -> Callable[[torch.Tensor], None]:
        """Return the function that adds a gradient to those of its call in the record."""
        gradients = _Gradients()
        self._add(record, point, gradients)
        # The graph must not keep the record, whose tensors may keep the graph.
        reference = weakref.ref(gradients)

        def receive(gradient: torch.Tensor) -> None:
            if (living := reference()) is not None:
                refuse_transformed(point.name, gradient)
                living.append(lazy_copy(gradient))  # autograd may add to it

        return receive

    def _add(self, record: PassRecord, point: CapturePoint, call: _Call | _Gradients) -> None:
        calls = record.taken.setdefault((point.name, point.operation), [])
        if not record.is_open:
            calls.clear()  # the latest call counts, and calls have no numbers
        if record.is_open or point.call is None:
            calls.append(call)


class Captured(Mapping[str, torch.Tensor]):
    """Mapping from layer name to its tensor in the last forward pass of the reading thread."""

    def __init__(self, model: nn.Module, points: Sequence[CapturePoint]) -> None:
        self._points = {point.name: point for point in points}
        self.hooks = _CaptureHooks(model, points)

    def __getitem__(self, layer: str) -> torch.Tensor:
        call = self._call(layer)
        return call.read() if isinstance(call, _Call) else call[-1]

    def get(self, layer: str, default: Any = None) -> Any:
        """The tensor of a layer, or the default if the block does not capture it."""
        if layer not in self:
            return default
        return self[layer]

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, str) and layer.removesuffix(":output") in self._points

    def gradients(self, layer: str) -> list[torch.Tensor]:
        """The gradients of a layer, one for each backward pass since its last forward pass."""
        point = self._points.get(layer)
        if point is None or not point.is_gradient:
            layer = with_capture(layer, "grad_output")
        return list(self._call(layer))

    def _call(self, layer: str) -> Any:
        """The _Call, or the _Gradients, of the only call of a layer in the last forward pass."""
        layer = layer.removesuffix(":output")
        if layer not in self._points:
            raise LayerError(
                f"{layer!r} is not captured; this block captures {list(self._points)}."
            )
        point = self._points[layer]
        record = self.hooks.record
        # An element of a module's output has precedence over an operation of the same name.
        of_module = record.taken.get((layer, ""))
        called = of_module or record.taken.get((layer, point.operation), [])
        calls = [call for call in called if call]  # no gradient may have arrived
        if len(calls) == 1:
            return calls[0]
        name, colon, kind = layer.partition(":")
        if calls:
            listed = ", ".join(f"{name}@{i + 1}{colon}{kind}" for i in range(len(calls)))
            raise LayerError(
                f"the layer {layer!r} was called {len(calls)} times in the last forward pass; "
                f"capture one of its calls: {listed}."
            )
        if of_module == []:
            raise LayerError(
                f"{layer!r}: calls are counted inside a call of the model itself, model(x), and "
                f"the last call of this layer was outside of one. Capture {point.layer!r} without "
                "a number, which is its latest call there."
            )
        threads, own_thread = self.hooks.threads, threading.get_ident()
        if not called and self.hooks.called_outside.get(point.module, own_thread) != own_thread:
            raise LayerError(
                f"the layer {layer!r} was called in another thread than the model. Read it in the "
                "thread that calls it, or call it in the thread that calls the model."
            )
        if threads and own_thread not in threads:
            raise LayerError(
                f"{layer!r}: the forward passes in this block ran in other threads. Read the "
                "features in the thread that called the model."
            )
        if called:
            raise LayerError(
                f"no gradient of {layer!r} has arrived for the last forward pass of this thread. "
                "Call backward() on the output of that pass before the next pass starts: "
                "gradients of an earlier pass do not belong to the captured tensors."
            )
        if point.operation:
            raise LayerError(
                f"the operation {layer!r} was not called in the last forward pass, and no layer "
                f"gave an element of that name; {point.module or 'the model'} called "
                f"{', '.join(record.operations) or 'none'}.{self.hooks.why_unseen()}"
            )
        raise LayerError(
            f"the layer {layer!r} was not called in the last forward pass.{self.hooks.why_unseen()}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def __repr__(self) -> str:
        return f"<Captured {', '.join(map(repr, self._points))}>"
