"""A model of a few weights, pictures for it, and the jobs in this process: a run takes 0.1 s."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import featx
from featx.config.saved_config import saved_yaml
from featx.config.schema import from_keywords, from_omegaconf

MODEL = {
    "name": "tiny",
    "library": "custom",
    "factory": "tiny_model:Tiny",
    "weights": None,
    "transform": {"resize": 32, "crop": 32},
}

KEYS = {
    "model": MODEL,
    "layers": ["conv"],
    "precision": "fp32",
    "compile": False,
    "batch_size": 4,
    "part_rows": 4,
    "out": "store",
}
"""Small parts, and nothing left to be decided by measurement."""

COMMAND = (
    "model=custom",
    "model.factory=tiny_model:Tiny",
    "model.weights=null",
    "model.transform.resize=32",
    "model.transform.crop=32",
    "layers=[conv]",
    "precision=fp32",
    "compile=false",
    "batch_size=4",
    "part_rows=4",
    "out=store",
)
"""The same for the command; PYTHONPATH has to name this folder."""


class Tiny(nn.Module):
    """conv: (8, 4, 4), deep: (6, 4, 4), pool: (6, 1, 1) of a picture of 32 by 32 pixels.

    Args:
        poison: `pool` is NaN where the mean of `deep` is above this.
        scale: of the weights of `conv`.
        pause_s: how long every forward waits.
        hang: a forward goes on, for 30 s at the most, while this file exists.
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
        begun = time.monotonic()
        while self.hang and Path(self.hang).exists() and time.monotonic() - begun < 30:
            time.sleep(0.05)
        x = self.deep(self.conv(x))
        if self.poison is not None:
            bright = (x.flatten(1).mean(1) > self.poison)[:, None, None, None]
            x = torch.where(bright, float("nan"), x)
        return self.head(self.pool(x).flatten(1))


def write_picture(path: Path, seed: int) -> None:
    """Sixteen squares of strong colours: no two seeds give features that resemble each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(squares.repeat(12, 0).repeat(12, 1)).save(path)


def write_pictures(root: Path, count: int = 21) -> Path:
    """PNG files in two class folders, every third name free for a picture that comes later."""
    for i in range(count):
        write_picture(root / ("cat", "dog")[i % 2] / f"{3 * i:03d}.png", i)
    return root


def extract(data: object, **keys: Any) -> featx.FeatureStore:
    """featx.extract with KEYS, where nothing else is given."""
    return featx.extract(**{**KEYS, "data": data, **keys})


def extract_in_steps(photos: Path, **keys: Any) -> None:
    """A store that grew: ten rows, one more layer of them, and then the other rows of both."""
    limited = {"name": "folder", "root": str(photos), "limit": 10}
    extract(limited, **keys)
    extract(limited, layers=["pool"], **keys)
    extract(photos, layers=["conv", "pool"], grow=True, **keys)


def run_job(job: str, *, json: bool = False, **keys: Any) -> int:
    """The exit code of a job as the command runs it; its errors come through."""
    if job == "verify":
        # Code is imported only where the command names it.
        keys = {"model": {key: MODEL[key] for key in ("name", "library", "factory")}, **keys}
    node = from_keywords(keys)
    node.job.name, node.job.json = job, json
    code: int = importlib.import_module(f"featx.jobs.{job}").run(
        from_omegaconf(node), saved_yaml(node)
    )
    return code
