"""The inference loop: one backbone on one device, its captures, and the time that they take.

The engine is independent of the model family. Three steps prepare it: `Engine.trace` records the
layers in one forward pass, `Engine.attach_captures` fixes the captured tensors and checks them in
further passes, and `Engine.configure_compute` fixes precision, compilation and memory format.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from featx.base import OwnStream, away, exact_cuda, keep_freed_memory, synchronise, to_cpu
from featx.engine.batch_independence import (
    Buffers,
    MovedRows,
    ValueReads,
    check_among_copies,
    check_among_others,
    moved,
    regrouped,
)
from featx.engine.capture_checks import (
    calls_in_trace,
    check_batch_dimension,
    check_fired,
    check_gradients_arrive,
    check_same_score,
)
from featx.engine.compute import COMPUTE_DTYPES, Compute, Formats, spec_of
from featx.engine.row_checks import same_row
from featx.engine.weight_casting import Captured, CastableWeights, castable_weights, weights_cast
from featx.errors import FeatxError, ModelError, RunError, require
from featx.layers import (
    CaptureHooks,
    CapturePoint,
    Copies,
    Expected,
    Keep,
    OutputCollector,
    RowLayout,
    StoredReduce,
    Trace,
    bound_reduction,
    check_calls,
    check_positions,
    check_storable,
    has_known_positions,
    is_exposed,
    map_view,
    needs_plain_attention,
    no_fast_path,
    plain_attention,
    reads_positions,
    target_values,
    trace_forward,
    with_evidence,
)
from featx.models import Backbone, Pair, foldable_pairs, folded
from featx.types import LayerSpec

logger = logging.getLogger(__name__)

# The two sizes differ, so a dimension that follows the batch differs in both passes.
_TRACE_BATCH, _BIND_BATCH = 2, 3

_PROOF_BATCH = 2
"""Number of images of noise, and of the trial, on which weight casting is compared with autocast.
"""

_PROOF_BYTES = 64 * 2**20
"""Bytes of float32 values by which two settings are compared, which bounds the number of images; at
least two images are compared."""

_NO_THREAD = 0
"""Thread id for hooks that currently see no forward pass; no thread has this id."""


class Engine:
    """One backbone on one device with its captures; a context manager.

    The run loop uses `run`, `compute`, `specs`, `underflow_rows`, `explain` and the measured
    seconds. A subclass that computes something other than tensors of layers overrides
    `attach_captures`, `configure_compute` and `specs` (see
    `featx.analysis.attribution.attributor`).

    Args:
        backbone: model with its preprocessing.
        device: device to which the model is moved.
        store_dtype: dtype of the rows: 'float32', 'float16' or 'bfloat16'.
        target: gradient target, used only if gradients are captured.

    Attributes:
        backbone: as given.
        device: as given.
        model_seconds: seconds spent in forward passes by `run` and `run_on_device`.
        copy_seconds: seconds spent copying rows to the CPU by `run`.
        compute: the current settings.
        trial_images: (n, 3, H, W) images of the data set, uint8 in [0, 255] or normalised float32,
            for checks that noise alone does not suffice for; None if there are none.
    """

    settles_for_fp32 = False
    """Whether precision=auto takes fp32 without trying other precisions."""

    def __init__(
        self,
        backbone: Backbone,
        device: torch.device,
        store_dtype: str,
        target: str | int = "predicted",
    ) -> None:
        self.backbone = backbone
        self._target = target
        self._labels: torch.Tensor | None = None
        self.device = device
        self.model_seconds = 0.0
        self.copy_seconds = 0.0
        self._store_dtype = getattr(torch, store_dtype)
        self._collector = OutputCollector(self._store_dtype)
        self._module: nn.Module = backbone.module.to(device)
        self._points: list[CapturePoint] = []
        self._pairs: list[Pair] | None = None
        self._castable: dict[tuple[str, bool, bool], CastableWeights] = {}
        self._cast = CastableWeights()
        self._order: list[str] = []
        self._trial = torch.empty(0)
        self._row_bytes = 1
        self._calls: Mapping[tuple[str, str], int] | None = None
        self._traced: Trace | None = None
        self._operations: list[str] | None = None
        self._plain: list[str] = []
        self._is_shared = False
        self._streams: list[OwnStream] = []
        self._stream: OwnStream | None = None
        self._settings = contextlib.ExitStack()
        self._stack = contextlib.ExitStack()
        self.trial_images: torch.Tensor | None = None
        self.compute = Compute("fp32", False, False, 1)

    def __enter__(self) -> Engine:
        if self.device.type == "cpu":
            keep_freed_memory()
        self._settings.enter_context(no_fast_path)
        if self.device.type == "cuda":
            self._settings.enter_context(exact_cuda)
        return self

    def __exit__(self, *error: object) -> None:
        # In reverse order of registration: hooks and weights, then process settings, then whatever
        # the backbone borrowed. A step runs also if the one before it raises.
        with contextlib.ExitStack() as last:
            last.callback(self.backbone.give_back)
            last.callback(self._settings.close)
            last.callback(self._stack.close)

    def trace(self, requests: Sequence[str] = ()) -> Trace:
        """Record every call of a module and every operation in one forward pass over noise.

        Args:
            requests: the requested layers. Modules whose fused attention hides a requested tensor
                use plain attention until the engine is closed.

        Raises:
            ModelError: the forward pass fails.
        """
        fused = needs_plain_attention(self._module, requests)
        self._settings.enter_context(plain_attention(self._module, fused))
        self._plain += fused
        x = self._noise(_TRACE_BATCH)
        with self._named_failure(x):
            self._traced = trace_forward(self._module, x)
        if "embedding" in requests:
            library = self.backbone.embedding
            with self._named_failure(x):
                self._traced = with_evidence(self._traced, self._module, x, library)
                if is_exposed(self._traced):  # with_evidence has just added the module
                    traced = trace_forward(self._module, x)
                    self._traced = with_evidence(traced, self._module, x, library)
        return self._traced

    @contextlib.contextmanager
    def _named_failure(self, x: torch.Tensor) -> Iterator[None]:
        """Turn any exception of the model into a ModelError that describes the batch `x`."""
        try:
            yield
        except (FeatxError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
            raise ModelError(
                f"{self.backbone.name}: a forward pass over a batch of images {tuple(x.shape)} "
                f"{str(x.dtype).removeprefix('torch.')} fails with {type(error).__name__}: "
                f"{reason[:300]}. The model has to take such a batch as its only argument, in eval "
                "mode on one device. job=layers job.show=watch shows how far it comes, and "
                "FEATX_DEBUG=1 the traceback."
            ) from error

    def bytes_per_image(self, precision: str) -> int:
        """Lower bound of the device memory that a forward pass takes per image, in bytes.

        It counts the normalised pixels and a copy of them, and the input and output of the largest
        traced layer.

        Args:
            precision: 'fp32', 'bf16' or 'fp16'.
        """
        pixels = 3 * math.prod(self.backbone.preprocess.crop)
        each = COMPUTE_DTYPES[precision].itemsize
        largest = 0
        if self._traced is not None:
            largest = max(
                sum(math.prod(s) for s in {*call.outputs.values(), *call.inputs.values()})
                // self._traced.batch_size
                for call in self._traced.calls
            )
        return 2 * 4 * pixels + each * largest

    @property
    def unfused(self) -> list[str]:
        """Names of the modules whose fused attention is off because their weights are captured."""
        shown = [point.module for point in self._points if point.capture == "attention"]
        return list(dict.fromkeys([*self._plain, *shown]))

    def attach_captures(self, chosen: Sequence[tuple[CapturePoint, StoredReduce]]) -> None:
        """Fix the captures: find those that need a copy, their row shapes, and where to stop.

        The rows of `trial_images` are checked to depend on their own image only; noise replaces
        missing images.

        Args:
            chosen: captures and the reduction of each.

        Raises:
            LayerError: the first dimension of a captured tensor is not the batch, or a store cannot
                hold its values.
            ModelError: a row depends on other rows of the batch, or is random.
            ReduceError: a reduction does not fit the shape of its tensor.
            RunError: the model computes something other than in the trace.
        """
        self._stack.close()
        self._points = [point for point, _ in chosen]
        self._pairs = None
        self._castable.clear()
        self._calls = None
        if self._traced is not None:
            self._operations = self._traced.operations_up_to(self._points) or None
        x = self._trial = self._trial_batch()
        copies, reads = Copies(), ValueReads()

        def keep(point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
            check_storable(point, tensor)
            return copies.keep(point, tensor)

        hooks = self._capture_hooks(keep)
        # Copies of x, for a model may write to its input.
        with self._named_failure(x), torch.no_grad(), hooks, reads.watching():
            values = hooks.forward(x.clone())
            self._order, calls = list(hooks.fired), hooks.num_calls
        self._collector = OutputCollector(self._store_dtype, copies.overwritten())
        if reads.seen:
            # The control flow may depend on the data, so every pass runs to its end and calls are
            # counted.
            self._calls = calls
        if self._score is not None and hooks.numbers is not None:
            with self._named_failure(x), torch.no_grad():
                check_same_score(hooks.numbers, self._score(self._module(x.clone())))
        check_gradients_arrive(self._points, self._order, self._target)
        if self._traced is not None:
            check_calls(calls, calls_in_trace(self._traced, calls))
        check_fired(self._points, self._order)
        for point, reduce in chosen:
            check_batch_dimension(point, values[point.name], _BIND_BATCH)
            self._expect(point, reduce, tuple(values[point.name].shape[1:]))
        self._check_positions(chosen, values)
        self._row_bytes = max(1, sum(4 * value[0].numel() for value in values.values()))
        self._check_rows(x, values)
        if reads.seen and self.trial_images is not None:
            self._check_alone(self.trial_images)

    def _expect(
        self, point: CapturePoint, reduce: StoredReduce, row_shape: tuple[int, ...]
    ) -> None:
        """Record row shape and reduction of a capture."""
        reduction = bound_reduction(reduce, self._layout(point, row_shape))
        self._collector.expect(point, row_shape, reduce.name, reduction)

    def _layout(self, point: CapturePoint, row_shape: tuple[int, ...]) -> RowLayout:
        """Return the layout of the rows of a capture."""
        backbone = self.backbone
        return RowLayout(
            point.name,
            row_shape,
            backbone.preprocess.crop,
            backbone.num_prefix_tokens,
            backbone.has_class_token,
        )

    def _check_positions(
        self,
        chosen: Sequence[tuple[CapturePoint, StoredReduce]],
        values: Mapping[str, torch.Tensor],
    ) -> None:
        """Check that positions read by a reduction lie in the tensor as in the image."""
        maps = []
        for point, reduce in chosen:
            rows = self._layout(point, tuple(values[point.name].shape[1:]))
            if reads_positions(reduce) and not has_known_positions(rows):
                maps.append((point, map_view(reduce.name, rows)))
        x = self._noise(1)
        with self._named_failure(x):
            check_positions(self._module, maps, x)

    def _check_rows(self, x: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Check that a row depends neither on other images, nor its position, nor chance.

        BatchNorm without running statistics, or `F.dropout(x)`, which ignores eval mode, would make
        rows depend on the padding, on failed images of the batch, or on chance. The check is done
        in fp32, where rounding hides little; `seconds_per_image` repeats it at the precision of the
        run.
        """
        buffers = Buffers(self._module)
        hooks = self._capture_hooks(_clone, self._order, stop=True)
        with self._named_failure(x), torch.no_grad(), hooks:
            check_among_others(hooks.forward, self._regrouped(x), values)
        buffers.check()

    def _check_alone(self, images: torch.Tensor) -> None:
        """Check the trial images of a model whose control flow may depend on the data."""
        every = self._normalised(images[: max(_BIND_BATCH, _PROOF_BYTES // self._row_bytes)])
        hooks = self._capture_hooks(_clone, self._order)
        with torch.no_grad(), hooks, self._named_failure(every):
            check_among_copies(hooks.forward, every)

    def _regrouped(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The batches of `regrouped` for `x`, with a black image and one of random 0 and 255."""
        shape = 3, *self.backbone.preprocess.crop
        generator = torch.Generator().manual_seed(1)
        loud = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) * 255
        dark, loud = self._normalised(torch.stack([torch.zeros_like(loud), loud]))
        return regrouped(x, dark, loud)

    def _trial_batch(self) -> torch.Tensor:
        """(_BIND_BATCH, 3, H, W) normalised trial images, evenly spread, filled up with noise."""
        noise, images = self._noise(_BIND_BATCH), self.trial_images
        if images is None or not len(images):
            return noise
        few = images[:: -(-len(images) // _BIND_BATCH)]
        return torch.cat([self._normalised(few), noise])[:_BIND_BATCH]

    def configure_compute(self, compute: Compute, cast_once: bool = True) -> None:
        """Fix how features are computed; another call replaces the settings.

        Args:
            compute: the settings.
            cast_once: whether to cast weights once if proven to be equal. Without it the values are
                the same, and the forward passes of the proof are saved.
        """
        self._take(compute, cast_once)
        hooks = self._capture_hooks(self._collector.keep, self._order, stop=not compute.compile)
        self._hooks = self._stack.enter_context(hooks)
        self._forward = hooks.forward
        if compute.compile:
            # torch caches compiled graphs per function, over all engines. It stops compiling when
            # the limit for one function (8) is reached, so the cache is cleared first.
            torch.compiler.reset()
            options: Any = {"freezing": True} if self.device.type == "cpu" else None
            self._forward = torch.compile(hooks.forward, dynamic=False, options=options)

    def without_hooks(self) -> tuple[nn.Module, torch.Tensor]:
        """The backbone without hooks, and (1, 3, H, W) noise for one forward pass."""
        self._stack.close()
        return self._module, self._noise(1)

    def _capture_hooks(
        self, keep: Keep, fired: Sequence[str] | None = None, stop: bool = False
    ) -> CaptureHooks:
        """Hooks for the captures that check each pass against the first one.

        Args:
            keep: function that is called with each captured tensor.
            fired: names of the captures in their order, or None if unknown.
            stop: whether a pass may end after the last capture; it never does if calls are counted.
        """
        expected = Expected(fired, self._operations, self._calls, stop and self._calls is None)
        return CaptureHooks(self._module, self._points, keep, expected, self._score)

    def _take(self, compute: Compute, cast_once: bool) -> None:
        """Remove the hooks of earlier settings and prepare the weights for the new ones."""
        self._stack.close()
        self.compute = compute
        self._collector.compiled = compute.compile
        if compute.fold_batchnorm:
            self._stack.enter_context(folded(self._foldable()))
        memory_format = torch.channels_last if compute.channels_last else torch.contiguous_format
        self._module.to(memory_format=memory_format)
        # Without autograd the flag costs nothing, and it changes the kernels: torch multiplies a
        # batch of sequences by a weight that requires gradients in one product, but for some
        # layouts of other weights makes a copy for each image. Captured gradients are those of
        # activations, so weights never need any.
        for parameter in self._module.parameters():
            if parameter.is_floating_point() and not parameter.is_inference():
                parameter.requires_grad_(not self.takes_gradients)
        # Casting comes last: the weights must already be folded and in their memory format, as the
        # forward passes will read them.
        self._cast = self._castable_weights() if cast_once else CastableWeights()
        dtype = COMPUTE_DTYPES[compute.precision]
        self._stack.enter_context(weights_cast(self._module, self._cast.names, dtype))

    def _castable_weights(self) -> CastableWeights:
        """The weights to cast once; none in fp32 or if gradients are taken."""
        compute = self.compute
        if compute.precision == "fp32" or self.takes_gradients or not self._order:
            return CastableWeights()
        key = compute.precision, compute.channels_last, compute.fold_batchnorm
        if key not in self._castable:
            dtype = COMPUTE_DTYPES[compute.precision]
            with self._named_failure(self._noise(_PROOF_BATCH)):
                self._castable[key] = castable_weights(self._module, dtype, self._proof_passes)
        return self._castable[key]

    @property
    def why_cast_each_pass(self) -> str:
        """The reason why autocast casts weights in each pass; empty if they are cast once."""
        return self._cast.doubt

    def _proof_passes(self) -> Captured:
        """The captured values of noise and, if there are any, of two images of the trial."""
        batches = [self._noise(_PROOF_BATCH)]
        if self.trial_images is not None and len(self.trial_images):
            batches.append(self._normalised(self.trial_images[:_PROOF_BATCH]))
        hooks = self._capture_hooks(_clone, self._order, stop=True)
        with torch.no_grad(), self._autocast(), hooks:
            return [dict(hooks.forward(self._memory_format(x))) for x in batches]

    @contextlib.contextmanager
    def off_device(self) -> Iterator[None]:
        """Move the module to the CPU in its original state, to free its device inside the block."""
        self._stack.close()
        with away(self._module, self.device):
            yield
        self.configure_compute(self.compute)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, including the float32 originals of those that are cast."""
        cast = set(self._cast.names)
        return sum(
            p.numel() * (p.element_size() + 4 * (name in cast))
            for name, p in self._module.named_parameters()
        )

    def formats(self, images: torch.Tensor, fold_batchnorm: bool = True) -> Formats:
        """Find the faster settings that give the values of the plain ones.

        Channels-last and folding are tried together on images of the data set, and one by one if
        that fails.

        Args:
            images: (n, 3, H, W) uint8 or normalised float32; noise is used if n is 0.
            fold_batchnorm: whether BatchNorm may be folded.
        """
        has_convolutions = any(isinstance(m, nn.Conv2d) for m in self._module.modules())
        layouts = [True, False] if has_convolutions else [False]
        folds = [True, False] if fold_batchnorm and self.num_folded else [False]
        # All combinations but the last one, which is the plain way; both together are tried first.
        tried = [(layout, fold) for layout in layouts for fold in folds][:-1]
        if not tried:
            return Formats(False, False)
        x = self._normalised(images) if len(images) else self._noise(_BIND_BATCH)
        x = x[: max(2, _PROOF_BYTES // self._row_bytes)]
        chosen = False, False
        with self._collector.uncast() as stored:  # float16 rounds more than layouts differ
            values = plain = self._values_of(x, False, False)
            for channels_last, is_folded in tried:
                try:
                    found = self._values_of(x, channels_last, is_folded)
                except ModelError:  # a .view() in the model requires the contiguous layout
                    continue
                if self._is_same(found, plain):
                    chosen, values = (channels_last, is_folded), found
                    break
        if len(x) != len(images):
            return Formats(*chosen)
        return Formats(*chosen, {name: value.to(stored) for name, value in values.items()})

    def _values_of(
        self, x: torch.Tensor, channels_last: bool, fold_batchnorm: bool
    ) -> dict[str, torch.Tensor]:
        """The rows of normalised images in fp32 with these settings."""
        self.configure_compute(Compute("fp32", False, channels_last, len(x), fold_batchnorm))
        return self._pass(x)

    def _is_same(
        self, values: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether two passes differ by rounding only; always true if gradients are captured.

        The input of a rectifier that is zero up to rounding lets a gradient pass or not, so
        gradients are not compared.
        """
        return self.takes_gradients or all(
            torch.allclose(
                row.double(), same.double(), rtol=0, atol=0.1 * same_row(row), equal_nan=True
            )
            for name in plain
            for row, same in zip(plain[name].cpu(), values[name].cpu(), strict=True)
        )

    @property
    def num_folded(self) -> int:
        """Number of BatchNorm modules that can be folded."""
        return len(self._foldable())

    @property
    def follows_data(self) -> bool:
        """Whether a forward pass reads tensor values, on which its control flow may depend."""
        return self._calls is not None

    def _foldable(self) -> list[Pair]:
        """Pairs of modules that can be folded; captured modules are left alone.

        There are none if gradients are captured or the control flow may depend on the data.
        """
        if self.takes_gradients or self.follows_data:
            return []
        if self._pairs is None:
            self._stack.close()
            kept = {point.module for point in self._points}
            with self._named_failure(self._trial):
                self._pairs = foldable_pairs(self._module, self._trial, kept)
        return self._pairs

    @property
    def replicable(self) -> bool:
        """Whether `replicas` may be called: a forward pass is the same in any thread."""
        plain = all(
            point.capture in ("input", "output") and not point.operation for point in self._points
        )
        eager = self.device.type in ("cpu", "cuda") and not self.compute.compile
        return self.backbone.reentrant and plain and eager

    @contextlib.contextmanager
    def replicas(self, count: int) -> Iterator[list[Engine]]:
        """Engines over the same module that compute the same values in parallel.

        Replicas share everything but hooks, captured values, measured seconds and streams. Do not
        call `configure_compute` on this engine inside the block.

        Args:
            count: number of replicas.

        Yields:
            The replicas. Each may be used by one thread at a time.
        """
        require(self.replicable, "an engine that cannot be replicated is replicated")
        synchronise(self.device)  # other streams do not wait for copies of weights
        # From now on several threads call the module. The hooks of each engine see only the pass of
        # its own thread, and those of this engine see none.
        self._is_shared = True
        self._hooks.thread = _NO_THREAD
        while len(self._streams) < count:  # kept: the allocator keeps memory per stream
            self._streams.append(OwnStream(self.device))
        try:
            with contextlib.ExitStack() as stack:
                streams = self._streams[:count]
                yield [stack.enter_context(self._replica(stream)) for stream in streams]
        finally:
            self._hooks.thread = None
            self._is_shared = False

    @contextlib.contextmanager
    def _replica(self, stream: OwnStream) -> Iterator[Engine]:
        """A copy of this engine with its own hooks, which are removed at the end of the block."""
        # A shallow copy shares module, weights and settings. Hooks, collector and seconds must be
        # its own, because replicas run in different threads.
        replica = copy.copy(self)
        replica.model_seconds = replica.copy_seconds = 0.0
        replica._stream = stream
        replica._collector = self._collector.replica()
        replica._hooks = replica._capture_hooks(replica._collector.keep, self._order, stop=True)
        replica._hooks.thread = _NO_THREAD
        with replica._hooks:
            replica._forward = replica._hooks.forward
            yield replica

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the work of a replica runs on its own CUDA stream; waits at its end."""
        return contextlib.nullcontext() if self._stream is None else self._stream.at_work()

    @property
    def takes_gradients(self) -> bool:
        """Whether any capture is a gradient, which rules out early exit and compilation."""
        return any(point.is_gradient for point in self._points)

    @property
    def why_eager(self) -> str | None:
        """The reason why the model cannot be compiled, or None if it can."""
        if self.takes_gradients:
            return "gradients are taken"
        return "operations are captured" if any(point.operation for point in self._points) else None

    @property
    def _score(self) -> Callable[[Any], torch.Tensor] | None:
        """Function from the model's output to the (B,) gradient target; None without gradients."""
        if not self.takes_gradients:
            return None
        return lambda output: target_values(output, self._target, self._labels)

    def run(
        self, images: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the features of one batch and copy them to the CPU.

        Args:
            images: (B, 3, H, W), uint8 in [0, 255] or normalised float32.
            labels: (B,) int64 for gradient targets that need them, otherwise None.

        Returns:
            dataset name -> (B, ...) in the dtype of the store.

        Raises:
            ModelError: the forward pass fails.
            RunError: the forward pass differs from the earlier ones.
        """
        values = self.run_on_device(images, labels)
        started_at = time.perf_counter()
        on_cpu = to_cpu(values, self.device)
        self.copy_seconds += time.perf_counter() - started_at
        return on_cpu

    def run_on_device(
        self, images: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute features as `run` does, but leave them on the device.

        The next forward pass may overwrite them.
        """
        self._labels = labels
        started_at = time.perf_counter()
        values = self._pass(self._normalised(images))
        synchronise(self.device)
        self.model_seconds += time.perf_counter() - started_at
        return values

    @contextlib.contextmanager
    def as_computed(self, images: torch.Tensor) -> Iterator[tuple[nn.Module, torch.Tensor]]:
        """The module and a batch as `run` feeds it, at its precision, for custom forward passes.

        Args:
            images: (B, 3, H, W), uint8 in [0, 255] or normalised float32.

        Yields:
            The module, and the normalised batch in the memory format of the run.
        """
        x = self._memory_format(self._normalised(images))
        with self._named_failure(x), torch.no_grad(), self._autocast():
            yield self._module, x

    def underflow_rows(self) -> dict[str, npt.NDArray[np.bool_]]:
        """dataset name -> (B,) bool: rows of the last batch that are too small for float16."""
        return self._collector.underflow_rows()

    def explain(
        self, images: torch.Tensor, labels: torch.Tensor | None, row: int, name: str
    ) -> str:
        """The reason why a stored row is not finite, from its values before the cast.

        Args:
            images: (B, 3, H, W) batch that holds the row.
            labels: (B,) int64, or None.
            row: position of the row in the batch.
            name: name of the dataset.
        """
        with self._collector.uncast() as stored:
            value = self.run(images, labels)[name][row].flatten()
        bad = value[~torch.isfinite(value)]
        if len(bad):
            return f"{bad[0].item()} in {self.compute.precision}"
        limit = torch.finfo(stored).max
        largest = value.abs().max().item()
        return f"{largest:g}, over {limit:g}, the largest {str(stored).removeprefix('torch.')}"

    def specs(self, chosen: Sequence[tuple[CapturePoint, StoredReduce]]) -> list[LayerSpec]:
        """Shapes and dtypes of the rows of each dataset, from one pass with the current settings.

        Args:
            chosen: captures and the reduction of each, as given to `attach_captures`.
        """
        x = self._memory_format(self._noise(_BIND_BATCH))
        with self._named_failure(x), torch.no_grad(), self._autocast():
            values = self._hooks.forward(x)
        computed = self._collector.compute_dtypes
        return [
            spec_of(point, reduce, values[point.name], computed[point.name])
            for point, reduce in chosen
        ]

    def seconds_per_image(
        self,
        images: torch.Tensor,
        repeats: int = 3,
        enough_s: float = float("inf"),
        known: Mapping[str, torch.Tensor] | None = None,
    ) -> float:
        """Seconds per image in the fastest of several timed passes over a batch.

        The first pass warms up. In the later ones two images stand at other positions among other
        images, and their rows are compared with those of the first pass. This repeats the check of
        `attach_captures` at the precision of the run without further passes.

        Args:
            images: (B, 3, H, W), uint8 in [0, 255] or normalised float32.
            repeats: largest number of passes.
            enough_s: no further pass after one that took this many seconds.
            known: result of `run` for these images if it was called before with the same settings;
                then there is no warm-up pass.

        Raises:
            ModelError: the row of an image depends on its position or on other images.
        """
        fastest, again = float("inf"), known is not None
        others, places = moved(images)
        rows = MovedRows(self.compute.precision, places)
        if known is not None:
            rows.check(known)
        for _ in range(repeats):
            started_at = time.perf_counter()
            values = self.run(others if again else images)
            fastest = min(fastest, took := time.perf_counter() - started_at)
            rows.check(values)
            again = True
            if took >= enough_s:
                break
        return fastest / len(images)

    def _pass(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows of a normalised batch on the device; repeats a pass that overwrote a capture."""
        # Errors of torch.compile reach the caller unchanged: compile=auto falls back to eager.
        named = contextlib.nullcontext() if self.compute.compile else self._named_failure(x)
        with named, torch.no_grad(), self._autocast(), self._alone():
            values = dict(self._forward(self._memory_format(x)))
            # A later in-place operation has changed a captured tensor that was not copied. It is
            # copied from now on, and the batch is computed again.
            while self._collector.copy_from_now_on():
                values = dict(self._forward(self._memory_format(x)))
        for name, value in values.items():
            if len(value) != len(x):
                raise RunError(f"{name} gave {len(value)} rows for a batch of {len(x)} images.")
        return values

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Limit the hooks of a replica to the forward pass of the calling thread.

        After the pass they see none, because the next pass of this thread may belong to another
        replica.
        """
        if not self._is_shared:
            yield
            return
        self._hooks.thread = threading.get_ident()
        try:
            yield
        finally:
            self._hooks.thread = _NO_THREAD

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) normalised float32 images on the device of the engine."""
        x = images.to(self.device, non_blocking=True)
        return self.backbone.preprocess.normalise(x) if x.dtype == torch.uint8 else x

    def _memory_format(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x` in the memory format of the run.

        A model may write to its input, so the images of the caller are never passed on.
        """
        channels_last = self.compute.channels_last
        return x.clone(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
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

    def _noise(self, batch_size: int) -> torch.Tensor:
        """(B, 3, H, W) float32 standard normal noise on the device, equal in every run."""
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, 3, *self.backbone.preprocess.crop)
        return torch.randn(shape, generator=generator).to(self.device)


def _clone(point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a captured tensor; later in-place operations do not change it."""
    return tensor.detach().clone()
