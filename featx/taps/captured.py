"""featx.capture: the tensors of named layers, of any module, while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from featx.errors import LayerError
from featx.taps.attention import needs_plain_attention, plain_attention
from featx.taps.hooks import TapHooks
from featx.taps.layer_names import check_operation_capture, parse_operation, parse_tap
from featx.taps.operations import is_function_name
from featx.taps.traces import Tap


@contextlib.contextmanager
def capture(model: nn.Module, layers: str | Sequence[str]) -> Iterator[Captured]:
    """Keep the outputs, inputs or gradients of named layers while the block runs.

        with featx.capture(model, ["layer4", "avgpool"]) as features:
            model(x)
            features["layer4"]          # (B, 2048, 7, 7), as the layer gave it

    Each forward pass replaces what the one before left. The tensors are copies, so that in-place
    operations later in the model cannot change them; they stay attached to the graph, on their
    device, in their dtype. The hooks go with the block, also after an exception.

    Args:
        model: any torch.nn.Module, in whatever mode it is.
        layers: a dotted name, or several; `relu@2` for the second call of a module that is called
            several times, `encoder[0]` or `block.hidden` for one element of a nested output,
            `layer4:input` for what goes into a layer; `layer4:grad_output`, `layer4:grad_input` for
            the gradients there, which are filled in by your `loss.backward()`;
            `layer1.0.add` for an operation that no module owns, as torch.fx names it;
            `blocks.3.attn:attention` for the weights of an attention module.

    Raises:
        LayerError: there is no such module; on access, the layer was not called, or several times.
    """
    layers = [layers] if isinstance(layers, str) else layers
    names = {name: name for name, _ in model.named_modules(remove_duplicate=False)}
    captured = Captured(model, [tap for layer in layers for tap in _parse(layer, names)])
    plain = plain_attention(model, needs_plain_attention(model, layers))
    with plain, captured.hooks as hooks:
        handle = model.register_forward_pre_hook(captured.begin, prepend=True)
        try:
            with hooks.watch:
                yield captured
        finally:
            handle.remove()


def _parse(layer: str, names: Mapping[str, str]) -> list[Tap]:
    """The taps that a name may mean: only a pass tells the key `mean` of a result from a mean()."""
    parsed = parse_operation(layer)
    name, capture, path = parsed or ("", "", ())
    module, _, plain = name.rpartition(".")
    if not plain or name in names or module not in names or not is_function_name(plain):
        return [parse_tap(layer, names)]
    operation = Tap(layer.removesuffix(":output"), module, capture, None, path, name)
    if not module:
        check_operation_capture(layer, capture)
        return [operation]
    element = parse_tap(layer, names)
    return [element, operation] if capture in ("output", "grad_output") else [element]


class Captured(Mapping[str, torch.Tensor]):
    """The tensors of the last forward pass inside a `featx.capture` block, by layer name."""

    def __init__(self, model: nn.Module, taps: Sequence[Tap]) -> None:
        self._taps = {tap.name: tap for tap in taps}
        self._tensors: dict[tuple[str, str], list[torch.Tensor]] = {}
        operations = [tap.name for tap in taps if tap.operation]
        self.hooks = TapHooks(model, taps, keep=self._keep, optional=operations)

    def begin(self, module: nn.Module, args: Any) -> None:
        """A pass begins."""
        self.hooks.reset()
        self._tensors = {}

    def _keep(self, tap: Tap, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._tensors.setdefault((tap.name, tap.operation), []).append(copy)
        return copy

    def __getitem__(self, layer: str) -> torch.Tensor:
        if layer not in self._taps:
            raise LayerError(f"{layer!r} is not captured; this block captures {list(self._taps)}.")
        tap = self._taps[layer]
        # What a module gave under that name goes before an operation of that name.
        found = self._tensors.get((layer, "")) or self._tensors.get((layer, tap.operation), [])
        if len(found) == 1:
            return found[0]
        if not found and tap.operation:
            raise LayerError(
                f"the operation {layer!r} was not called in the last forward pass, and no layer "
                f"gave an element of that name; {tap.module or 'the model'} called "
                f"{', '.join(self.hooks.done) or 'none'}."
            )
        if not found:
            raise LayerError(f"the layer {layer!r} was not called in the last forward pass.")
        raise LayerError(
            f"the layer {layer!r} was called {len(found)} times in the last forward pass; capture "
            f"one of its calls: {', '.join(f'{layer}@{i + 1}' for i in range(len(found)))}."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)
