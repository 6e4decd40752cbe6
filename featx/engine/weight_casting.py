"""Weights cast once per run: to the values that autocast computes anew in every forward pass.

Autocast casts the float32 weights of products and convolutions to its own dtype. Which parameters
these are is observed in a forward pass, and a second one proves that nothing else changes. In the
end autocast stays on, but finds nothing left to cast, so threads and streams share no cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from featx.engine.row_checks import same_bits

_CAST = torch.ops.aten._to_copy.default
"""The operation that autocast's cast of a weight arrives as."""

Captured = Sequence[Mapping[str, torch.Tensor]]
"""One mapping for each forward pass: name of a captured tensor -> the tensor."""


@dataclass(frozen=True)
class CastableWeights:
    """The parameters that may be cast once.

    Attributes:
        names: of the parameters, as `Module.named_parameters` gives them.
        doubt: why there are none although autocast casts some; empty otherwise.
    """

    names: tuple[str, ...] = ()
    doubt: str = ""


def castable_weights(
    module: nn.Module, dtype: torch.dtype, forward: Callable[[], Captured]
) -> CastableWeights:
    """Find the parameters that autocast casts and nothing else reads, and prove it.

    Args:
        module: in eval mode, with the parameters that a run computes with.
        dtype: of autocast.
        forward: makes forward passes of the module under autocast, the same in each call.

    Raises:
        Exception: whatever `forward` raises while the weights are as they were.
    """
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
        with weights_cast(module, names, dtype):
            found = forward()
    except Exception as error:  # noqa: BLE001 - a model that reads weight.dtype may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CastableWeights(doubt=f"the model fails: {reason}")
    for before, after in zip(expected, found, strict=True):
        for name, value in before.items():
            if value.dtype != after[name].dtype:
                dtypes = f"{value.dtype} becomes {after[name].dtype}".replace("torch.", "")
                return CastableWeights(doubt=f"{name} changes: {dtypes}")
            if not same_bits(value, after[name]):
                return CastableWeights(doubt=f"{name} changes")
    return CastableWeights(names)


@contextlib.contextmanager
def weights_cast(module: nn.Module, names: Collection[str], dtype: torch.dtype) -> Iterator[None]:
    """The named parameters in `dtype`, with their memory format, until the block ends.

    The Parameter objects stay, and so do their flags and the tensors that hold their own values.
    """
    parameters = dict(module.named_parameters())
    before = [(parameters[name], parameters[name].data) for name in names]
    try:
        for parameter, data in before:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


class _WeightUses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how operations read some storages; autocast's casts arrive here like any operation.

    Args:
        storages: of the parameters, as `_cdata` names them.
        dtype: of autocast.

    Attributes:
        cast: the storages that were cast to `dtype`.
        other: the storages that anything else read or wrote. A view, such as a chunk of
            `in_proj_weight`, is no use by itself: what reads it has the same storage.
    """

    def __init__(self, storages: set[int], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._dtype = dtype
        self.cast: set[int] = set()
        self.other: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports torch._dynamo, which takes more than a second.
        return False

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


def _storage_of(value: Any) -> int | None:
    """The identity of a tensor's storage; None for other values and tensors without a storage."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers around other tensors
        return None


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter's data can be replaced: neither a subclass nor an inference tensor."""
    return (
        type(parameter) is nn.Parameter
        and type(parameter.data) is torch.Tensor
        and parameter.layout == torch.strided
        and parameter.is_floating_point()
        and not parameter.is_inference()
    )
