"""`featx.edit`: functions that replace tensors of named layers while a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from featx.base import shape_of
from featx.errors import LayerError
from featx.layers.call_hooks import LoopHooks, has_compiled
from featx.layers.layer_hooks import PassRecord
from featx.layers.layer_names import CapturePoint, parse_points
from featx.layers.operations import OperationRecorder, user_operations

Edit = Callable[[torch.Tensor], torch.Tensor]
"""Function from a tensor of a layer to its replacement, of the same shape, dtype and device."""


@contextlib.contextmanager
def edit(model: nn.Module, edits: Mapping[str, Edit]) -> Iterator[None]:
    """Replace tensors of named layers inside the block.

        with featx.edit(model, {"layer3": torch.zeros_like, "fc:input": lambda x: x.clamp(-1, 1)}):
            model(x)

    The model continues with what a function returns, and gradients flow through it. `featx.capture`
    sees the edited tensors, whichever block is the outer one; only an edit of an operation must be
    outside of a capture of one. Of two edits of the same layer, that of the inner block runs first.
    Calls in a backward pass that recomputes layers (checkpoints) are edited as well, if it runs
    inside the block; of operations, those in modules that it calls. The hooks are removed at the
    end of the block, also after an exception.

    Args:
        model: any torch.nn.Module, in train or eval mode.
        edits: name -> function. Names are as for `featx.capture`, except attention weights; the
            function of `layer4:grad_output` or `layer4:grad_input` replaces the gradient. A
            function may change its tensor in place, where autograd allows that, and return it.

    Raises:
        LayerError: there is no such layer; a function returns something else than a tensor of the
            same shape, dtype and device; or, at the end, the model ran without one of the layers.
        ModelError: the model or one of these layers is TorchScript.
    """
    if not isinstance(edits, Mapping):
        raise LayerError(
            f"edits is a {type(edits).__name__}; expected a mapping from names to functions, such "
            "as {'layer3': torch.zeros_like}."
        )
    if both := [name for name in edits if f"{name}:output" in edits]:
        raise LayerError(f"{both[0]!r} and '{both[0]}:output' name one tensor; give one function.")
    edits = {name.removesuffix(":output"): function for name, function in edits.items()}
    points = parse_points(model, list(edits))
    for name, function in edits.items():
        if not callable(function):
            raise LayerError(
                f"{name}: expected a function from the layer's tensor to its replacement, and this "
                f"is a {type(function).__name__}. For a fixed tensor: lambda tensor: replacement."
            )
    with _EditHooks(model, points, edits) as hooks:
        yield
        hooks.check_used()


class _EditHooks(LoopHooks):
    """Hooks that replace tensors, before the hooks of `featx.capture` see them."""

    runs_first = True

    def __init__(
        self, model: nn.Module, points: list[CapturePoint], edits: Mapping[str, Edit]
    ) -> None:
        for point in points:
            if point.capture == "attention":
                raise LayerError(
                    f"{point.name}: attention weights are read, and cannot be replaced. Name the "
                    f"softmax operation that computes them, such as {point.module + '.softmax'!r}."
                )
        operations = [point.name for point in points if point.operation]
        outer = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if operations and any(isinstance(mode, OperationRecorder) for mode in outer):
            raise LayerError(
                f"{operations[0]!r} is an operation, and an outer block captures or edits "
                "operations before this one: open featx.edit outside of featx.capture, and edit "
                "operations in one block."
            )
        super().__init__(model, points)
        self._edits = edits
        self._used: set[str] = set()

    def points_of_call(
        self, key: tuple[str, str], points: list[CapturePoint]
    ) -> list[CapturePoint]:
        if not self.record.is_open and (numbered := [p for p in points if p.call is not None]):
            raise LayerError(
                f"{numbered[0].name}: calls are counted inside a call of the model itself, "
                "model(x), and this call of the layer is outside of one, or recomputes it in a "
                f"backward pass. Name {numbered[0].layer!r} without a number."
            )
        return super().points_of_call(key, points)

    def take_all(self, points: list[CapturePoint], value: object) -> object:
        for point in points:
            self._used.add(point.name)
        return super().take_all(points, value)

    def take(self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
        with user_operations():
            new: object = self._edits[point.name](tensor)
        if not isinstance(new, torch.Tensor):
            raise LayerError(
                f"{point.name}: its function returned {type(new).__name__}, expected the tensor "
                "that replaces the layer's. A function that changes its tensor in place returns it."
            )
        for what, got, expected in (
            ("shape", shape_of(new), shape_of(tensor)),
            ("dtype", new.dtype, tensor.dtype),
            ("device", new.device, tensor.device),
        ):
            if got != expected:
                raise LayerError(
                    f"{point.name}: its function returned a tensor of {what} {got}, expected "
                    f"{expected} as the layer's."
                )
        return new

    def check_used(self) -> None:
        """Check that the model has called each layer, if it ran or may have run."""
        unused = [name for name in self._edits if name not in self._used]
        may_be_unseen = not self.threads and has_compiled()
        if unused and (self.has_run or may_be_unseen):
            ran = "the model ran, but " if self.has_run else ""
            raise LayerError(
                f"{ran}{', '.join(map(repr, unused))} was not called in this block, so nothing was "
                f"edited there.{self.why_unseen()}"
            )
