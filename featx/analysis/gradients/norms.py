"""L2 norms of gradients without underflow or overflow, kept on the device until a step ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

_SMALLEST_FLOAT32_NORM = 1e-16
"""Norm below which squares start to underflow in float32, so that the norm is computed in
float64."""


def norms_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute L2 norms as scalars on the devices of the tensors, without underflow or overflow.

    In float32, squares underflow for a gradient of 1e-25 and overflow for large finite ones. On an
    accelerator the norm is computed in float64, which costs little compared with reading the data.
    On a CPU, where checking the result needs no synchronisation, float64 is used only if float32
    fails.
    """
    if not tensors:
        return []
    real = [torch.view_as_real(x) if x.is_complex() else x for x in map(torch.detach, tensors)]
    kinds = {x.device.type for x in real}
    if kinds != {"cpu"}:
        # Apple GPUs have no float64.
        wide = torch.float32 if "mps" in kinds else torch.float64
        return list(torch._foreach_norm(real, 2.0, wide))
    small = (torch.float16, torch.bfloat16)
    norms = list(torch._foreach_norm([x.float() if x.dtype in small else x for x in real], 2.0))
    for i, norm in enumerate(norms):
        if not _SMALLEST_FLOAT32_NORM < float(norm) < math.inf:
            norms[i] = torch.linalg.vector_norm(real[i].double())
    return norms


def copy_to_cpu(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalar tensors, with one copy from each device."""
    values = [0.0] * len(scalars)
    for device in {x.device for x in scalars}:
        places = [i for i, x in enumerate(scalars) if x.device == device]
        wide = torch.float32 if device.type == "mps" else torch.float64
        moved = torch.stack([scalars[i].to(wide) for i in places]).tolist()
        for i, value in zip(places, moved, strict=True):
            values[i] = value
    return values


def norm_of_norms(norms: Iterable[float]) -> float:
    """Combine the norms of parts to the norm of the whole; NaN if one of them is NaN."""
    norms = list(norms)
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def norms_by_module(parameters: Mapping[str, float]) -> dict[str, float]:
    """Combine the norms of parameters, by dotted name, to one norm per module."""
    parts: dict[str, list[float]] = {}
    for name, norm in parameters.items():
        parts.setdefault(name.rpartition(".")[0], []).append(norm)
    return {name: norm_of_norms(norms) for name, norms in parts.items()}
