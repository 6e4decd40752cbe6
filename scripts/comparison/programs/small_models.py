"""Models of a few weights for model=custom, and one that waits to be killed."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn


class SmallConvNet(nn.Module):
    """conv: (8, 4, 4), deep: (6, 4, 4), pool: (6, 1, 1) of an image of 32 by 32 pixels.

    From `parts` files in `folder` on, forward passes wait while the file `hold` exists; each pass
    lasts half a second then, so that the part before it is committed. A value of `deep` above
    `poison` makes `pool` NaN.
    """

    args_without_effect = ("parts", "folder")

    def __init__(
        self, channels: int = 3, parts: int = 0, folder: str = "", poison: float | None = None
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 8, stride=8)
        self.deep = nn.Conv2d(8, 6, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 4)
        self.parts, self.folder, self.poison = parts, Path(folder), poison

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four logits."""
        if self.parts and self.folder.parent.exists() and Path("hold").exists():
            time.sleep(0.5)
            while Path("hold").exists() and num_files(self.folder) >= self.parts:
                time.sleep(0.05)
        x = self.deep(self.conv(x).relu())
        if self.poison is not None:
            x = torch.where(x.amax((1, 2, 3), keepdim=True) > self.poison, float("nan"), x)
        return self.head(self.pool(x).flatten(1))


def num_files(folder: Path) -> int:
    """Return the number of files that a run has committed to a folder."""
    if not folder.is_dir():
        return 0
    return sum(not path.name.startswith(".") for path in folder.iterdir())
