"""Reduction and cast of captured tensors inside the hook."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch

from featx.errors import LayerError, RunError
from featx.layers.layer_hooks import lazy_copy
from featx.layers.reductions import TokenSample
from featx.layers.row_layout import Reduction, reduced_shape
from featx.layers.trace import CapturePoint


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
