"""Hooks of the engine: each pass is captured, checked against an earlier one, and may end early.

Captured tensors are reduced and cast inside the hook, by the `OutputCollector`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featx.errors import LayerError, RunError
from featx.layers.layer_hooks import LayerHooks, PassRecord, lazy_copy
from featx.layers.layer_names import CapturePoint
from featx.layers.reductions import TokenSample
from featx.layers.row_layout import Reduction, reduced_shape


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
            # Up to the last captured one; the first difference is named.
            operations = record.operations[: len(self.operations)]
            pairs = itertools.zip_longest(operations, self.operations, fillvalue="nothing")
            for now, before in pairs:
                if now != before:
                    raise RunError(
                        f"the forward pass differs from the trial pass: {now} ran, expected "
                        f"{before}. The model runs different operations for different batches, so "
                        "a name means different operations and its rows are not reproducible."
                    )
        if self.fired is not None and fired != list(self.fired):
            raise RunError(
                f"the forward pass differs from the trial pass: {missing or fired} "
                f"{'did not fire' if missing else 'fired'}, expected {list(self.fired)}. The model "
                "runs different layers for different batches, so its rows are not reproducible."
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


class OutputCollector:
    """Reduces tensors while they are as the layers made them, and casts them for the store.

    Attributes:
        compute_dtypes: capture name -> dtype of the layer's tensor in the last pass.
        keys: keys of the images of the next pass, for reductions that depend on them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.compute_dtypes: dict[str, torch.dtype] = {}
        self.keys: Sequence[bytes] = ()
        self._dtype = dtype
        self._reductions: dict[str, Reduction] = {}
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self._largest: dict[str, torch.Tensor] = {}

    def replica(self) -> OutputCollector:
        """A collector with the same expectations, for forward passes of another thread."""
        replica = OutputCollector(self._dtype)
        replica._reductions, replica._row_shapes = self._reductions, self._row_shapes
        return replica

    def expect(self, point: CapturePoint, row_shape: tuple[int, ...], reduction: Reduction) -> None:
        """Set the reduction of a capture that fires in every pass, for rows of this shape."""
        self._row_shapes[point.name] = row_shape
        self._reductions[point.name] = reduction

    def forget_grids(self, names: Collection[str]) -> None:
        """Record no grid of the tokens of some captures, as they lie otherwise in the image."""
        for name in names:
            if isinstance(sample := self._reductions[name], TokenSample):
                self._reductions[name] = replace(sample, grid=(0, 0))

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Captures whose rows are vectors before any reduction."""
        return tuple(name for name, shape in self._row_shapes.items() if len(shape) == 1)

    @property
    def reduced_shapes(self) -> dict[str, tuple[int, ...]]:
        """Capture name -> shape of a row after its reduction."""
        return {
            name: reduced_shape(reduction, self._row_shapes[name])
            for name, reduction in self._reductions.items()
        }

    @property
    def needs_keys(self) -> bool:
        """Whether a reduction depends on the keys of the images."""
        return any(isinstance(each, TokenSample) for each in self._reductions.values())

    def bound_args(self, name: str) -> dict[str, float | str]:
        """Parameters of the reduction of a capture that follow from its layer."""
        reduction = self._reductions.get(name)
        return reduction.bound_args if isinstance(reduction, TokenSample) else {}

    def keep(self, point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
        """Reduce and cast a captured tensor; raise RunError if its rows have another shape."""
        shape = tuple(tensor.shape)
        if shape[1:] != self._row_shapes[point.name]:
            raise RunError(
                f"{point.name} gave rows of shape {shape[1:]}, but the trial pass gave "
                f"{self._row_shapes[point.name]}."
            )
        tensor = tensor.detach()  # drop the graph, if gradients are taken
        self.compute_dtypes[point.name] = tensor.dtype
        reduction = self._reductions[point.name]
        if isinstance(reduction, TokenSample):
            reduced = reduction(tensor, self.keys)
        else:
            reduced = reduction(tensor)
        cast = self.cast(point.name, reduced)
        # It may share memory with the layer's tensor, which later layers or autograd may change.
        return lazy_copy(cast) if cast is reduced else cast

    def cast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Cast (B, ...) values to the dtype of the store; keeps magnitudes for `underflow_rows`."""
        if self._dtype == torch.float16 and value.dtype != torch.float16:
            self._largest[name] = largest_magnitudes(value)
        else:
            # An earlier pass may have computed this layer in another precision.
            self._largest.pop(name, None)
        cast = value.to(self._dtype)
        if not value.is_floating_point():
            _check_whole_numbers(name, value, cast)
        return cast

    @contextlib.contextmanager
    def keep_float32(self) -> Iterator[torch.dtype]:
        """Keep float32 inside the block, instead of the dtype of the store, which is yielded."""
        store_dtype, self._dtype = self._dtype, torch.float32
        try:
            yield store_dtype
        finally:
            self._dtype = store_dtype

    def underflow_rows(self) -> dict[str, torch.Tensor]:
        """dataset name -> (B,) bool on the device: underflow rows of the last batch.

        Their largest magnitude is above 0 and below 6.1e-5, the smallest normal number of float16.
        Smaller values lose bits, and far smaller ones become 0.
        """
        smallest = torch.finfo(torch.float16).tiny
        return {
            name: (largest > 0) & (largest < smallest) for name, largest in self._largest.items()
        }


def _check_whole_numbers(name: str, value: torch.Tensor, cast: torch.Tensor) -> None:
    """Raise LayerError if a cast has changed whole numbers, such as codes of a vocabulary."""
    changed = cast.to(value.dtype) != value
    if not bool(changed.any()):
        return
    dtype, limit = str(cast.dtype).removeprefix("torch."), round(2 / torch.finfo(cast.dtype).eps)
    advice = "Choose another layer."
    if cast.dtype != torch.float32:
        advice = "Give dtype=float32, or choose another layer."
    raise LayerError(
        f"{name} gives the whole number {int(value[changed][0])}, and {dtype} has no such number: "
        f"it has all of them up to {limit} only. {advice}"
    )


def largest_magnitudes(value: torch.Tensor) -> torch.Tensor:
    """(B,) largest magnitude of each row of (B, ...) values; 0 for rows without values."""
    if not value.numel():
        return value.new_zeros(len(value))
    return value.reshape(len(value), -1).abs().amax(1)


def check_storable(point: CapturePoint, tensor: torch.Tensor) -> None:
    """Raise LayerError for a tensor that a store cannot hold, such as a complex or an empty one."""
    advice = "Choose a layer or an operation behind it that gives plain numbers"
    if tensor.is_complex():
        kind, advice = "complex numbers", f"{advice}, such as one that takes the magnitude"
    elif tensor.dtype == torch.bool:
        kind = "true and false (torch.bool)"
    elif tensor.is_quantized:
        kind, advice = f"quantised numbers ({tensor.dtype})", f"{advice}, such as a DeQuantStub"
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout}"
    elif not tensor.numel():
        kind = f"no numbers, a tensor of shape {tuple(tensor.shape)}"
    else:
        return
    raise LayerError(f"{point.name} gives {kind}, and a store keeps real numbers. {advice}.")
