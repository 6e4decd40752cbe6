"""Comparison of rows as tensors: tolerance, cosine, equal bits, finite values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from featx.errors import ModelError
from featx.layers import largest_magnitudes
from featx.types import Array

MOVED_TOLERANCE = {"fp32": 1.0, "fp16": 8.0, "bf16": 64.0}
"""Precision -> tolerance for a row computed at another position of the batch, as a multiple of
`row_tolerance`.

Kernels of one shape have so far given equal bits at every position. The tolerance allows for a
kernel that does not, which moves a value by a few units in the last place: 2^-11 in fp16, 2^-8 in
bf16.
"""


def row_tolerance(row: torch.Tensor) -> float:
    """Tolerance for one row in two passes: 1e-3 of its largest finite magnitude, 0 without any."""
    finite = row[torch.isfinite(row)]
    return 1e-3 * float(finite.abs().max()) if len(finite) else 0.0


def check_row(
    name: str, row: torch.Tensor, other: torch.Tensor, rounding: float = 0.0, scale: float = 1.0
) -> None:
    """Raise ModelError if the rows of an image in two batches differ by more than the tolerance.

    `rounding` is an absolute tolerance, in the unit of the row, to which that of `row_tolerance` is
    added, times `scale`. The name is that of the dataset, for the message.
    """
    row, other = row.cpu().double(), other.cpu().double()  # MPS has no float64
    tolerance = scale * row_tolerance(row) + rounding
    if not torch.allclose(row, other, rtol=0, atol=tolerance, equal_nan=True):
        raise ModelError(
            f"{name}: the row of an image changes by {(row - other).abs().max():.2g} with the "
            "other images of its batch, with its position in the batch, or from one pass to the "
            "next. Possible causes are dropout or batch statistics in eval mode, a scale of the "
            "whole batch in dynamic quantisation, or sorting. Rows would not be reproducible: "
            "correct the model, or choose a layer in front of the cause."
        )


def differ_by_rounding(
    values: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether the rows of two passes differ by a tenth of `row_tolerance` at most."""
    return all(
        torch.allclose(
            row.double(), same.double(), rtol=0, atol=0.1 * row_tolerance(row), equal_nan=True
        )
        for name in plain
        for row, same in zip(plain[name].cpu(), values[name].cpu(), strict=True)
    )


def row_cosines(
    features: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> float:
    """Smallest cosine between matching rows over all layers; -1 if a row is not finite."""
    smallest = 1.0
    for name, value in features.items():
        a = value.reshape(len(value), -1).double()
        b = reference[name].reshape(len(value), -1).double()
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            return -1.0
        lengths = a.norm(dim=1) * b.norm(dim=1)
        # A row of zeros has no direction: its cosine counts as 1 if the other row is zero as well,
        # else 0.
        cosine = torch.where(lengths > 0, (a * b).sum(1) / lengths, (a == b).all(1).double())
        smallest = min(smallest, float(cosine.min()))
    return smallest


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal shapes, dtypes and bytes; NaN equals the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def stored_bits(value: torch.Tensor) -> Array:
    """A CPU tensor as the array that the store writes: bfloat16 as the uint16 of its bits.

    numpy has no bfloat16.
    """
    bits: Array = (
        value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    )
    return bits


def finite_rows(features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dataset name -> (B,) bool on the device: whether a row has neither NaN nor infinity.

    The largest magnitude of a row is NaN if any value is, and takes a tenth of the time of
    `isfinite` on a CPU. A comparison is one kernel on a GPU, `isfinite` four.
    """
    return {name: largest_magnitudes(value) < math.inf for name, value in features.items()}


def describe_nonfinite(value: torch.Tensor, precision: str, store_dtype: torch.dtype) -> str:
    """The reason why a row, (n,) before the cast, is not finite in the dtype of the store."""
    nonfinite = value[~torch.isfinite(value)]
    if len(nonfinite):
        return f"{nonfinite[0].item()} in {precision}"
    limit = torch.finfo(store_dtype).max
    largest = value.abs().max().item()
    return f"{largest:g}, over {limit:g}, the largest {str(store_dtype).removeprefix('torch.')}"
