"""Plain PyTorch script that featx is measured against.

It does what a good tutorial shows: Pillow, a DataLoader with worker processes, one hook, fp32, no
gradients, eval mode, one array, h5py.
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


class ImageFiles(Dataset[torch.Tensor]):
    """Image files, opened by Pillow and preprocessed as the weights require."""

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
    images: ImageFiles,
    device: torch.device,
    num_workers: int,
    path: Path,
) -> tuple[float, npt.NDArray[np.float32]]:
    """Write the features of one layer to an HDF5 file.

    Args:
        module: model in eval mode, on the device.
        layer: dotted name of a submodule.
        take_input: whether the input of the layer is captured instead of its output.
        images: data set of preprocessed images.
        device: device of the model.
        num_workers: number of worker processes that decode.
        path: HDF5 file to write.

    Returns:
        Seconds from the first image to the closed file, and the features (N, ...).
    """
    started_at = time.perf_counter()
    outputs: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((args[0] if take_input else output).cpu())

    handle = module.get_submodule(layer).register_forward_hook(hook)
    # The default of Linux, whatever start method the measuring process was started with.
    loader = DataLoader(
        images, batch_size=32, num_workers=num_workers, multiprocessing_context="fork"
    )
    with torch.no_grad():
        for batch in loader:
            module(batch.to(device))
    handle.remove()
    features = torch.cat(outputs).numpy()
    with h5py.File(path, "w") as file:
        file["features"] = features
    return time.perf_counter() - started_at, features
