"""A pipeline in the manner of clip-retrieval's `inference`, for any torchvision model.

Its own command takes CLIP models only, whose weights are downloaded. What it does around them
stands here: a reader over files with Pillow in four DataLoader workers, batches of 256, a mapper
that leaves arrays, and a writer that saves them as float16 with the files' names beside them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE, WORKERS = 256, 4


class Reader(Dataset):
    """Files by name: the image for the model, and its path for the metadata."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index]
        return {
            "image_tensor": self.transform(Image.open(path).convert("RGB")),
            "image_filename": str(path),
        }


def extract(
    module: torch.nn.Module, layer: str, transform: Any, folder: Path, out: Path
) -> tuple[float, np.ndarray]:
    """Write the features of a layer for all images.

    Returns:
        seconds from the first image to the last file, and the features (N, D) as written.
    """
    captured: list[torch.Tensor] = []
    handle = module.get_submodule(layer).register_forward_hook(
        lambda module, args, output: captured.append(output)
    )
    images = Reader(folder, transform)
    with torch.no_grad():
        module(torch.zeros(32, 3, 224, 224))  # warm, as the other contenders are
    captured.clear()
    started_at = time.perf_counter()
    loader = DataLoader(
        images, BATCH_SIZE, num_workers=WORKERS, multiprocessing_context="fork", prefetch_factor=2
    )
    embeddings, names = [], []
    with torch.no_grad():
        for batch in loader:
            module(batch["image_tensor"])
            embeddings.append(
                captured.pop().cpu().numpy().reshape(len(batch["image_filename"]), -1)
            )
            names += batch["image_filename"]
    rows = np.concatenate(embeddings).astype(np.float16)
    np.save(out / "img_emb_0.npy", rows)
    (out / "metadata_0.json").write_text(json.dumps(names))
    seconds = time.perf_counter() - started_at
    handle.remove()
    return seconds, rows
