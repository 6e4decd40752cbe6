"""Models of a few weights, which tests of several packages share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class TwoStageConvNet(nn.Module):
    """conv: (8, 4, 4), deep: (6, 4, 4), pool: (6, 1, 1) of an image of 32 by 32 pixels.

    Args:
        poison: `pool` is NaN where the mean of `deep` is above this.
        scale: of the weights of `conv`.
        pause_s: how long every forward waits.
        hang: a forward pass lasts, for 30 s at the most, while this file exists.
    """

    args_without_effect = ("pause_s", "hang")

    def __init__(
        self,
        poison: float | None = None,
        scale: float = 1.0,
        pause_s: float = 0.0,
        hang: str = "",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 8, stride=8)
        self.deep = nn.Conv2d(8, 6, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 4)
        self.conv.weight.data *= scale
        self.poison, self.pause_s, self.hang = poison, pause_s, hang

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s)
        started_at = time.monotonic()
        while self.hang and Path(self.hang).exists() and time.monotonic() - started_at < 30:
            time.sleep(0.05)
        x = self.deep(self.conv(x))
        if self.poison is not None:
            bright = (x.flatten(1).mean(1) > self.poison)[:, None, None, None]
            x = torch.where(bright, float("nan"), x)
        return self.head(self.pool(x).flatten(1))


class OfOneSize(TwoStageConvNet):
    """Takes images of 64 x 64 pixels only, as a ViT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[2:] == (64, 64)
        return super().forward(x)


class ResidualConvNet(nn.Module):
    """conv -> bn -> in-place relu -> conv -> += identity -> in-place relu -> fc."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn(self.conv1(x)))
        out = self.conv2(out)
        out += x
        return self.fc(self.pool(self.relu(out)).flatten(1))


class ClampedNet(nn.Module):
    """An in-place ReLU6 behind values that noise keeps in [0, 6] and images do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.clamp = nn.ReLU(), nn.ReLU6(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.clamp(self.layer(x))


class SequenceFirst(nn.Module):
    """(B, T, C) to (T, B, C), as PyTorch's transformers give by default."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


class ZeroDivisionBetween(nn.Sequential):
    """Two layers, with a division by zero between them that no layer owns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x) / 0)


class ConvBatchNorm(nn.Module):
    """conv -> bn, and another layer that reads the output of the convolution, if any does."""

    def __init__(self, read_twice: bool = False, called_twice: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.read_twice, self.called_twice = read_twice, called_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = self.relu(self.bn(y))
        if self.read_twice:
            z = z + y
        return self.relu(self.bn(self.conv(z))) if self.called_twice else z


def with_statistics(module: nn.Module) -> nn.Module:
    """Running statistics, weights and biases that are not those of a new BatchNorm."""
    generator = torch.Generator().manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            for values in (*part.buffers(), *part.parameters()):
                values = values if values.is_floating_point() else torch.empty(0)
                values.data.copy_(0.5 + torch.rand(values.shape, generator=generator))
    return module.eval().requires_grad_(False)


class PatchTransformer(nn.Module):
    """nn.TransformerEncoderLayer over patches, sequence first or batch first."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = self.layer(x if self.batch_first else x.transpose(0, 1))
        return self.fc(x.mean(1 if self.batch_first else 0))


def vision_transformer(**options: Any) -> nn.Module:
    """timm's for 16 by 16 pixels, with 17 tokens, 2 heads and fused attention."""
    import timm  # takes 0.4 s, which commands and workers with the other models need not pay

    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=3, **options
    )
    for block in model.blocks:
        block.attn.qkv.weight.data *= 50  # attention far from uniform
    return model.eval()


LIVING: list[nn.Module] = []


def living() -> nn.Module:
    """A factory that gives the module of the user's own in LIVING, which lives on after the run."""
    return LIVING[0]


class PatchColours(nn.Module):
    """maps: (3, 8, 8) mean colours of patches of an image of 32 by 32 pixels; tokens: (66, 3) the
    same behind two tokens of the whole image, rows first.
    """

    num_prefix_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.AvgPool2d(4)
        self.tokens = _Prefixed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(self.maps(x)).mean(1)


class PatchColoursWithoutPrefix(PatchColours):
    """The same without the attribute: which tokens are patches is unknown."""

    num_prefix_tokens = 0


class _Prefixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return torch.cat([tokens.mean(1, keepdim=True).expand(-1, 2, -1) + 9, tokens], 1)
