"""Hooks of the engine: each pass is captured, checked against an earlier one, and may end early."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featx.errors import RunError
from featx.layers.layer_hooks import LayerHooks, PassRecord
from featx.layers.trace import CapturePoint


@dataclass(frozen=True)
class Expected:
    """Course of an earlier forward pass; a pass that does anything else is an error.

    Attributes:
        fired: names of the captures in the order in which they fire, or None if not yet known.
        operations: result of `Trace.operations_up_to` for the captures, or None to allow any.
        calls: (module, kind of capture) -> number of calls of the module in a whole pass, or None
            to allow any number, as in passes that end early.
        stop: whether to end the pass by an exception after the last of `fired`. Not used under
            torch.compile, which removes unused computation itself, nor for gradients, which come
            after the forward pass.
    """

    fired: Sequence[str] | None = None
    operations: Sequence[str] | None = None
    calls: Mapping[tuple[str, str], int] | None = None
    stop: bool = False

    def check(self, record: PassRecord) -> None:
        """Compare a pass with the expected one.

        Raises:
            RunError: the passes differ.
        """
        if self.calls is not None:
            check_calls(record.calls, self.calls)
        fired = record.fired
        missing = [name for name in self.fired or () if name not in fired]
        if not missing and self.operations is not None:
            operations = record.operations[: len(self.operations)]
            self._check_operations(operations, self.operations)
        if self.fired is not None and fired != list(self.fired):
            raise RunError(
                f"the forward pass differs from the trial pass: {missing or fired} "
                f"{'did not fire' if missing else 'fired'}, expected {list(self.fired)}. The model "
                "runs different layers for different batches, so its rows are not reproducible."
            )

    def _check_operations(self, operations: Sequence[str], expected: Sequence[str]) -> None:
        """Compare the operations up to the last captured one, and name the first difference."""
        for now, before in itertools.zip_longest(operations, expected, fillvalue="nothing"):
            if now != before:
                raise RunError(
                    f"the forward pass differs from the trial pass: {now} ran, expected {before}. "
                    "The model runs different operations for different batches, so a name means "
                    "different operations and its rows are not reproducible."
                )


def check_calls(
    calls: Mapping[tuple[str, str], int], expected: Mapping[tuple[str, str], int]
) -> None:
    """Compare the numbers of calls in two passes.

    Args:
        calls: (module, kind of capture) -> number of calls; a missing module was not called.
        expected: the same for the earlier pass.

    Raises:
        RunError: a number differs.
    """
    for key, num_before in expected.items():
        if (num_now := calls.get(key, 0)) != num_before:
            raise RunError(
                f"the layer {key[0]!r} is called {_times(num_now)} in a pass over images, and was "
                f"called {_times(num_before)} in the first pass. The model runs different layers "
                "for different batches, so the name means different calls and its rows are not "
                "reproducible. Choose a layer that is called equally often for every image."
            )


def _times(count: int) -> str:
    return {0: "not at all", 1: "once"}.get(count, f"{count} times")


ANYTHING = Expected()
"""Expectation for a first pass: everything is allowed."""


Keep = Callable[[CapturePoint, torch.Tensor], torch.Tensor]
"""Function that receives a captured tensor as the layer made it, and returns the tensor to keep."""


def clone_captured(point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a captured tensor; later in-place operations do not change it."""
    return tensor.detach().clone()


class StopForward(BaseException):
    """Ends a forward pass after the last capture.

    It is a BaseException so that no `except Exception` in a model catches it.
    """


class CaptureHooks(LayerHooks):
    """Hooks for some capture points of one module; a context manager that removes them.

    Args:
        module: the model.
        points: capture points.
        keep: function (capture point, tensor) -> tensor that is called inside the hook, while the
            tensor is as the layer made it; for example a reduction and a cast.
        expected: what each pass of `forward` must do, and whether it ends early.
        score: function from the output of the model to the (B,) numbers whose gradients are taken;
            required by `forward` if a capture is a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        points: Sequence[CapturePoint],
        keep: Keep = lambda point, x: x,
        expected: Expected = ANYTHING,
        score: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(module, points)
        self._score = score
        self._keep = keep
        self._expected = expected
        ends_early = expected.stop and expected.fired and score is None
        self._num_until_stop = len(expected.fired or ()) if ends_early else None

    def take(self, record: PassRecord, point: CapturePoint, tensor: torch.Tensor) -> None:
        """Put a captured tensor into the record of its pass, and end it after the last one."""
        kept = self._keep(point, tensor)
        record.taken.setdefault((point.name, point.operation), []).append(kept)
        if len(record.taken) == self._num_until_stop:
            raise StopForward

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run one forward pass and return the captured tensors.

        Args:
            x: (B, 3, H, W) normalised images on the device of the model.

        Returns:
            capture name -> tensor that `keep` returned.

        Raises:
            RunError: the pass differs from the expected one.
        """
        self.reset()
        self.called_outside.clear()
        self.record.is_open = True
        try:
            if self._score is None:
                with contextlib.suppress(StopForward), self.recording:
                    self._model(x)
            else:
                self._backward(x, self._score)
        finally:
            self.record.is_open = False
        for module in self.called_outside.keys() - {module for module, _ in self.record.calls}:
            raise RunError(
                f"the layer {module!r} is called in another thread than the model, which starts "
                "it in its forward. featx takes tensors in the thread that calls the model, as it "
                "cannot tell to which batch those of another belong. Call the layer without a "
                "thread, or choose one that is called without."
            )
        self._expected.check(self.record)
        return {name: values[-1] for (name, _), values in self.record.taken.items()}

    def _backward(self, x: torch.Tensor, score: Callable[[Any], torch.Tensor]) -> None:
        """Run a forward and a backward pass.

        The gradient is that of the sum over all images, which for each image is the gradient of its
        own number.
        """
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            # A model may write to its input, which autograd does not allow for a leaf.
            model_input = leaf.clone()
            with self.recording:
                output = self._model(model_input)
            self.end_pass(output)
            total = score(output).sum()
        torch.autograd.grad(total, leaf, allow_unused=True)
