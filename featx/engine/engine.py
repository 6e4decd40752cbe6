"""The inference loop: one backbone on one device, its captures, and the time that they take.

The engine is independent of the model family. Three steps prepare it: `Engine.trace` records the
layers in one forward pass, `Engine.attach_captures` fixes the captured tensors and checks them in
further passes, and `Engine.configure_compute` fixes precision, compilation and memory format.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from featx.base import DeviceTimer, OwnStream, synchronise, to_cpu
from featx.engine.attached_captures import AttachedCaptures, attach_captures
from featx.engine.compute import COMPUTE_DTYPES, BatchRows, Compute, Formats, TimedRows, spec_of
from featx.engine.device_model import ATTACH_BATCH, DeviceModel
from featx.engine.row_checks import (
    MOVED_TOLERANCE,
    check_row,
    describe_nonfinite,
    differ_by_rounding,
    finite_rows,
)
from featx.engine.weight_casting import Captured, PreparedWeights
from featx.errors import ModelError, RunError, require
from featx.layers import CaptureHooks, ChosenLayers, Keep, OutputCollector, clone_captured
from featx.models import Backbone
from featx.types import LayerSpec

logger = logging.getLogger(__name__)


class Engine(DeviceModel):
    """One backbone on one device with its captures; a context manager.

    The run loop uses `rows`, `compute`, `specs`, `explain` and the measured seconds. A subclass
    that computes something other than tensors of layers overrides `attach_captures`,
    `configure_compute` and `specs` (see `featx.analysis.attribution.attributor`).

    Args:
        store_dtype: dtype of the rows: 'float32', 'float16' or 'bfloat16'.
        target: gradient target, used only if gradients are captured.

    Attributes:
        model_seconds: seconds spent in forward passes by `rows`.
        copy_seconds: seconds spent checking rows and copying them to the CPU by `rows`.
        compute: the current settings.
        captures: the captures as `attach_captures` decided them.
        collector: reduces and casts the tensors of the next passes.
        weights: the weights as `configure_compute` prepares them.
    """

    uses_fp32_only = False
    """Whether precision=auto takes fp32 without trying other precisions."""

    def __init__(
        self,
        backbone: Backbone,
        device: torch.device,
        store_dtype: str,
        target: str | int = "predicted",
    ) -> None:
        super().__init__(backbone, device)
        self.model_seconds = 0.0
        self.copy_seconds = 0.0
        self.compute = Compute("fp32", False, False, 1)
        self._target = target
        self._labels: torch.Tensor | None = None
        self._store_dtype = getattr(torch, store_dtype)
        self.collector = OutputCollector(self._store_dtype)
        self.captures = AttachedCaptures()
        self.weights = PreparedWeights(self, self.captures, self.takes_gradients)
        self._is_shared = False
        self._streams: list[OwnStream] = []
        self._stream: OwnStream | None = None
        self._stack = contextlib.ExitStack()

    def __exit__(self, *error: object) -> None:
        # Hooks and weights first. The model is given back also if that raises.
        try:
            self._stack.close()
        finally:
            super().__exit__(*error)

    @property
    def unfused_modules(self) -> list[str]:
        """Names of the modules whose fused attention is off because their weights are captured."""
        points = self.captures.points
        attention_modules = [point.module for point in points if point.capture == "attention"]
        return list(dict.fromkeys([*self.plain_modules, *attention_modules]))

    def attach_captures(self, chosen: ChosenLayers) -> None:
        """Fix the captures: their row shapes, and where to stop.

        The rows of `trial_images` are checked to depend on their own image only; noise replaces
        missing images.

        Raises:
            LayerError: the first dimension of a captured tensor is not the batch, or a store cannot
                hold its values.
            ModelError: a row depends on other rows of the batch, or is random.
            ReduceError: a reduction does not fit the shape of its tensor.
            RunError: the model computes something other than in the trace.
        """
        self._stack.close()
        attached = attach_captures(self, chosen, self._store_dtype, self._target)
        self.captures, self.collector = attached
        self.weights = PreparedWeights(self, self.captures, self.takes_gradients)

    def configure_compute(self, compute: Compute, cast_once: bool = True) -> None:
        """Fix how features are computed; another call replaces the settings.

        Weights are cast once if that is proven to be equal. Without `cast_once` the values are the
        same, and the forward passes of the proof are saved.
        """
        self._prepare_weights(compute, cast_once)
        hooks = self._hooks_of(self.collector.keep, stop=not compute.compile)
        self._hooks = self._stack.enter_context(hooks)
        self._forward = hooks.forward
        if compute.compile:
            # torch caches compiled graphs per function, over all engines. It stops compiling when
            # the limit for one function (8) is reached, so the cache is cleared first.
            torch.compiler.reset()
            options: Any = {"freezing": True} if self.device.type == "cpu" else None
            self._forward = torch.compile(hooks.forward, dynamic=False, options=options)

    def _prepare_weights(self, compute: Compute, cast_once: bool) -> None:
        """Remove the hooks of earlier settings and prepare the weights for the new ones."""
        self._stack.close()
        self.compute = compute
        passes = self._captured_of if cast_once else None
        self._stack.enter_context(self.weights.prepare(compute, passes))

    def _hooks_of(self, keep: Keep, stop: bool) -> CaptureHooks:
        """Hooks for the captures, which check each pass against the first one."""
        engine: Engine = weakref.proxy(self)  # it holds the hooks itself, and is freed at once
        return self.captures.hooks(self.module, keep, self._target, lambda: engine._labels, stop)

    def without_hooks(self) -> tuple[nn.Module, torch.Tensor]:
        """The backbone without hooks, and (1, 3, H, W) noise for one forward pass."""
        self._stack.close()
        return self.module, self.noise(1)

    def _captured_of(self, batches: Sequence[torch.Tensor]) -> Captured:
        """The captured tensors of normalised batches with the current settings."""
        hooks = self._hooks_of(clone_captured, stop=True)
        with torch.no_grad(), self._autocast(), hooks:
            return [dict(hooks.forward(self._input(x))) for x in batches]

    @contextlib.contextmanager
    def off_device(self) -> Iterator[None]:
        """Move the module to the CPU in its original state, to free its device inside the block."""
        self._stack.close()
        if self.device.type == "cuda":
            self.module.cpu()
            torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.module.to(self.device)
        self.configure_compute(self.compute)

    def formats(self, images: torch.Tensor, fold_batchnorm: bool = True) -> Formats:
        """Find the faster settings that give the values of the plain ones.

        Channels-last and folding are tried together on images of the data set, (n, 3, H, W) uint8
        or normalised float32, and one by one if that fails. Noise is used if n is 0.
        """
        has_convolutions = any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        layouts = [True, False] if has_convolutions else [False]
        num_folded = 0
        if fold_batchnorm:
            if self.weights.pairs is None:
                self._stack.close()  # the modules are looked for without hooks
            num_folded = len(self.weights.foldable())
        folds = [True, False] if num_folded else [False]
        # All combinations but the last one, which is the plain way; both together are tried first.
        candidates = [(layout, fold) for layout in layouts for fold in folds][:-1]
        if not candidates:
            return Formats(False, False, num_folded)
        x = self.normalise(images) if len(images) else self.noise(ATTACH_BATCH)
        x = x[: self.captures.num_compared]
        chosen = False, False
        # float16 rounds more than layouts differ.
        with self.collector.keep_float32() as store_dtype:
            values = plain = self._values_of(x, False, False)
            for channels_last, is_folded in candidates:
                try:
                    candidate = self._values_of(x, channels_last, is_folded)
                except ModelError:  # a .view() in the model requires the contiguous layout
                    continue
                # The input of a rectifier that is zero up to rounding lets a gradient pass or not,
                # so gradients are not compared.
                if self.takes_gradients or differ_by_rounding(candidate, plain):
                    chosen, values = (channels_last, is_folded), candidate
                    break
        if len(x) != len(images):
            return Formats(*chosen, num_folded)
        rows = {name: value.to(store_dtype) for name, value in values.items()}
        return Formats(*chosen, num_folded, rows)

    def _values_of(
        self, x: torch.Tensor, channels_last: bool, fold_batchnorm: bool
    ) -> dict[str, torch.Tensor]:
        """The rows of normalised images in fp32 with these settings."""
        self.configure_compute(Compute("fp32", False, channels_last, len(x), fold_batchnorm))
        return self._pass(x)

    @property
    def can_be_replicated(self) -> bool:
        """Whether `replicas` may be called: a forward pass is the same in any thread."""
        is_plain = all(
            point.capture in ("input", "output") and not point.operation
            for point in self.captures.points
        )
        is_eager = self.device.type in ("cpu", "cuda") and not self.compute.compile
        return self.backbone.reentrant and is_plain and is_eager

    @contextlib.contextmanager
    def replicas(self, count: int) -> Iterator[list[Engine]]:
        """Yield engines over the same module that compute the same values in parallel.

        Replicas share everything but hooks, captured values, measured seconds and streams. Each may
        be used by one thread at a time. Do not call `configure_compute` on this engine inside the
        block.
        """
        require(self.can_be_replicated, "an engine that cannot be replicated is replicated")
        synchronise(self.device)  # other streams do not wait for copies of weights
        # From now on several threads call the module. The hooks of each engine see only the passes
        # that it runs itself.
        self._is_shared = True
        while len(self._streams) < count:  # kept: the allocator keeps memory per stream
            self._streams.append(OwnStream(self.device))
        try:
            with contextlib.ExitStack() as stack:
                replicas = []
                for stream in self._streams[:count]:
                    # A shallow copy shares module, weights and settings. Hooks, collector and
                    # seconds must be its own, because replicas run in different threads.
                    replica = copy.copy(self)
                    replica.model_seconds = replica.copy_seconds = 0.0
                    replica._stream = stream
                    replica.collector = self.collector.replica()
                    replica._hooks = replica._hooks_of(replica.collector.keep, stop=True)
                    stack.enter_context(replica._hooks)
                    replica._forward = replica._hooks.forward
                    replicas.append(replica)
                yield replicas
        finally:
            self._is_shared = False

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the work of a replica runs on its own CUDA stream; waits at its end."""
        return contextlib.nullcontext() if self._stream is None else self._stream.activate()

    @property
    def takes_gradients(self) -> bool:
        """Whether any capture is a gradient, which rules out early exit and compilation."""
        return any(point.is_gradient for point in self.captures.points)

    def run(
        self,
        images: torch.Tensor,
        labels: torch.Tensor | None = None,
        keys: Sequence[bytes] = (),
    ) -> dict[str, torch.Tensor]:
        """Compute the features of one batch and copy them to the CPU, by dataset; see `rows`."""
        return self.rows(images, labels, keys=keys).features

    def rows(
        self,
        images: torch.Tensor,
        labels: torch.Tensor | None = None,
        on_device: bool = False,
        keys: Sequence[bytes] = (),
    ) -> BatchRows:
        """Compute the features of one batch, and find rows that are not finite or too small.

        Rows are checked on the device. Everything is copied to the CPU together, so the calling
        thread waits for the device once.

        Args:
            images: (B, 3, H, W), uint8 in [0, 255] or normalised float32.
            labels: (B,) int64 for gradient targets that need them, otherwise None.
            on_device: whether the features stay on the device, where the next forward pass may
                overwrite them.
            keys: keys of the images, without padding, which reduce=sample depends on. Trial passes,
                whose rows are compared with each other only, have none.

        Raises:
            ModelError: the forward pass fails.
            RunError: the forward pass differs from the earlier ones.
        """
        self._labels = labels
        self.collector.keys = keys
        started_at = time.perf_counter()
        with DeviceTimer(self.device) as timer:
            values = self._pass(images.to(self.device, non_blocking=True))
        finite, underflow = finite_rows(values), self.collector.underflow_rows()
        # MPS has no float64, so rows computed in it are on the CPU.
        on_device_checks = [x.to(self.device) for x in (*finite.values(), *underflow.values())]
        checks = torch.stack(on_device_checks)
        values_to_copy = [] if on_device else list(values.values())
        *copied, checks = to_cpu([*values_to_copy, checks], self.device)
        model_seconds = timer.seconds()
        self.model_seconds += model_seconds
        self.copy_seconds += max(0.0, time.perf_counter() - started_at - model_seconds)
        flags = iter(checks.numpy())
        return BatchRows(
            values if on_device else dict(zip(values, copied, strict=True)),
            {name: next(flags) for name in finite},
            {name: next(flags) for name in underflow},
        )

    @contextlib.contextmanager
    def module_and_input(self, images: torch.Tensor) -> Iterator[tuple[nn.Module, torch.Tensor]]:
        """The module and a batch as `run` feeds it, at its precision, for custom forward passes.

        The batch is yielded normalised and in the memory format of the run.
        """
        x = self._input(images.to(self.device))
        with self.named_failure(x), torch.no_grad(), self._autocast():
            yield self.module, x

    def explain(
        self,
        images: torch.Tensor,
        labels: torch.Tensor | None,
        row: int,
        name: str,
        keys: Sequence[bytes] = (),
    ) -> str:
        """The reason why a stored row is not finite, from its values before the cast.

        `row` is its position in the batch of images; see `rows`.
        """
        with self.collector.keep_float32() as store_dtype:
            value = self.run(images, labels, keys)[name][row].flatten()
        return describe_nonfinite(value, self.compute.precision, store_dtype)

    def specs(self, chosen: ChosenLayers) -> list[LayerSpec]:
        """Shapes and dtypes of the rows of each dataset, by one pass with the current settings."""
        x = self._input(self.noise(ATTACH_BATCH))
        with self.named_failure(x), torch.no_grad(), self._autocast():
            values = self._hooks.forward(x)
        computed = self.collector.compute_dtypes
        return [
            spec_of(
                point,
                reduce,
                values[point.name],
                computed[point.name],
                self.collector.bound_args(point.name),
            )
            for point, reduce in chosen
        ]

    def time_passes(
        self,
        images: torch.Tensor,
        repeats: int = 3,
        enough_s: float = float("inf"),
        known_rows: Mapping[str, torch.Tensor] | None = None,
    ) -> TimedRows:
        """Time several passes over a batch, and check that rows do not depend on their position.

        The first pass warms up. In the later ones two images stand at other positions among other
        images, and their rows are compared with those of the first pass. This repeats the check of
        `attach_captures` at the precision of the run without further passes.

        Args:
            images: (B, 3, H, W), uint8 in [0, 255] or normalised float32.
            repeats: largest number of passes.
            enough_s: no further pass after one that took this many seconds.
            known_rows: result of `run` for these images if it was called before with the same
                settings; then there is no warm-up pass.

        Raises:
            ModelError: the row of an image depends on its position or on other images.
        """
        num = len(images)
        positions = list(range(0, num, max(2, num // 2)))[:2]
        # The other images are inverted, which changes the statistics of the batch.
        moved = 255 - images if images.dtype == torch.uint8 else -images
        moved[positions] = images[positions]
        moved = moved.roll(1, 0)

        rows, compared = known_rows, {}
        if rows is not None:
            compared = {name: value[positions] for name, value in rows.items()}
        fastest = float("inf")
        for _ in range(repeats):
            started_at = time.perf_counter()
            values = self.run(images if rows is None else moved)
            fastest = min(fastest, pass_s := time.perf_counter() - started_at)
            if rows is None:
                rows = {name: value.clone() for name, value in values.items()}
                compared = {name: value[positions] for name, value in rows.items()}
            else:
                scale = MOVED_TOLERANCE[self.compute.precision]
                for name, first_rows in compared.items():
                    for position, row in zip(positions, first_rows, strict=True):
                        other = values[name][(position + 1) % num]
                        check_row(name, row, other, scale=scale)
            if pass_s >= enough_s:
                break
        return TimedRows(rows or {}, fastest / num)

    def _pass(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self._input(images)
        # Errors of torch.compile reach the caller unchanged: compile=auto falls back to eager.
        named = contextlib.nullcontext() if self.compute.compile else self.named_failure(x)
        with named, torch.no_grad(), self._autocast():
            values = dict(self._forward(x))
        for name, value in values.items():
            if len(value) != len(x):
                raise RunError(f"{name} gave {len(value)} rows for a batch of {len(x)} images.")
        return values

    def _input(self, images: torch.Tensor) -> torch.Tensor:
        """Normalised images in the memory format of the run, always a copy.

        A model may write to its input, so the images of the caller are never passed on.
        """
        layout = torch.channels_last if self.compute.channels_last else torch.contiguous_format
        if images.dtype == torch.uint8:
            # Normalising in channels-last takes three times as long on a CPU. On CUDA it saves one
            # pass over the images in float32.
            first = layout if images.is_cuda else torch.preserve_format
            x = self.backbone.preprocess.normalise(images, first)
            return x.contiguous(memory_format=layout)
        return images.clone(memory_format=layout)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """The autocast context of the run, with a cache of casts if that is safe.

        The cache of autocast is shared by all threads and cleared when any of them leaves its
        context. On CUDA a parallel forward pass on another stream could read a cast that is still
        being written, or whose memory was freed. So replicas on CUDA cast the remaining weights at
        each use. On a CPU a cast is complete when another thread finds it.
        """
        dtype = COMPUTE_DTYPES[self.compute.precision]
        enabled = dtype != torch.float32
        keeps = not self._is_shared or self.device.type == "cpu"
        return torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=keeps)
