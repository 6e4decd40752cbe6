"""reduce=align: concatenated layers are the patch embedding of anomalib's PatchCore."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from featx.config import make_reduce
from featx.errors import ConfigError, ReduceError
from featx.layers import RowLayout, reduction


def patchcore_embedding(maps: list[torch.Tensor]) -> torch.Tensor:
    """The formula of anomalib's PatchcoreModel.generate_embedding: (B, sum of C, H, W)."""
    pooled = [nn.AvgPool2d(3, 1, 1)(x) for x in maps]
    size = pooled[0].shape[-2:]
    resized = [F.interpolate(x, size=size, mode="bilinear") for x in pooled[1:]]
    return torch.cat([pooled[0], *resized], 1)


def test_concatenated_layers_are_patchcores() -> None:
    maps = [torch.randn(3, 6, 8, 8), torch.randn(3, 10, 4, 4), torch.randn(3, 5, 2, 2)]
    asked = make_reduce("align", rows=8, columns=8, pool=3)
    found = [reduction(asked, RowLayout("x", tuple(x.shape[1:]), (32, 32)))(x) for x in maps]
    torch.testing.assert_close(torch.cat(found, 1), patchcore_embedding(maps), rtol=0, atol=1e-5)


def test_tokens_and_channels_last_maps_are_the_same_map() -> None:
    x = torch.randn(2, 6, 4, 4)
    asked = make_reduce("align", rows=7, columns=5)
    expected = F.interpolate(x, (7, 5), mode="bilinear")
    tokens = torch.cat([torch.randn(2, 1, 6), x.flatten(2).transpose(1, 2)], 1)
    for given in (x, x.movedim(1, -1), tokens):
        rows = RowLayout("x", tuple(given.shape[1:]), (32, 32), num_prefix_tokens=1)
        found = reduction(asked, rows)(given)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reduce\.pool=2: expected an odd number"):
        make_reduce("align", pool=2)
    with pytest.raises(ConfigError, match=r"reduce\.rows=0"):
        make_reduce("align", rows=0)
    with pytest.raises(ReduceError, match="expected a map or patch tokens"):
        reduction(make_reduce("align"), RowLayout("x", (6,), (32, 32)))
