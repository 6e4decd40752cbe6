"""A pretrained model on its device: its inputs, one recorded forward pass, and its plain path.

The plain path is the model's own forward pass, without featx's engine. It computes in eval mode and
float32, with the parameters as they were loaded and no BatchNorm folded, to the end of the forward
pass. Hooks of PyTorch alone keep the tensors; the embedding is what the model's library itself
computes (`Backbone.embedding`).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from featx.base import ModuleHooks, exact_cuda, is_memory_exhausted, kept_freed_memory
from featx.engine.compute import COMPUTE_DTYPES
from featx.errors import FeatxError, ModelError, RunError
from featx.layers import (
    REDUCTIONS,
    CapturePoint,
    ChosenLayers,
    RowLayout,
    StoredReduce,
    Trace,
    are_weights,
    bound_reduction,
    cubes_of_maps,
    is_cube,
    is_exposed,
    is_known_map,
    no_fast_path,
    pick,
    plain_attention,
    size_beside,
    trace_forward,
    uncompiled,
    with_evidence,
    with_stages,
)
from featx.models import Backbone, eval_mode

# The two sizes differ, so a dimension that follows the batch differs in both passes.
_TRACE_BATCH, ATTACH_BATCH = 2, 3


_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "HIP error")
"""Beginnings of the messages of a RuntimeError of torch about a device."""

_HOOKED = ("input", "output")
"""Kinds of captures that hooks of PyTorch keep as well."""

_UNCHANGED = ("none", "flatten")
"""Reductions that leave an embedding as it is."""


class DeviceModel:
    """A backbone on one device, without captures; a context manager.

    Attributes:
        module: module of the backbone, on the device.
        plain_modules: names of the modules whose fused attention `trace` has turned off.
        traced: forward pass that `trace` recorded last, or None.
        process_stack: stack of settings of this process, which are in effect until it is closed.
        trial_images: (n, 3, H, W) images of the data set, uint8 in [0, 255] or normalised float32,
            for checks that noise alone does not suffice for; None if there are none.
    """

    def __init__(self, backbone: Backbone, device: torch.device) -> None:
        self.backbone = backbone
        self.device = device
        self.module: nn.Module = backbone.module.to(device)
        self.traced: Trace | None = None
        self.trial_images: torch.Tensor | None = None
        self.plain_modules: list[str] = []
        self.process_stack = contextlib.ExitStack()
        self._settings = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._settings.push(self.process_stack)
        self.process_stack.enter_context(self.process_settings())
        if self.device.type == "cpu":
            self._settings.enter_context(kept_freed_memory)
        self._settings.enter_context(uncompiled(self.module))
        return self

    def __exit__(self, *error: object) -> None:
        # Process settings first, then whatever the backbone borrowed. The second step runs also if
        # the first one raises.
        with contextlib.ExitStack() as last:
            last.callback(self.backbone.give_back)
            last.callback(self._settings.close)

    @contextlib.contextmanager
    def process_settings(self) -> Iterator[None]:
        """Settings of this process by which layers are called, and values are reproducible."""
        is_cuda = self.device.type == "cuda"
        with no_fast_path, exact_cuda if is_cuda else contextlib.nullcontext():
            yield

    def trace(self, requests: Sequence[str] = ()) -> Trace:
        """Record every call of a module and every operation in one forward pass over noise."""
        plain = plain_attention(self.module, requests)
        self.plain_modules += self._settings.enter_context(plain)
        x, backbone = self.noise(_TRACE_BATCH), self.backbone
        with self.named_failure(x):
            self.traced = trace_forward(self.module, x)
            if "embedding" in requests:
                self.traced = with_evidence(self.traced, self.module, x, backbone.embedding)
                if is_exposed(self.traced):  # with_evidence has just added the module
                    traced = trace_forward(self.module, x)
                    self.traced = with_evidence(traced, self.module, x, backbone.embedding)
            if any(request.partition(":")[0] == "stages" for request in requests):
                self.traced = with_stages(self.traced, self.module, x, backbone.stages)
        return self.traced

    @contextlib.contextmanager
    def named_failure(self, x: torch.Tensor) -> Iterator[None]:
        """Turn any exception of the model into a ModelError that describes the batch `x`.

        Errors of the device become a RunError.
        """
        try:
            yield
        except (FeatxError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_memory_exhausted(error):
                raise
            reason = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
            failure = (
                f"{self.backbone.name}: a forward pass over a batch of images {tuple(x.shape)} "
                f"{str(x.dtype).removeprefix('torch.')} fails with {type(error).__name__}: "
                f"{reason[:300]}."
            )
            if isinstance(error, torch.AcceleratorError) or reason.startswith(_DEVICE_ERRORS):
                # It may come from any call before, as the device computes later than it is asked.
                raise RunError(
                    f"{failure} This is an error of {self.device}, which this process cannot use "
                    "any more. Nothing committed is lost, and the same command resumes. If it "
                    "comes again, CUDA_LAUNCH_BLOCKING=1 and FEATX_DEBUG=1 show the call that "
                    "fails, and device=cpu whether the model is the cause; if it is not, see what "
                    "nvidia-smi and the log of the kernel (dmesg) say about the device."
                ) from error
            raise ModelError(
                f"{failure} The model has to take such a batch as its only argument, in eval "
                "mode on one device. job=layers job.show=watch shows how far it comes, and "
                "FEATX_DEBUG=1 the traceback."
            ) from error

    def bytes_per_image(self, precision: str) -> int:
        """Lower bound of the device memory that a forward pass takes per image, in bytes.

        It counts the normalised pixels and a copy of them, and the input and output of the largest
        traced layer.
        """
        pixels = math.prod(self.backbone.preprocess.shape)
        itemsize = COMPUTE_DTYPES[precision].itemsize
        largest = 0
        if self.traced is not None:
            largest = max(
                sum(math.prod(s) for s in {*call.outputs.values(), *call.inputs.values()})
                // self.traced.batch_size
                for call in self.traced.calls
            )
        return 2 * 4 * pixels + itemsize * largest

    def row_layout(self, point: CapturePoint, value: torch.Tensor) -> RowLayout:
        """Return the layout of the rows of a tensor (B, ...) that is captured at a point."""
        backbone, is_attention = self.backbone, None
        shape, size = tuple(value.shape[1:]), backbone.preprocess.crop
        if value.ndim == 4 and value.is_floating_point() and not point.is_gradient:
            is_attention = value.shape[3] > 1 and are_weights(value)
        if is_cube(shape) and self.traced is not None and self.traced.known_cubes is None:
            self.traced = replace(self.traced, known_cubes=self._known_cubes(self.traced))
        return RowLayout(
            point.name,
            shape,
            size,
            backbone.num_prefix_tokens,
            backbone.has_class_token,
            is_map=is_known_map(shape, size, self.traced),
            is_attention=is_attention,
        )

    def _known_cubes(self, traced: Trace) -> frozenset[tuple[int, ...]]:
        """Return the shapes with three equal sides that are maps (C, H, W) in this model."""
        if not any(map(is_cube, traced.map_shapes)):
            return frozenset()
        size = size_beside(self.backbone.preprocess.crop)
        x = torch.empty(traced.batch_size, 3, *size, device="meta")
        # A copy without memory, because a model may keep what it computes for a size. The method
        # `to` of a quantised parameter moves values that the copy shares with the model.
        parts = [*self.module.parameters(), *self.module.buffers()]
        try:
            memo = {id(p): torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts}
            module = copy.deepcopy(self.module, memo)
            with uncompiled(module):  # torch compiles copies anew
                return cubes_of_maps(traced, trace_forward(module, x), size)
        except Exception:  # noqa: BLE001 - copying a model and running it call any code
            return frozenset()  # such as of a model that takes images of its own size only

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) normalised float32 images on the device of the engine."""
        x = images.to(self.device, non_blocking=True)
        return self.backbone.preprocess.normalise(x) if x.dtype == torch.uint8 else x

    def noise(self, batch_size: int) -> torch.Tensor:
        """(B, 3, H, W) float32 standard normal noise on the device, equal in every run."""
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, *self.backbone.preprocess.shape)
        return torch.randn(shape, generator=generator).to(self.device)

    def trial_batch(self) -> torch.Tensor:
        """(ATTACH_BATCH, 3, H, W) normalised trial images, evenly spread, filled up with noise."""
        noise, images = self.noise(ATTACH_BATCH), self.trial_images
        if images is None or not len(images):
            return noise
        spread_images = images[:: -(-len(images) // ATTACH_BATCH)]
        return torch.cat([self.normalise(spread_images), noise])[:ATTACH_BATCH]

    def regroup(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Two batches in which the first image of `x` is the last one, among other neighbours.

        The first batch surrounds it with copies of itself, the second with images that change any
        statistic of a batch: a black one, and one of random 0 and 255. No other image of `x` is in
        them: if a model only permutes its rows, another image could otherwise stand at the compared
        position and hide the fault.
        """
        shape = self.backbone.preprocess.shape
        generator = torch.Generator().manual_seed(1)
        random_image = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) * 255
        pixels = torch.stack([torch.zeros_like(random_image), random_image])
        black, random_image = self.normalise(pixels)
        among_copies = x[:1].repeat(len(x), 1, 1, 1)
        among_others = torch.stack([*([random_image, black] * len(x))[: len(x) - 1], x[0]])
        return [among_copies, among_others]


def explain_missing_plain_path(point: CapturePoint, reduce: StoredReduce) -> str | None:
    """Explain why rows have no counterpart on the plain path; None if they have one."""
    if point.operation:
        return "operations have no hook of PyTorch"
    if point.capture not in _HOOKED:
        return f"{point.capture} has no hook of PyTorch"
    if REDUCTIONS.get(reduce.name).needs_statistics:
        return f"reduce={reduce.name} may enlarge differences"
    return None


def plain_rows(
    model: DeviceModel, chosen: ChosenLayers, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Compute rows by the plain path of a model without hooks, from normalised float32 images.

    They are dataset name -> (B, ...) float32 on the CPU. `explain_missing_plain_path` must accept
    the captures. Raises ModelError if the forward pass fails.
    """
    library = model.backbone.embedding
    are_embeddings = all(p.name == "embedding" and r.name in _UNCHANGED for p, r in chosen)
    with model.named_failure(x), torch.no_grad(), eval_mode(model.module):
        if library is not None and are_embeddings:
            rows = {"embedding": library.compute(x.clone())}
        else:
            values = _captured_values(model.module, chosen, x)
            rows = {
                point.name: bound_reduction(reduce, model.row_layout(point, value))(value)
                for point, reduce in chosen
                if (value := values.get(point.name)) is not None  # None: the layer was not called
            }
    return {name: value.float().cpu() for name, value in rows.items()}


def _captured_values(
    module: nn.Module, chosen: ChosenLayers, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Copies of the captured tensors of one forward pass, by hooks of PyTorch."""
    values: dict[str, torch.Tensor] = {}
    calls: dict[str, int] = {}

    def keep(point: CapturePoint, _: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        calls[point.name] = calls.get(point.name, 0) + 1
        if calls[point.name] == (point.call or 1):
            inputs = [*args, *kwargs.values()]
            value = pick(inputs if point.capture == "input" else output, point)
            values[point.name] = value.detach().clone()

    with ModuleHooks() as hooks:
        for point, _ in chosen:
            part, hook = module.get_submodule(point.module), partial(keep, point)
            if point.capture == "input":
                hooks.add(part, hook)
            else:
                hooks.add(part, after=hook)
        module(x.clone())
    return values
