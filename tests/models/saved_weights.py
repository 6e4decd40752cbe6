"""Files of weights that tests write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]


class RunsCode:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def saved(folder: Path, checkpoint: Any) -> Path:
    torch.save(checkpoint, folder / "mine.pth")
    return folder / "mine.pth"
