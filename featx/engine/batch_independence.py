"""Checks on a few batches that a row depends on its own image only.

They detect batch statistics in eval mode, one scale for a whole quantised batch, changed row order,
randomness, buffers that a forward pass changes, and control flow that depends on the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from featx.base import ObservingMode, are_equal
from featx.engine.row_checks import row_tolerance
from featx.errors import ModelError

_TOLERANCE = {"fp32": 1.0, "fp16": 8.0, "bf16": 64.0}
"""Precision -> tolerance for a row computed at another position of the batch, as a multiple of
`row_tolerance`.

Kernels of one shape have so far given equal bits at every position. The tolerance allows for a
kernel that does not, which moves a value by a few units in the last place: 2^-11 in fp16, 2^-8 in
bf16.
"""

Forward = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""Function from a batch (B, 3, H, W) to its captured tensors: dataset name -> (B, ...)."""

_READERS = frozenset({"tolist", "numpy", "__array__"})
"""Methods of a tensor that read its values without an operation that a dispatch mode sees."""


def check_regrouped(
    forward: Forward, batches: Sequence[torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    """Check that the row of an image depends neither on other images nor on its position."""
    for batch in batches:
        other_values = forward(batch)
        for name, value in values.items():
            check_row(name, value[0], other_values[name][-1])


def check_among_copies(forward: Forward, images: torch.Tensor) -> None:
    """Check that each image has the same row among copies of itself as among other images.

    This is for models whose control flow may depend on the data: an image that changes the flow
    changes it for the whole batch.
    """
    together = forward(images.clone())
    for i, image in enumerate(images):
        alone = forward(image.repeat(2, 1, 1, 1))
        for name, value in together.items():
            check_row(name, value[i], alone[name][0])


def check_row(
    name: str, row: torch.Tensor, other: torch.Tensor, rounding: float = 0.0, scale: float = 1.0
) -> None:
    """Raise ModelError if the rows of an image in two batches differ by more than the tolerance.

    `rounding` is an absolute tolerance, in the unit of the row, to which that of `row_tolerance` is
    added, times `scale`. The name is that of the dataset, for the message.
    """
    row, other = row.cpu().double(), other.cpu().double()  # MPS has no float64
    tolerance = scale * row_tolerance(row) + rounding
    if not torch.allclose(row, other, rtol=0, atol=tolerance, equal_nan=True):
        raise ModelError(
            f"{name}: the row of an image changes by {(row - other).abs().max():.2g} with the "
            "other images of its batch, with its position in the batch, or from one pass to the "
            "next. Possible causes are dropout or batch statistics in eval mode, a scale of the "
            "whole batch in dynamic quantisation, or sorting. Rows would not be reproducible: "
            "correct the model, or choose a layer in front of the cause."
        )


class MovedRows:
    """Compares the rows of two images of a batch with those at other positions of another batch.

    `images` are the other batch, of the same size; `precision` is that of the forward passes.
    """

    def __init__(self, images: torch.Tensor, precision: str) -> None:
        num = len(images)
        self._positions = list(range(0, num, max(2, num // 2)))[:2]
        # The other images are inverted, which changes the statistics of the batch.
        moved = 255 - images if images.dtype == torch.uint8 else -images
        moved[self._positions] = images[self._positions]
        self.images = moved.roll(1, 0)
        self._scale = _TOLERANCE[precision]
        self._rows: dict[str, torch.Tensor] | None = None

    def check(self, values: Mapping[str, torch.Tensor]) -> None:
        """Record rows of the first batch, at the first call; later compare the other batch."""
        if self._rows is None:
            self._rows = {name: value[self._positions].clone() for name, value in values.items()}
            return
        for name, first_rows in self._rows.items():
            for position, row in zip(self._positions, first_rows, strict=True):
                other = values[name][(position + 1) % len(self.images)]
                check_row(name, row, other, scale=self._scale)


class BufferSnapshot:
    """Copies of the buffers of a module, to find those that a pass in eval mode changes.

    Create it after a first forward pass: buffers that are filled in that pass, such as tables of
    positions, are then not reported.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: x.detach().clone() for name, x in module.named_buffers()}

    def check(self) -> None:
        """Compare the buffers with the copies; raise ModelError if one has changed."""
        changed = [
            name
            for name, now in self._module.named_buffers()
            if name in self._before and not are_equal(now, self._before[name])
        ]
        if changed:
            raise ModelError(
                f"the model writes to its buffer {', '.join(changed[:5])} in every forward pass, "
                "in eval mode as well, so a row may depend on the images before it. Change the "
                "buffer under `if self.training:` only, or choose a layer in front of it."
            )


class ValueReads(ObservingMode):  # type: ignore[no-untyped-call]
    """Detects forward passes whose Python code reads tensor values, as `has_reads`.

    The control flow of such a pass may depend on the images. Enter the mode by `watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_reads = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[ValueReads]:
        """Observe the operations of the calling thread inside the block."""
        with _MethodReads(self), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_reads = self.has_reads or _reads(func, args)
        return func(*args, **(kwargs or {}))


class _MethodReads(TorchFunctionMode):
    """The part of `ValueReads` that sees methods of tensors, which no dispatch mode sees."""

    def __init__(self, reads: ValueReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            self._reads.has_reads = True
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Any) -> bool:
    """Return whether an operation returns a value to Python or a shape that depends on values."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    # Indexing by integers, as with relative positions, has the shape of the indices. Only masks
    # give a shape that depends on values.
    indices = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
    return any(x.dtype in (torch.bool, torch.uint8) for x in indices)
