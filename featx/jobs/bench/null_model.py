"""A model that costs nothing, to measure what all the rest costs."""

from __future__ import annotations

import torch
from torch import nn


class Nothing(nn.Module):
    """(B, 3, H, W) -> `mean` (B, 3), the mean colour."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        colour: torch.Tensor = self.mean(x.mean((2, 3)))
        return colour
