"""The weights of a model as the forward passes of a run read them: folded, laid out and cast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from featx.engine.attached_captures import AttachedCaptures
from featx.engine.compute import COMPUTE_DTYPES, Compute
from featx.engine.device_model import DeviceModel
from featx.engine.weight_casting import Captured, CastableWeights, cast_weights, castable_weights
from featx.models import Pair, fold_pairs, foldable_pairs

_PROOF_BATCH = 2
"""Number of images of noise, and of the trial, on which weight casting is compared with autocast.
"""

Passes = Callable[[Sequence[torch.Tensor]], Captured]
"""Function from normalised batches (B, 3, H, W) to the captured tensors of each."""


class PreparedWeights:
    """Prepares the weights of one model with given captures, and remembers what was proven.

    Args:
        model: model without hooks, with weights as they were loaded.
        captures: captures that were attached to it.
        needs_gradients: whether backward passes go through the module.

    Attributes:
        cast: the parameters that are cast once with the current settings.
        pairs: the pairs of modules that can be folded; None until `foldable` is called.
    """

    def __init__(
        self, model: DeviceModel, captures: AttachedCaptures, needs_gradients: bool
    ) -> None:
        self.cast = CastableWeights()
        self.pairs: list[Pair] | None = None
        self._model = model
        self._captures = captures
        self._needs_gradients = needs_gradients
        self._proven: dict[tuple[str, bool, bool], CastableWeights] = {}

    def foldable(self) -> list[Pair]:
        """Return the pairs of modules that can be folded; captured modules are left alone.

        There are none if gradients are taken or the control flow may depend on the data. Call it
        while nothing is folded or cast.
        """
        captures, model = self._captures, self._model
        if self._needs_gradients or captures.follows_data:
            return []
        if self.pairs is None:
            captured = {point.module for point in captures.points}
            x = model.trial_batch()
            with model.named_failure(x):
                self.pairs = foldable_pairs(model.module, x, captured)
        return self.pairs

    @contextlib.contextmanager
    def prepare(self, compute: Compute, passes: Passes | None) -> Iterator[None]:
        """Fold, lay out and cast the weights until the block ends.

        The memory format stays afterwards.

        Args:
            compute: the settings.
            passes: forward passes at the precision of `compute`, by which casting is proven to
                change nothing; None to let autocast cast in each pass.
        """
        module = self._model.module
        with contextlib.ExitStack() as stack:
            if compute.fold_batchnorm:
                stack.enter_context(fold_pairs(self.foldable()))
            layout = torch.channels_last if compute.channels_last else torch.contiguous_format
            module.to(memory_format=layout)
            # Without autograd the flag costs nothing, and it changes the kernels: torch multiplies
            # a batch of sequences by a weight that requires gradients in one product, but for some
            # layouts of other weights makes a copy for each image. Captured gradients are those of
            # activations, so weights never need any.
            for parameter in module.parameters():
                if parameter.is_floating_point() and not parameter.is_inference():
                    parameter.requires_grad_(not self._needs_gradients)
            # Casting comes last: the weights must already be folded and in their memory format, as
            # the forward passes will read them.
            castable = None if passes is None else self._castable(compute, passes)
            self.cast = castable or CastableWeights()
            dtype = COMPUTE_DTYPES[compute.precision]
            stack.enter_context(cast_weights(module, self.cast.names, dtype))
            yield

    def _castable(self, compute: Compute, passes: Passes) -> CastableWeights:
        """Return the weights to cast once; none in fp32, with gradients or without captures."""
        captures, model = self._captures, self._model
        if compute.precision == "fp32" or self._needs_gradients or captures.order is None:
            return CastableWeights()
        key = compute.precision, compute.channels_last, compute.fold_batchnorm
        if key not in self._proven:
            batches = [model.noise(_PROOF_BATCH)]
            if model.trial_images is not None and len(model.trial_images):
                batches.append(model.normalise(model.trial_images[:_PROOF_BATCH]))
            dtype = COMPUTE_DTYPES[compute.precision]
            with model.named_failure(batches[0]):
                self._proven[key] = castable_weights(model.module, dtype, lambda: passes(batches))
        return self._proven[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters, including the float32 originals of those that are cast."""
        cast = set(self.cast.names)
        return sum(
            p.numel() * (p.element_size() + 4 * (name in cast))
            for name, p in self._model.module.named_parameters()
        )
