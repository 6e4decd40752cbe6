"""What is kept of a tapped tensor: reduced and cast at once, copied where it is overwritten."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt
import torch

from featx.errors import LayerError, RunError
from featx.layers.reductions import VIEWS, Reduction
from featx.layers.trace import CapturePoint


class OutputCollector:
    """What becomes of the tensors of a pass, while each is as the layer made it.

    Args:
        dtype: of the store.
        copied: names of taps whose tensor is written to again later in the pass.

    Attributes:
        compiled: whether the pass is compiled.
        compute_dtypes: tap name -> what the layer gave in the last pass.
    """

    def __init__(self, dtype: torch.dtype, copied: Collection[str] = ()) -> None:
        self.compiled = False
        self.compute_dtypes: dict[str, torch.dtype] = {}
        self._dtype = dtype
        self._copied = set(copied)
        self._reductions: dict[str, Reduction] = {}
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self._views: set[str] = set()
        self._watched: dict[str, tuple[torch.Tensor, int]] = {}
        self._largest: dict[str, torch.Tensor] = {}

    def replica(self) -> OutputCollector:
        """Another one that expects the same, for passes of another thread."""
        replica = OutputCollector(self._dtype, self._copied)
        replica.compiled = self.compiled
        replica._reductions, replica._row_shapes = self._reductions, self._row_shapes
        replica._views = self._views
        return replica

    def expect(
        self, tap: CapturePoint, row_shape: tuple[int, ...], kind: str, reduction: Reduction
    ) -> None:
        """What a tap gives, and how it is reduced.

        Args:
            tap: fires in every pass.
            row_shape: of its tensor, without the batch.
            kind: the name of the reduction.
            reduction: bound to such rows.
        """
        self._row_shapes[tap.name] = row_shape
        self._reductions[tap.name] = reduction
        if kind in VIEWS:
            self._views.add(tap.name)

    def keep(self, tap: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
        """Reduce and cast.

        Raises:
            RunError: the tensor has another shape than expected.
        """
        shape = tuple(tensor.shape)
        if shape[1:] != self._row_shapes[tap.name]:
            raise RunError(
                f"{tap.name} gave {shape}, the probe saw rows of {self._row_shapes[tap.name]}."
            )
        tensor = tensor.detach()  # where gradients are taken, it hangs on its graph
        self.compute_dtypes[tap.name] = tensor.dtype
        reduced = self._reductions[tap.name](tensor)
        stored = self.stored(tap.name, reduced)
        if stored is not reduced or tap.name not in self._views:
            return stored
        # A compiled pass and inference tensors keep no count of writes; autograd adds to gradients.
        if tap.is_gradient:
            return stored.clone()
        if tap.name in self._copied or self.compiled or tensor.is_inference():
            return stored.clone()
        self._watched[tap.name] = (tensor, tensor._version)
        return stored

    def stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """(B, ...) of a dataset in the store's dtype; what float16 may lose is noted."""
        if self._dtype == torch.float16 and value.dtype != torch.float16:
            self._largest[name] = value.reshape(len(value), -1).abs().amax(1)
        return value.to(self._dtype)

    def copy_from_now_on(self) -> bool:
        """Whether tensors of the last pass were written to uncopied; from now on they are copied.

        A probe finds most of them, but an in-place clamp that changes nothing on noise may change
        a picture, and what is a copy in one memory format or precision is none in another.
        """
        watched, self._watched = self._watched, {}
        written = {name for name, (x, version) in watched.items() if x._version != version}
        self._copied |= written
        return bool(written)

    @contextlib.contextmanager
    def uncast(self) -> Iterator[torch.dtype]:
        """Keep float32 inside the block, which is given the store's dtype."""
        stored, self._dtype = self._dtype, torch.float32
        try:
            yield stored
        finally:
            self._dtype = stored

    def underflow_rows(self) -> dict[str, npt.NDArray[np.bool_]]:
        """dataset name -> (B,) bool: rows of the last batch that float16 hardly holds.

        Their largest value is above 0 and below 6.1e-5, the smallest number that float16 holds with
        all its bits; far below, it holds zeros only.
        """
        smallest = torch.finfo(torch.float16).tiny
        return {
            name: ((largest > 0) & (largest < smallest)).cpu().numpy()
            for name, largest in self._largest.items()
        }


def check_storable(tap: CapturePoint, tensor: torch.Tensor) -> None:
    """Refuse what a store of real numbers cannot keep.

    Raises:
        LayerError: the tensor is complex, boolean, sparse, nested or quantised.
    """
    advice = "Choose a layer or an operation behind it that gives plain numbers"
    if tensor.is_complex():
        kind, advice = "complex numbers", f"{advice}, such as one that takes the magnitude"
    elif tensor.dtype == torch.bool:
        kind = "true and false (torch.bool)"
    elif tensor.is_quantized:
        kind, advice = f"quantised numbers ({tensor.dtype})", f"{advice}, such as a DeQuantStub"
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout}"
    else:
        return
    raise LayerError(f"{tap.name} gives {kind}, and a store keeps real numbers. {advice}.")
