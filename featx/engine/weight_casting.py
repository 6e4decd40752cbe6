"""Casting of weights once per run instead of in every forward pass.

Autocast casts the float32 weights of matrix products and convolutions to its dtype in each forward
pass. One observed pass finds these parameters; a second one proves that casting them beforehand
gives equal bits. Autocast stays on but finds nothing left to cast, so its cache of casts, which all
threads and streams share, stays empty.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from featx.base import ObservingMode
from featx.engine.attached_captures import AttachedCaptures
from featx.engine.compute import COMPUTE_DTYPES, Compute
from featx.engine.device_model import DeviceModel
from featx.engine.row_checks import same_bits
from featx.models import Pair, fold_pairs, foldable_pairs

_CAST = torch.ops.aten._to_copy.default
"""The ATen operation by which autocast casts a weight."""

Captured = Sequence[Mapping[str, torch.Tensor]]
"""One mapping per forward pass: name of a captured tensor -> the tensor."""


@dataclass(frozen=True)
class CastableWeights:
    """Names of the parameters that may be cast once.

    `doubt` is the reason why there are none although autocast casts some; otherwise empty.
    """

    names: tuple[str, ...] = ()
    doubt: str = ""


def castable_weights(
    module: nn.Module, dtype: torch.dtype, forward: Callable[[], Captured]
) -> CastableWeights:
    """Find the parameters that autocast casts and nothing else reads, and prove it."""
    parameters = {name: p for name, p in module.named_parameters() if _is_plain(p)}
    storages = {name: _storage_of(p) for name, p in parameters.items()}
    uses = _WeightUses({s for s in storages.values() if s is not None}, dtype)
    with uses:
        expected = forward()
    only_cast = uses.cast - uses.other
    names = tuple(name for name, storage in storages.items() if storage in only_cast)
    if not names:
        return CastableWeights()
    try:
        with cast_weights(module, names, dtype):
            actual = forward()
    except Exception as error:  # noqa: BLE001 - a model that reads weight.dtype may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CastableWeights(doubt=f"the model fails: {reason}")
    for before, after in zip(expected, actual, strict=True):
        for name, value in before.items():
            if value.dtype != after[name].dtype:
                dtypes = f"{value.dtype} becomes {after[name].dtype}".replace("torch.", "")
                return CastableWeights(doubt=f"{name} changes: {dtypes}")
            if not same_bits(value, after[name]):
                return CastableWeights(doubt=f"{name} changes")
    return CastableWeights(names)


@contextlib.contextmanager
def cast_weights(module: nn.Module, names: Collection[str], dtype: torch.dtype) -> Iterator[None]:
    """Replace the data of the named parameters by casts to `dtype` until the block ends.

    The Parameter objects, their flags and their memory format stay. The original data come back,
    also after an exception.
    """
    parameters = dict(module.named_parameters())
    originals = [(parameters[name], parameters[name].data) for name in names]
    try:
        for parameter, data in originals:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


class _WeightUses(ObservingMode):  # type: ignore[no-untyped-call]
    """Records how operations, the casts of autocast among them, read some storages."""

    def __init__(self, storages: set[int], dtype: torch.dtype) -> None:
        super().__init__()
        self._storages = storages
        self._dtype = dtype
        self.cast: set[int] = set()
        self.other: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_cast = func is _CAST and kwargs.get("dtype") == self._dtype
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                storage = _storage_of(value)
                if storage is not None and storage in self._storages:
                    (self.cast if is_cast else self.other).add(storage)
        return func(*args, **kwargs)


def _storage_of(value: object) -> int | None:
    """The identity of the storage of a tensor, or None for other values and tensors without one."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrapper subclasses
        return None


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether the data of a parameter is replaceable: no subclass, no inference tensor."""
    return (
        type(parameter) is nn.Parameter
        and type(parameter.data) is torch.Tensor
        and parameter.layout == torch.strided
        and parameter.is_floating_point()
        and not parameter.is_inference()
    )


_PROOF_BATCH = 2
"""Number of images of noise, and of the trial, on which weight casting is compared with autocast.
"""

Passes = Callable[[Sequence[torch.Tensor]], Captured]
"""Function from normalised batches (B, 3, H, W) to the captured tensors of each."""


class PreparedWeights:
    """Prepares the weights of one model with given captures, and remembers what was proven.

    The model has no hooks, and its weights are as they were loaded. `cast` are the parameters that
    are cast once with the current settings; `pairs` the pairs of modules that can be folded, None
    until `foldable` is called.
    """

    def __init__(
        self, model: DeviceModel, captures: AttachedCaptures, needs_gradients: bool
    ) -> None:
        self.cast = CastableWeights()
        self.pairs: list[Pair] | None = None
        # The model owns this object: a strong reference would keep its weights on the device until
        # Python looks for reference cycles.
        self._model: DeviceModel = weakref.proxy(model)
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

        The memory format stays afterwards. `passes` are forward passes at the precision of
        `compute`, by which casting is proven to change nothing; None lets autocast cast each time.
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
            self.cast = CastableWeights()
            dtype = COMPUTE_DTYPES[compute.precision]
            knows_captures = self._captures.expected.fired is not None
            is_fp32 = compute.precision == "fp32"
            if passes is not None and not is_fp32 and not self._needs_gradients and knows_captures:
                key = compute.precision, compute.channels_last, compute.fold_batchnorm
                if key not in self._proven:
                    self._proven[key] = self._prove(dtype, passes)
                self.cast = self._proven[key]
            stack.enter_context(cast_weights(module, self.cast.names, dtype))
            yield

    def _prove(self, dtype: torch.dtype, passes: Passes) -> CastableWeights:
        """Return the weights to cast once, by passes over noise and over trial images."""
        model = self._model
        batches = [model.noise(_PROOF_BATCH)]
        if model.trial_images is not None and len(model.trial_images):
            batches.append(model.normalise(model.trial_images[:_PROOF_BATCH]))
        with model.named_failure(batches[0]):
            return castable_weights(model.module, dtype, lambda: passes(batches))

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters, including the float32 originals of those that are cast."""
        cast = set(self.cast.names)
        return sum(
            p.numel() * (p.element_size() + 4 * (name in cast))
            for name, p in self._model.module.named_parameters()
        )
