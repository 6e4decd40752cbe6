"""Programs of torch.export as users save them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, BatchNorm and a linear layer for images of any size, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.BatchNorm2d(8), nn.ReLU())
            self.block = nn.Conv2d(8, 6, 3, padding=1)
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(6, 4)
            nn.init.normal_(self.stem[1].running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) float32 -> (B, 4) float32."""
        logits: torch.Tensor = self.head(self.drop(self.block(self.stem(x)).mean((2, 3))))
        return logits


def export(
    path: Path,
    module: nn.Module,
    *images: torch.Tensor,
    sizes: dict[int, Any] | None = None,
    **keywords: torch.Tensor,
) -> Path:
    """Write a module as a program.

    Args:
        path: file.
        module: the module, in the mode in which it is exported.
        images: positional arguments; two images of 32 pixels if there are none of either kind.
        sizes: dimension -> torch.export.Dim of every argument; {} fixes all sizes, None leaves the
            batch size free.
        keywords: keyword arguments.
    """
    if not images and not keywords:
        images = (torch.zeros(2, 3, 32, 32),)
    free = {0: torch.export.Dim("batch")} if sizes is None else sizes
    shapes = (free,) * len(images) or dict.fromkeys(keywords, free)
    program = torch.export.export(module, images, keywords, dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def edited(path: Path, source: Path, member: str, change: Callable[[bytes], bytes | None]) -> Path:
    """Write a copy of an archive in which a member is changed, or left out.

    Args:
        path: the new file.
        source: the archive.
        member: end of the name of the member.
        change: function of its bytes; None leaves it out.
    """
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as made:
        for name in archive.namelist():
            data: bytes | None = archive.read(name)
            if name.endswith(member) and data is not None:
                data = change(data)
            if data is not None:
                made.writestr(name, data)
    return path
