"""The script a user writes: Pillow, a DataLoader, one hook, fp32, one array, h5py.

It is what job=bench measures featx against, so it is kept as a good tutorial has it: two workers,
no gradients, eval mode, and nothing done twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset[torch.Tensor]):
    """Files of a folder, opened by Pillow and transformed as the weights ask."""

    def __init__(self, paths: list[Path], transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def extract(
    module: nn.Module,
    layer: str,
    take_input: bool,
    pictures: Pictures,
    device: torch.device,
    num_workers: int,
    path: Path,
) -> tuple[float, npt.NDArray[np.float32]]:
    """Write the layer's features to an HDF5 file.

    Args:
        module: in eval mode, on the device.
        layer: dotted name.
        take_input: what goes into the layer, instead of what comes out.

    Returns:
        seconds from the first picture to the closed file, and the features (N, ...).
    """
    begun = time.perf_counter()
    kept: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept.append((args[0] if take_input else output).cpu())

    handle = module.get_submodule(layer).register_forward_hook(hook)
    # Linux's own way, whatever the process that measures was begun by.
    loader = DataLoader(
        pictures, batch_size=32, num_workers=num_workers, multiprocessing_context="fork"
    )
    with torch.no_grad():
        for batch in loader:
            module(batch.to(device))
    handle.remove()
    features = torch.cat(kept).numpy()
    with h5py.File(path, "w") as file:
        file["features"] = features
    return time.perf_counter() - begun, features
