"""Captures that were decided and checked on a model, and the hooks of its later forward passes.

The checks on a few batches prove that a row depends on its own image only. They detect batch
statistics in eval mode, one scale for a whole quantised batch, changed row order, randomness,
buffers that a forward pass changes, and control flow that depends on the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from featx.base import ObservingMode, are_equal
from featx.engine.device_model import ATTACH_BATCH, DeviceModel
from featx.engine.row_checks import check_row
from featx.errors import LayerError, ModelError, RunError
from featx.layers import (
    ANYTHING,
    CaptureHooks,
    CapturePoint,
    ChosenLayers,
    Expected,
    Keep,
    Maps,
    OutputCollector,
    PassRecord,
    bound_reduction,
    check_calls,
    check_positions,
    check_storable,
    check_weights,
    clone_captured,
    has_known_positions,
    map_view,
    misplaced_maps,
    presumed_map,
    reads_positions,
    target_values,
)

_COMPARED_BYTES = 64 * 2**20
"""Bytes of float32 values by which two passes are compared, which bounds the number of images; at
least two images are compared."""

_READERS = frozenset({"tolist", "numpy", "__array__"})
"""Methods of a tensor that read its values without an operation that a dispatch mode sees."""


@dataclass(frozen=True)
class AttachedCaptures:
    """Captures of a model, and what its first forward pass with hooks has shown.

    Attributes:
        expected: what every later pass must repeat. Its calls are counted only if it follows the
            data.
        follows_data: whether a forward pass reads tensor values, on which its control flow may
            depend. Such a pass runs to its end.
        num_compared: number of images by which two forward passes are compared, at least 2.
        misplaced: names of captures whose rows are whole or sampled maps or tokens in another
            order than that of the image.
    """

    points: tuple[CapturePoint, ...] = ()
    expected: Expected = ANYTHING
    follows_data: bool = False
    num_compared: int = _COMPARED_BYTES
    misplaced: frozenset[str] = frozenset()

    def hooks(
        self,
        module: nn.Module,
        keep: Keep,
        target: str | int,
        labels: Callable[[], torch.Tensor | None] = lambda: None,
        stop: bool = False,
    ) -> CaptureHooks:
        """Return hooks that check each pass against the first one.

        `keep` is called with each captured tensor. If gradients are captured, they are those of
        `target`, for which `labels` returns the (B,) int64 labels of the current batch, or None.
        With `stop` a pass may end after the last capture, but never if the control flow follows the
        data.
        """

        def score(output: Any) -> torch.Tensor:
            return target_values(output, target, labels())

        expected = replace(self.expected, stop=stop and not self.follows_data)
        needs_score = any(point.is_gradient for point in self.points)
        return CaptureHooks(module, self.points, keep, expected, score if needs_score else None)


def attach_captures(
    model: DeviceModel,
    chosen: ChosenLayers,
    store_dtype: torch.dtype,
    target: str | int,
) -> tuple[AttachedCaptures, OutputCollector]:
    """Decide captures: their row shapes, and where a pass may end.

    The rows of the trial images are checked to depend on their own image only; noise replaces
    missing images. The collector that is returned expects the tensors of the captures.
    """
    points = tuple(point for point, _ in chosen)
    operations = None if model.traced is None else model.traced.operations_up_to(points) or None
    captures = AttachedCaptures(points, Expected(operations=operations))
    x, reads = model.trial_batch(), ValueReads()

    def keep(point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
        check_storable(point, tensor)
        return clone_captured(point, tensor)

    hooks = captures.hooks(model.module, keep, target)
    # Copies of x, for a model may write to its input.
    with model.named_failure(x), torch.no_grad(), hooks, reads.watch():
        values = hooks.forward(x.clone())
        first = hooks.record
    _check_calls(model, points, first, target)
    calls = first.calls if reads.has_reads else None
    expected = replace(captures.expected, fired=first.fired, calls=calls)
    collector = OutputCollector(store_dtype)
    maps, presumed = _expect_rows(model, chosen, values, collector)
    row_bytes = sum(4 * value[0].numel() for value in values.values())  # in float32
    num_compared = max(2, _COMPARED_BYTES // max(1, row_bytes))
    captures = AttachedCaptures(points, expected, reads.has_reads, num_compared)
    _check_rows(model, captures, target, x, values)
    noise = model.noise(1)
    del first, values  # the next passes take as much memory
    with model.named_failure(noise):
        check_positions(model.module, maps, noise)
        misplaced = misplaced_maps(model.module, presumed, noise)
    collector.forget_grids(misplaced)
    return replace(captures, misplaced=misplaced), collector


def _check_calls(
    model: DeviceModel, points: Sequence[CapturePoint], first: PassRecord, target: str | int
) -> None:
    """Check that every capture fired once, modules as in the trace, and that gradients arrived."""
    fired = first.fired
    silent = [point.name for point in points if point.is_gradient and point.name not in fired]
    if silent:
        raise LayerError(
            f"{', '.join(silent)}: target={target} has no gradient there, because the output of "
            "the model does not depend on it."
        )
    if (traced := model.traced) is not None:
        num_traced = {
            (point.module, point.capture): len(traced.by_module[traced.names[point.module]])
            for point in points
            if not point.operation
        }
        check_calls(first.calls, num_traced)
    expected = [point.name for point in points]
    if sorted(fired) != sorted(expected):
        raise RunError(
            f"a second forward pass fired {list(fired)}, expected {expected} from the trace. The "
            "model runs different layers for different batches, so its rows are not reproducible."
        )


def _expect_rows(
    model: DeviceModel,
    chosen: ChosenLayers,
    values: Mapping[str, torch.Tensor],
    collector: OutputCollector,
) -> tuple[Maps, Maps]:
    """Record row shape and reduction of each capture in the collector.

    Return the captures of which a reduction reads positions that their shape leaves open, and those
    that are stored whole or sampled and whose shapes look like a map.
    """
    maps, presumed = [], []
    for point, reduce in chosen:
        value = values[point.name]
        shape = tuple(value.shape)
        if shape[:1] != (ATTACH_BATCH,):
            raise LayerError(
                f"{point.name} has shape {shape} for a batch of {ATTACH_BATCH}: its first "
                "dimension is not the batch, so it has no row per image. Choose a layer around it."
            )
        if point.capture == "attention":
            check_weights(point.name, value)
        rows = model.row_layout(point, value)
        collector.expect(point, rows.shape, bound_reduction(reduce, rows))
        if reads_positions(reduce) and not has_known_positions(rows):
            maps.append((point, map_view(reduce.name, rows)))
        if reduce.name in ("none", "sample") and point.capture != "attention":
            to_map = presumed_map(rows)
            if to_map is not None:
                presumed.append((point, to_map))
    return maps, presumed


def _check_rows(
    model: DeviceModel,
    captures: AttachedCaptures,
    target: str | int,
    x: torch.Tensor,
    values: Mapping[str, torch.Tensor],
) -> None:
    """Check that a row depends neither on other images, nor its position, nor chance.

    BatchNorm without running statistics, or `F.dropout(x)`, which ignores eval mode, would make
    rows depend on the padding, on failed images of the batch, or on chance. The check is done in
    fp32, where rounding hides little; `Engine.time_passes` repeats it at the precision of the run.
    """
    buffers = BufferSnapshot(model.module)
    hooks = captures.hooks(model.module, clone_captured, target, stop=True)
    with model.named_failure(x), torch.no_grad(), hooks:
        for batch in model.regroup(x):
            other_values = hooks.forward(batch)
            for name, value in values.items():
                check_row(name, value[0], other_values[name][-1])
    buffers.check()
    if not captures.follows_data or model.trial_images is None:
        return
    # An image that changes the control flow changes it for the whole batch. So each trial image
    # must have the same row among copies of itself as among other images.
    num_images = max(ATTACH_BATCH, captures.num_compared)
    images = model.normalise(model.trial_images[:num_images])
    hooks = captures.hooks(model.module, clone_captured, target)
    with torch.no_grad(), hooks, model.named_failure(images):
        together = hooks.forward(images.clone())
        for i, image in enumerate(images):
            alone = hooks.forward(image.repeat(2, 1, 1, 1))
            for name, value in together.items():
                check_row(name, value[i], alone[name][0])


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

    has_reads = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[ValueReads]:
        """Observe the operations of the calling thread inside the block."""
        methods = _MethodReads()
        methods.reads = self
        with methods, self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            # Indexing by integers, as with relative positions, has the shape of the indices. Only
            # masks give a shape that depends on values.
            indices = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
            is_read = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        else:
            reading = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
            is_read = any(tag in func.tags for tag in reading)
        self.has_reads = self.has_reads or is_read
        return func(*args, **(kwargs or {}))


class _MethodReads(TorchFunctionMode):
    """The part of `ValueReads` that sees methods of tensors, which no dispatch mode sees."""

    reads: ValueReads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            self.reads.has_reads = True
        return func(*args, **(kwargs or {}))
