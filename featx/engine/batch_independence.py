"""Proofs on a few batches that a row depends on its own image and on nothing else.

What would break that: statistics of the batch, one scale for a quantised batch, rows in another
order, chance, a buffer that each pass writes to, and control flow that follows the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from featx.engine.row_checks import same_row
from featx.errors import ModelError

_TOLERANCE = {"fp32": 1.0, "fp16": 8.0, "bf16": 64.0}
"""Of a row that is computed at another place of a batch, in units of `same_row`.

Kernels of one shape give the same bits at any place, as far as we have seen; what is allowed for is
that one of them does not, which moves a value by a few units of the last place: 2^-11 and 2^-8.
"""

_READERS = frozenset({"tolist", "numpy", "__array__"})
"""Methods of a tensor that hand over its values and run no operation that a dispatch mode sees."""


def regrouped(x: torch.Tensor, dark: torch.Tensor, loud: torch.Tensor) -> list[torch.Tensor]:
    """Batches in which the first image of a batch is the last one, among other neighbours.

    In one it is surrounded by copies of itself, in the other by images that move any statistic of
    the batch. It is the only image of `x` there: where the order of rows is all that a model
    changes, another image would otherwise stand where the first one is looked for.

    Args:
        x: (B, 3, H, W), normalised.
        dark, loud: (3, H, W), normalised: no pixel set, as in padding; each pixel set or not.
    """
    among_copies = x[:1].repeat(len(x), 1, 1, 1)
    among_others = torch.stack([*([loud, dark] * len(x))[: len(x) - 1], x[0]])
    return [among_copies, among_others]


def moved(images: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """The same work for the model, with two images at other places among other neighbours.

    Args:
        images: (B, 3, H, W), uint8 or normalised.

    Returns:
        The batch, and (place before, place in it) of each image that is in both.
    """
    num = len(images)
    kept = list(range(0, num, max(2, num // 2)))[:2]
    others = 255 - images if images.dtype == torch.uint8 else -images
    others[kept] = images[kept]
    return others.roll(1, 0), [(place, (place + 1) % num) for place in kept]


def check_row(
    name: str, row: torch.Tensor, again: torch.Tensor, rounding: float = 0.0, scale: float = 1.0
) -> None:
    """Compare a row with that of the same image in another batch.

    Args:
        name: of the dataset.
        row, again: of the same shape.
        rounding: that is always allowed, in the unit of the row.
        scale: of what is allowed beside it.

    Raises:
        ModelError: they differ by more than rounding.
    """
    row, again = row.cpu().double(), again.cpu().double()  # Apple's GPUs have no float64
    close = scale * same_row(row) + rounding
    if not torch.allclose(row, again, rtol=0, atol=close, equal_nan=True):
        raise ModelError(
            f"{name}: the row of one image changes by {(row - again).abs().max():.2g} when the "
            "other images of its batch change, when it stands at another place of the batch, or "
            "from one pass to the next (dropout or batch statistics in eval mode, a scale of the "
            "whole batch in dynamic quantisation, sorting?). Its rows would not be reproducible; "
            "mend the model, or choose a layer before that."
        )


class MovedRows:
    """Compares rows of passes over a batch and over what `moved` makes of it.

    Args:
        precision: in which they are computed.
        places: (place in the first batch, place in the others).
    """

    def __init__(self, precision: str, places: list[tuple[int, int]]) -> None:
        self._scale = _TOLERANCE[precision]
        self._places = places
        self._rows: dict[str, torch.Tensor] | None = None

    def check(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take the next pass: dataset name -> (B, ...).

        Raises:
            ModelError: an image has other rows than in the first pass.
        """
        first = self._rows is None
        places = [pair[0 if first else 1] for pair in self._places]
        rows = {name: value[places].clone() for name, value in values.items()}
        if self._rows is None:
            self._rows = rows
            return
        for name, before in self._rows.items():
            for row, again in zip(before, rows[name], strict=True):
                check_row(name, row, again, scale=self._scale)


class Buffers:
    """The buffers of a module as they are now, to find those that a pass in eval mode changes.

    A buffer that is filled on the first pass, such as a table of positions, is none: take them when
    there has been a pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: x.detach().clone() for name, x in module.named_buffers()}

    def check(self) -> None:
        """Compare them with those of now.

        Raises:
            ModelError: one has changed.
        """
        changed = [
            name
            for name, now in self._module.named_buffers()
            if name in self._before and not _same_tensor(now, self._before[name])
        ]
        if changed:
            raise ModelError(
                f"the model writes to its buffer {', '.join(changed[:5])} in every forward pass, "
                "in eval mode as well, so a row may depend on the images before it. Change the "
                "buffer under `if self.training:` only, or choose a layer in front of it."
            )


class ValueReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices passes whose Python code reads values of tensors, which its course may depend on.

    Entered by `watching`.

    Attributes:
        seen: whether any value was read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[ValueReads]:
        """Watch what this thread computes in the block."""
        with _MethodReads(self), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or _reads(func, args)
        return func(*args, **(kwargs or {}))


class _MethodReads(TorchFunctionMode):
    """The part of ValueReads that sees methods of tensors."""

    def __init__(self, reads: ValueReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            self._reads.seen = True
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Any) -> bool:
    """Whether an operation gives Python a value, or a shape that follows from values."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    # Indexing by numbers, as relative positions do, has the shape of the numbers.
    indices = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
    return any(x.dtype in (torch.bool, torch.uint8) for x in indices)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape and in every element, NaN to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
