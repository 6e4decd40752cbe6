"""Settings of the computation (precision, compilation, memory format), and the computed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.layers import CapturePoint, StoredReduce
from featx.types import LayerSpec

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Value of the option `precision` -> dtype of autocast; float32 means no autocast."""

MIN_COSINE = 0.999
"""Smallest cosine to fp32 that precision=auto and compile=auto accept for any row of any layer."""

MIN_SPEEDUP = 1.1
"""Smallest gain that counts. Below it precision=auto keeps the more exact precision, and
compile=auto keeps the eager model, which can compute parallel batches on a CPU."""


@dataclass(frozen=True)
class Compute:
    """Settings of the computation; every field affects the values and is part of the fingerprint,
    as a JSON type.

    Attributes:
        precision: 'fp32', 'bf16' or 'fp16', by autocast.
        channels_last: whether images and convolution weights are in channels-last memory format.
        batch_size: images per forward pass; the last batch is padded to it.
        fold_batchnorm: whether BatchNorm is folded into the convolutions before it.
    """

    precision: str
    compile: bool
    channels_last: bool
    batch_size: int
    fold_batchnorm: bool = False


@dataclass(frozen=True)
class Formats:
    """Faster settings of `Compute` that `Engine.formats` found to give the same values.

    `num_folded` is the number of BatchNorm modules that can be folded, if folding was asked for.
    `values` are dataset name -> (n, ...) rows of the images in fp32 with these settings, in the
    dtype of the store and on the device; None unless all images were computed.
    """

    channels_last: bool
    fold_batchnorm: bool
    num_folded: int = 0
    values: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class TimedRows:
    """Rows of a batch, and the seconds per image of the fastest pass.

    `rows` are dataset name -> (B, ...) on the CPU, in the dtype of the store.
    """

    rows: Mapping[str, torch.Tensor]
    seconds_per_image: float


@dataclass(frozen=True)
class BatchRows:
    """Rows of one batch, and what was found out about them.

    Attributes:
        features: dataset name -> (B, ...) in the dtype of the store.
        finite: dataset name -> (B,) whether a row has neither NaN nor infinity.
        underflow: dataset name -> (B,) whether a row is too small for float16; only datasets whose
            rows are cast to float16.
    """

    features: dict[str, torch.Tensor]
    finite: dict[str, npt.NDArray[np.bool_]]
    underflow: dict[str, npt.NDArray[np.bool_]]


def spec_of(
    point: CapturePoint,
    reduce: StoredReduce,
    value: torch.Tensor,
    compute_dtype: torch.dtype,
    bound_args: Mapping[str, float | str] | None = None,
) -> LayerSpec:
    """Description of the rows of one dataset, (B, ...) in the dtype of the store.

    `compute_dtype` is that in which the layer computed them; `bound_args` are parameters of the
    reduction that follow from the layer.
    """
    return LayerSpec(
        name=point.name,
        layer=point.layer,
        capture=point.capture,
        reduce=reduce.name,
        reduce_args={**reduce.args, **(bound_args or {})},
        shape=tuple(value.shape[1:]),
        dtype=str(value.dtype).removeprefix("torch."),
        compute_dtype=str(compute_dtype).removeprefix("torch."),
    )
