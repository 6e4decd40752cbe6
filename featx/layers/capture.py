"""`featx.capture`: the tensors of named layers of any module."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from featx.base import ModuleHooks, refuse_scripted
from featx.errors import LayerError
from featx.layers.attention import needs_plain_attention, plain_attention
from featx.layers.layer_hooks import LayerHooks, PassRecord
from featx.layers.layer_names import check_operation_capture, parse_capture_point, parse_operation
from featx.layers.operations import is_function_name
from featx.layers.trace import CapturePoint


@contextlib.contextmanager
def capture(model: nn.Module, layers: str | Sequence[str]) -> Iterator[Captured]:
    """Capture outputs, inputs or gradients of named layers inside the block.

        with featx.capture(model, ["layer4", "avgpool"]) as features:
            model(x)
            features["layer4"]          # (B, 2048, 7, 7), as the layer returned it

    Each forward pass replaces the tensors of the previous one. Reading returns the tensors of the
    last pass of the reading thread: several threads may use one model, and each reads its own
    features. A gradient that belongs to an earlier pass is an error, not a value. Passes of a deep
    copy or a replica of the model are not captured.

    The tensors are copies, so in-place operations later in the model cannot change them. They stay
    attached to the graph, on their device, in their dtype. The hooks are removed at the end of the
    block, also after an exception.

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
    layers = [layers] if isinstance(layers, str) else layers
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {name: name for name in modules}
    points = [point for layer in layers for point in _parse(layer, names)]
    refuse_scripted((name, modules[name]) for name in ["", *(point.module for point in points)])
    captured = Captured(model, points)
    plain = plain_attention(model, needs_plain_attention(model, layers))
    with plain, captured.hooks as hooks, ModuleHooks() as begin:
        begin.add(model, before=captured.begin, first=True)
        with hooks.recording:
            yield captured


def _parse(layer: str, names: Mapping[str, str]) -> list[CapturePoint]:
    """The capture points that a name may mean.

    `block.mean` may be an element of a dict or the operation mean(); only a forward pass shows
    which.
    """
    parsed = parse_operation(layer)
    name, capture, path = parsed or ("", "", ())
    module, _, operation_name = name.rpartition(".")
    if (
        not operation_name
        or name in names
        or module not in names
        or not is_function_name(operation_name)
    ):
        return [parse_capture_point(layer, names)]
    operation = CapturePoint(layer.removesuffix(":output"), module, capture, None, path, name)
    if not module:
        check_operation_capture(layer, capture)
        return [operation]
    element = parse_capture_point(layer, names)
    return [element, operation] if capture in ("output", "grad_output") else [element]


class _CapturedPass(PassRecord):
    """The tensors of one forward pass.

    Attributes:
        tensors: (capture name, operation or '') -> one tensor per call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[tuple[str, str], list[torch.Tensor]] = {}


class _CaptureHooks(LayerHooks):
    """Hooks that copy the tensor of each call into the record of its forward pass."""

    record_type: type[PassRecord] = _CapturedPass

    def __exit__(self, *error: object) -> None:
        """Remove the hooks but keep the tensors, which may be read after the block."""
        self.detach()

    def take(self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor) -> None:
        """Append a copy of the tensor to those of its capture."""
        assert isinstance(record, _CapturedPass)
        record.tensors.setdefault((point.name, point.operation), []).append(tensor.clone())

    def receiver(
        self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        """Return the function that appends a copy of a gradient to those of its capture."""
        return lambda gradient: self.take(record, point, gradient)


class Captured(Mapping[str, torch.Tensor]):
    """Mapping from layer name to its tensor in the last forward pass of the reading thread.

    Args:
        model: the model.
        points: capture points of all names.
    """

    def __init__(self, model: nn.Module, points: Sequence[CapturePoint]) -> None:
        self._points = {point.name: point for point in points}
        self._threads: set[int] = set()
        operations = [point.name for point in points if point.operation]
        self.hooks = _CaptureHooks(model, points, optional=operations, per_thread=True)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start the record of a forward pass of the calling thread."""
        self._threads.add(threading.get_ident())
        self.hooks.reset()

    def __getitem__(self, layer: str) -> torch.Tensor:
        if layer not in self._points:
            raise LayerError(
                f"{layer!r} is not captured; this block captures {list(self._points)}."
            )
        point = self._points[layer]
        record = self.hooks.record
        assert isinstance(record, _CapturedPass)
        # An element of a module's output has precedence over an operation of the same name.
        of_module = record.tensors.get((layer, ""))
        tensors = of_module or record.tensors.get((layer, point.operation), [])
        if len(tensors) == 1:
            return tensors[0]
        if tensors:
            calls = ", ".join(f"{layer}@{i + 1}" for i in range(len(tensors)))
            raise LayerError(
                f"the layer {layer!r} was called {len(tensors)} times in the last forward pass; "
                f"capture one of its calls: {calls}."
            )
        if self._threads and threading.get_ident() not in self._threads:
            raise LayerError(
                f"{layer!r}: the forward passes in this block ran in other threads. Read the "
                "features in the thread that called the model."
            )
        if point.is_gradient:
            raise LayerError(
                f"no gradient of {layer!r} has arrived for the last forward pass of this thread. "
                "Call backward() on the output of that pass before the next pass starts: "
                "gradients of an earlier pass do not belong to the captured tensors."
            )
        if point.operation:
            raise LayerError(
                f"the operation {layer!r} was not called in the last forward pass, and no layer "
                f"gave an element of that name; {point.module or 'the model'} called "
                f"{', '.join(record.operations) or 'none'}."
            )
        raise LayerError(f"the layer {layer!r} was not called in the last forward pass.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)
