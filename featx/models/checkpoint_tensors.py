"""Tensors of a checkpoint under the names of a module, and what their names say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

COUNTER = "num_batches_tracked"
"""Counter of BatchNorm, which eval mode never reads. Files written before PyTorch 0.4.1 lack it,
and in files converted to float16 it may be infinite."""

TRAINING_ONLY = ("mask_token", "decoder_")
"""Beginnings of the names of parameters that only the training of a model reads."""

CONSTANTS = (
    "relative_position_index",
    "relative_coords_table",
    "attn_mask",
    "bias_mask",
    "periods",
)
"""Endings of the names of buffers that the code of a model computes from its size."""


@dataclass(frozen=True)
class CheckpointMatch:
    """Tensors of a checkpoint under the names of a module.

    Attributes:
        tensors: name in the module -> tensor; also names that the module lacks, such as those of a
            head of other classes.
        sources: name in the module -> names in the file of what the tensor was made of.
        file_names: names of all tensors in the file.
        prefix: what stands before the names in the file.
        heads: names of the classifiers of the module, which the checkpoint may lack.
        conversion: name of the function that converted the names, or ''.
        computed: names in the module whose values the conversion has interpolated.
        lost: names in the file of tensors behind the prefix, not zero, that the conversion leaves
            out although it takes others of the same part.
    """

    tensors: Mapping[str, torch.Tensor]
    sources: Mapping[str, Collection[str]]
    file_names: Collection[str]
    prefix: str
    heads: Collection[str] = ()
    conversion: str = ""
    computed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def first_part(name: str) -> str:
    """Return the name of the mapping or module to which a tensor belongs, or its own."""
    return name.replace("/", ".").partition(".")[0]
