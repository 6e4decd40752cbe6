"""Captures that were decided and checked on a model, and the hooks of its later forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featx.engine.batch_independence import (
    BufferSnapshot,
    ValueReads,
    check_among_copies,
    check_regrouped,
)
from featx.engine.device_model import ATTACH_BATCH, DeviceModel
from featx.errors import LayerError, RunError
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

Score = Callable[[Any], torch.Tensor]
"""Function from the output of a model to the (B,) values of the gradient target."""


@dataclass(frozen=True)
class AttachedCaptures:
    """Captures of a model, and what its first forward pass with hooks has shown.

    Attributes:
        expected: what every later pass must repeat. Its calls are counted only if it follows the
            data.
        row_bytes: bytes of all captured tensors of one image in float32.
        misplaced: names of captures whose rows are whole or sampled maps or tokens in another
            order than that of the image.
    """

    points: tuple[CapturePoint, ...] = ()
    expected: Expected = ANYTHING
    row_bytes: int = 1
    misplaced: frozenset[str] = frozenset()

    @property
    def follows_data(self) -> bool:
        """Whether a forward pass reads tensor values, on which its control flow may depend.

        Such a pass runs to its end.
        """
        return self.expected.calls is not None

    @property
    def takes_gradients(self) -> bool:
        """Whether any capture is a gradient, which rules out early exit and compilation."""
        return any(point.is_gradient for point in self.points)

    @property
    def num_compared(self) -> int:
        """Number of images by which two forward passes are compared, at least 2."""
        return max(2, _COMPARED_BYTES // self.row_bytes)

    def hooks(
        self, module: nn.Module, keep: Keep, score: Score | None, stop: bool = False
    ) -> CaptureHooks:
        """Return hooks that check each pass against the first one.

        `keep` is called with each captured tensor; `score` is None unless gradients are captured.
        With `stop` a pass may end after the last capture, but never if the control flow follows the
        data.
        """
        expected = replace(self.expected, stop=stop and not self.follows_data)
        return CaptureHooks(module, self.points, keep, expected, score)

    def score(self, target: str | int, labels: Callable[[], torch.Tensor | None]) -> Score | None:
        """Return the function that computes the gradient target; None without gradients.

        `labels` returns the (B,) int64 labels of the current batch, or None.
        """
        if not self.takes_gradients:
            return None
        return lambda output: target_values(output, target, labels())


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

    score = captures.score(target, lambda: None)
    hooks = captures.hooks(model.module, keep, score)
    # Copies of x, for a model may write to its input.
    with model.named_failure(x), torch.no_grad(), hooks, reads.watch():
        values = hooks.forward(x.clone())
        first = hooks.record
    _check_calls(model, points, first, target)
    calls = first.calls if reads.has_reads else None
    expected = replace(captures.expected, fired=first.fired, calls=calls)
    collector = OutputCollector(store_dtype)
    maps = _expect_rows(model, chosen, values, collector)
    num_bytes = sum(4 * value[0].numel() for value in values.values())
    captures = replace(captures, expected=expected, row_bytes=max(1, num_bytes))
    _check_rows(model, captures, score, x, values)
    noise, presumed = model.noise(1), _presumed_maps(model, chosen, values)
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
) -> Maps:
    """Record row shape and reduction of each capture in the collector; return those of which a
    reduction reads positions that their shape leaves open.
    """
    maps = []
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
    return maps


def _presumed_maps(
    model: DeviceModel, chosen: ChosenLayers, values: Mapping[str, torch.Tensor]
) -> Maps:
    """Captures that are stored whole or sampled, and whose shapes look like a map."""
    return [
        (point, to_map)
        for point, reduce in chosen
        if reduce.name in ("none", "sample") and point.capture != "attention"
        if (to_map := presumed_map(model.row_layout(point, values[point.name]))) is not None
    ]


def _check_rows(
    model: DeviceModel,
    captures: AttachedCaptures,
    score: Score | None,
    x: torch.Tensor,
    values: Mapping[str, torch.Tensor],
) -> None:
    """Check that a row depends neither on other images, nor its position, nor chance.

    BatchNorm without running statistics, or `F.dropout(x)`, which ignores eval mode, would make
    rows depend on the padding, on failed images of the batch, or on chance. The check is done in
    fp32, where rounding hides little; `Engine.time_passes` repeats it at the precision of the
    run. If the control flow may depend on the data, all trial images are compared one by one.
    """
    buffers = BufferSnapshot(model.module)
    hooks = captures.hooks(model.module, clone_captured, score, stop=True)
    with model.named_failure(x), torch.no_grad(), hooks:
        check_regrouped(hooks.forward, model.regroup(x), values)
    buffers.check()
    if captures.follows_data and model.trial_images is not None:
        num_images = max(ATTACH_BATCH, captures.num_compared)
        images = model.normalise(model.trial_images[:num_images])
        hooks = captures.hooks(model.module, clone_captured, score)
        with torch.no_grad(), hooks, model.named_failure(images):
            check_among_copies(hooks.forward, images)
