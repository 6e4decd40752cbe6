"""Check that the strides of a model divide a window, so that maps of windows fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from featx.base import ModuleHooks, ObservingMode
from featx.engine.engine import Engine
from featx.errors import ReduceError

aten = torch.ops.aten

Sides = tuple[int, ...]
"""Numbers of positions of a map along one or both axes."""

_POOLS = (aten.avg_pool2d, aten.max_pool2d_with_indices)
_PADS = (aten.constant_pad_nd, aten.reflection_pad2d, aten.replication_pad2d)
_RESIZES = (
    aten.upsample_nearest2d,
    aten._upsample_nearest_exact2d,
    aten.upsample_bilinear2d,
    aten._upsample_bilinear2d_aa,
    aten.upsample_bicubic2d,
    aten._upsample_bicubic2d_aa,
)


def check_strides(engine: Engine) -> None:
    """Refuse windows of which an operation leaves out positions, or fills some up.

    A map of 300 pixels by strides of 32 has 10 positions (300, 150, 75, 38, 19, 10), which are no
    30 pixels apart; one of 28 pixels by two convolutions without padding and two poolings has 4
    (24, 12, 8, 4), which are 4 pixels apart. Raises ReduceError.
    """
    running: list[str] = []

    def begin(name: str, *_: object) -> None:
        running.append(name)

    def end(*_: object) -> None:
        running.pop()

    modules = dict(engine.module.named_modules())
    with ModuleHooks() as hooks:
        hooks.add_all(modules, begin, first=True)
        hooks.add_all(modules, after=end, always=True)
        with _StrideCheck(running) as check:
            engine._captured_of([engine.noise(2)])  # ends after the last captured layer
    if check.first_reason:
        raise ReduceError(
            f"model.window.size={list(engine.backbone.preprocess.crop)}: {check.first_reason}, so "
            "the maps of windows do not fit together. Choose a multiple of the patch size, or of "
            "the stride of the layer. Layers that shrink a map by convolutions without padding fit "
            "at no size."
        )


class _StrideCheck(ObservingMode):  # type: ignore[no-untyped-call]
    """Finds operations whose positions do not fit together.

    Convolutions, pooling, slices and resizing by a factor must have as many positions as their
    input has strides, without padding before them. Padding before a view, in which a transformer
    merges positions or makes windows of its own, must be cut off again. A side branch may resize
    its map to the size that it had before.
    """

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running = running
        self._padded: dict[int, tuple[torch.Tensor, torch.Size]] = {}
        self._misfits: list[tuple[Sides, Sides, str]] = []

    @property
    def first_reason(self) -> str:
        """What does not fit, of the first operation; empty if all fit."""
        return next((reason for _, _, reason in self._misfits), "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        operation, x = func._overloadpacket, args[0] if args else None
        if not isinstance(x, torch.Tensor):
            return output
        _, shape = self._padded.get(id(x), (x, x.shape))
        if operation in _PADS and x.dim() == 4:
            self._padded[id(output)] = output, x.shape
        elif operation is aten.view and shape != x.shape:
            for before, after in zip(shape, x.shape, strict=True):
                if before < after:
                    reason = f"fills {before} positions up to {after}"
                    self._add((before,), (after,), reason)
        elif operation is aten.slice:
            given = _named(func, args)
            dim, step = given.get("dim", 0), given.get("step", 1)
            if step == 1:
                self._restore((x.shape[dim],), (output.shape[dim],))
            elif x.dim() == 4:
                self._compare((shape[dim],), (output.shape[dim],), (step,))
        elif x.dim() == 4 and operation in (aten.convolution, *_POOLS, *_RESIZES):
            self._compare_maps(operation, _named(func, args), tuple(shape[-2:]), output)
        return output

    def _compare_maps(
        self, operation: Any, given: Mapping[str, Any], before: Sides, output: Any
    ) -> None:
        """Compare the maps of an operation, of which the first had the sides `before`."""
        maps = output[0] if isinstance(output, tuple) else output
        after = tuple(maps.shape[-2:])
        if operation is aten.convolution:
            stride = given["stride"]
            if given["transposed"]:
                stride = [1 / step for step in stride]
            if after != (1, 1) or set(stride) != {1}:  # one position is a summary of the map
                self._compare(before, after, stride)
        elif operation in _POOLS:
            self._compare(before, after, given.get("stride") or given["kernel_size"])
        elif operation in _RESIZES and len(maps) > 1:  # position embeddings are of one image
            factors = given.get("scale_factors") or (given.get("scales_h"), given.get("scales_w"))
            stride = [1 / factor for factor in factors if factor is not None]
            if stride:
                self._compare(before, after, stride)
            else:
                self._restore(before, after)

    def _compare(self, before: Sides, after: Sides, stride: Sequence[float]) -> None:
        """Note a misfit unless positions times strides are the positions before."""
        stride = [stride[0], *stride][-len(after) :]
        sides = zip(before, after, stride, strict=True)
        if any(abs(n * step - whole) > 1e-6 * whole for whole, n, step in sides):
            every, of, gives = (
                " x ".join(f"{n:g}" for n in numbers) for numbers in (stride, before, after)
            )
            self._add(before, after, f"takes every {every} positions of {of}, and gives {gives}")

    def _add(self, before: Sides, after: Sides, reason: str) -> None:
        name = (self._running and self._running[-1]) or "the model"
        self._misfits.append((before, after, f"{name} {reason}"))

    def _restore(self, after: Sides, before: Sides) -> None:
        """Forget the last misfit between two sizes, as a map has its former size again."""
        for number, (first, second, _) in reversed(list(enumerate(self._misfits))):
            if (first, second) == (before, after):
                del self._misfits[number]
                return


def _named(operation: Any, args: Sequence[Any]) -> dict[str, Any]:
    """Name of an argument of an operation -> its value."""
    names = (argument.name for argument in operation._schema.arguments)
    return dict(zip(names, args, strict=False))
