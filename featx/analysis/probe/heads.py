"""A fitted head: standardise, then an affine map; and its file."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.labelled_rows import Features
from featx.base.devices import float64_home
from featx.errors import StoreError
from featx.storage.s3_path import S3Path
from featx.store import layout

FORMAT = 1

_NAMES = ("weight", "bias", "mean", "scale")


@dataclass(frozen=True)
class Scaler:
    """What is taken off each feature, and by what it is then divided.

    Attributes:
        mean, scale: (D,) float32 on the device; scale is 1 where a feature is constant, so that
            such a feature becomes 0.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(n, D) standardised, a new tensor."""
        return (x - self.mean).div_(self.scale)


def fit_scaler(features: Features, places: npt.NDArray[np.int64]) -> Scaler:
    """Mean and standard deviation of each feature over some places, summed in float64.

    Blocks are merged by Chan's formula: M = M_a + M_b + d^2 n_a n_b / n.
    """
    wide = float64_home(features.device)
    count = 0
    mean = torch.zeros(features.width, dtype=torch.float64, device=wide)
    scatter = torch.zeros_like(mean)
    constant = torch.ones(features.width, dtype=torch.bool, device=wide)
    first: torch.Tensor | None = None
    for _, block in features.blocks(places):
        x = block.to(wide)
        first = x[0].clone() if first is None else first
        constant &= (x == first).all(0)
        x = x.double()
        block_mean = x.mean(0)
        delta, total = block_mean - mean, count + len(x)
        scatter += (x - block_mean).square().sum(0) + delta.square() * (count * len(x) / total)
        mean += delta * (len(x) / total)
        count = total
    scale = (scatter / count).sqrt()
    scale[constant | (scale == 0)] = 1.0
    if first is not None:
        mean = torch.where(constant, first.double(), mean)  # exactly, so that x - mean is 0
    return Scaler(mean.float().to(features.device), scale.float().to(features.device))


@dataclass(frozen=True)
class Head:
    """A probe that is an affine map of standardised features.

    Attributes:
        scaler: fitted on the same rows.
        weight: (C, D) float32 on the device.
        bias: (C,) float32.
        probabilities: whether softmax of the scores are probabilities (of logistic regression).
    """

    scaler: Scaler
    weight: torch.Tensor
    bias: torch.Tensor
    probabilities: bool

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """(n, D) features -> (n, C): probabilities, or the values of a regression."""
        values = self.scaler(x) @ self.weight.T + self.bias
        return values.softmax(1) if self.probabilities else values


def scores_of(
    head: Head, features: Features, places: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(n, C) float64 scores of some places."""
    found = [head.scores(block).cpu().double() for _, block in features.blocks(places)]
    scores: npt.NDArray[np.float64] = torch.cat(found).numpy()
    return scores


def head_path(folder: Path, layer: str) -> Path:
    """The file of a layer's head, below the folder of the store."""
    return folder / layout.PROBE_HEADS / f"{re.sub(r'[^A-Za-z0-9._@-]', '_', layer)}.safetensors"


def head_bytes(head: Head, about: dict[str, Any]) -> bytes:
    """A head as a safetensors file.

    Args:
        head: fitted.
        about: what has to be known to use it (JSON types); kept as the metadata `featx`.
    """
    from safetensors.torch import save

    tensors = {
        "weight": head.weight,
        "bias": head.bias,
        "mean": head.scaler.mean,
        "scale": head.scaler.scale,
    }
    kept = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about = {"featx_head": FORMAT, **about, "probabilities": head.probabilities}
    # One entry only: safetensors writes several in an order that changes from run to run.
    return bytes(save(kept, metadata={"featx": json.dumps(about, sort_keys=True)}))


@contextlib.contextmanager
def _on_disk(path: Path) -> Iterator[Path]:
    """A file that safetensors can map: itself, or what an object holds."""
    if not isinstance(path, S3Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="featx-head-") as file:
        file.write(path.read_bytes())
        file.flush()
        yield Path(file.name)


def read_head(path: Path, device: torch.device) -> tuple[Head, dict[str, Any]]:
    """A head from its file, and what is said about it.

    Raises:
        StoreError: there is none, or it is no head of featx.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with _on_disk(path) as local, safe_open(local, "pt") as file:
            about = json.loads((file.metadata() or {}).get("featx", "{}"))
            if about.get("featx_head") != FORMAT:
                raise StoreError(f"{path} is no head that job=probe made, or of another version.")
            tensors = {name: file.get_tensor(name).to(device) for name in _NAMES}
    except FileNotFoundError as error:
        raise StoreError(f"there is no head at {path}: job=probe makes it.") from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read as a head: {error}.") from error
    num_classes, width = tensors["weight"].shape if tensors["weight"].ndim == 2 else (0, 0)
    shapes = {"bias": (num_classes,), "mean": (width,), "scale": (width,)}
    if len(about.get("classes", ())) != num_classes or any(
        tuple(tensors[name].shape) != shape for name, shape in shapes.items()
    ):
        raise StoreError(f"{path} is damaged: its tensors do not fit together.")
    scaler = Scaler(tensors["mean"], tensors["scale"])
    head = Head(scaler, tensors["weight"], tensors["bias"], bool(about["probabilities"]))
    return head, about
