"""Heads: standardisation followed by an affine map, and their file format."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from featx.analysis.layer_vectors import LayerVectors
from featx.analysis.probe.layer_rows import TokenLayout, Tokens
from featx.analysis.probe.metrics import CLASSIFICATION, MULTILABEL, Ints, Matrix
from featx.base import float64_device
from featx.errors import StoreError
from featx.storage import S3Path
from featx.store import Run, layout
from featx.types import Json

FORMAT = 1
"""Version of the format of head files."""

ATTENTION_FORMAT = 2
"""Version of the files of heads with attention, which readers of version 1 would misread."""

TASK_FORMAT = 3
"""Version of the files of heads of numbers and labels, which readers of version 1 would misread."""

_NAMES = ("weight", "bias", "mean", "scale")
"""Tensors of a head file."""

_AGAIN = "Make it again: job=probe, or job=zeroshot."

_CHECKSUM = "sha256"
"""Entry of the description of a head for the checksum of its other entries and its tensors."""


_PIECE_NUMBERS = 1 << 21
"""Numbers that are converted to float64 at a time: 16 MiB. Larger pieces take twice as long."""


@dataclass(frozen=True)
class Scaler:
    """Standardisation of features by (D,) float32 tensors on the device: `mean` is subtracted,
    `scale` divides. The scale of a constant feature is 1, so that it becomes 0.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Standardise (n, D) features into a new tensor."""
        return (x - self.mean).div_(self.scale)

    def standardise(self, x: torch.Tensor) -> torch.Tensor:
        """Standardise (n, D) features in place, as a copy of all rows may not fit into memory."""
        return x.sub_(self.mean).div_(self.scale)


def fit_scaler(features: LayerVectors | Tokens, places: Ints) -> Scaler:
    """Compute mean and standard deviation of each feature over some places."""
    return scaler_of(block for _, block in features.blocks(places))


def scaler_of(blocks: Iterable[torch.Tensor]) -> Scaler:
    """Compute mean and standard deviation of each feature of (n, D) vectors, in float64.

    Pieces of blocks, of which copies in float64 are small, are merged by Chan's formula:
    M = M_a + M_b + d^2 n_a n_b / n.
    """
    count, first, device = 0, torch.empty(0), torch.device("cpu")
    mean = scatter = constant = torch.empty(0)
    pieces = (torch.split(block, max(1, _PIECE_NUMBERS // block.shape[1])) for block in blocks)
    for piece in itertools.chain.from_iterable(pieces):
        if not count:
            device, first = piece.device, piece[0].to(float64_device(piece.device))
            mean = torch.zeros(len(first), dtype=torch.float64, device=first.device)
            scatter, constant = torch.zeros_like(mean), torch.ones_like(mean, dtype=torch.bool)
        x = piece.to(first.device)
        constant &= (x == first).all(0)
        x = x.double()
        block_mean = x.mean(0)
        delta, total = block_mean - mean, count + len(x)
        scatter += (x - block_mean).square().sum(0) + delta.square() * (count * len(x) / total)
        mean += delta * (len(x) / total)
        count = total
    scale = (scatter / count).sqrt().float()
    scale[constant | (scale == 0)] = 1.0
    mean = torch.where(constant, first.double(), mean)  # exact, so that x - mean is 0
    return Scaler(mean.float().to(device), scale.to(device))


@dataclass(frozen=True)
class Attention:
    """Average of the standardised tokens of a row by the weights softmax(tokens . query / sqrt(D))
    of a query, (D,) float32.
    """

    query: torch.Tensor
    layout: TokenLayout


@dataclass(frozen=True)
class Head:
    """A probe that is an affine map of standardised features.

    Attributes:
        scaler: standardisation, fitted on the same rows; of tokens if there is an attention.
        weight: (C, D) float32 on the device.
        bias: (C,) float32 on the device; of numbers float64, on the CPU if the device has none.
        probabilities: whether the softmax of the values gives probabilities (logistic regression,
            zero-shot classifiers); for several labels, the sigmoid of each.
        normalises: whether features are divided by their length first (zero-shot classifiers).
        attention: average of the tokens of a row, or None if rows are vectors.
        task: 'classification'; 'regression', whose values are numbers; or 'multilabel', whose
            values are logits of labels that do not exclude each other.
    """

    scaler: Scaler
    weight: torch.Tensor
    bias: torch.Tensor
    probabilities: bool
    normalises: bool = False
    attention: Attention | None = None
    task: str = CLASSIFICATION

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (n, C) float64 probabilities, or values of a regression, on the CPU from (n, D)
        features, or (n, T * D) tokens. Rows of probabilities of classes sum to 1 with the precision
        of float64, and none is 0 because float32 has no smaller number.
        """
        if self.normalises:
            x = torch.nn.functional.normalize(x, dim=-1)
        if self.attention is None:
            pooled = self.scaler(x)
        else:
            tokens, query = self.scaler(self.attention.layout.tokens(x)), self.attention.query
            weights = (tokens @ query / math.sqrt(len(query))).softmax(1)
            pooled = torch.einsum("nt,ntd->nd", weights, tokens)
        values = ((pooled @ self.weight.T).to(self.bias) + self.bias).cpu().double()
        if not self.probabilities:
            return values
        return values.sigmoid() if self.task == MULTILABEL else values.softmax(1)


def scores_of(head: Head, features: LayerVectors, places: Ints) -> Matrix:
    """Compute the scores of some places, (n, C)."""
    scores, done = np.empty((len(places), len(head.bias))), 0
    for span, block in features.blocks(places, len(head.bias)):
        scores[done : done + len(span)] = head.scores(block).numpy()
        done += len(span)
    return scores


def head_path(folder: Path, layer: str) -> Path:
    """Return the file of a layer's head below the folder of the store."""
    return folder / layout.PROBE_HEADS / f"{re.sub(r'[^A-Za-z0-9._@-]', '_', layer)}.safetensors"


def extraction_entries(run: Run | None, layer: str) -> dict[str, object]:
    """Return the entries of a head that say how its layer was extracted, for prediction on new
    images. A merged file does not contain it.
    """
    if run is None:
        return dict.fromkeys(("config", "resolved", "model_settings", "spec"))
    return {
        "config": run.header.config,
        "resolved": dict(run.resolved),
        "model_settings": run.model_settings,
        "spec": next(asdict(spec) for spec in run.layers if spec.name == layer),
    }


def head_bytes(head: Head, about: dict[str, object]) -> bytes:
    """Serialise a head as a safetensors file."""
    tensors = {
        "weight": head.weight,
        "bias": head.bias,
        "mean": head.scaler.mean,
        "scale": head.scaler.scale,
    }
    about = {"featx_head": FORMAT, **about, "probabilities": head.probabilities}
    if head.normalises:
        about["normalises"] = True
    if head.attention is not None:
        tensors["query"] = head.attention.query
        about |= {"featx_head": ATTENTION_FORMAT, "tokens": asdict(head.attention.layout)}
    if head.task != CLASSIFICATION:
        about |= {"featx_head": TASK_FORMAT, "task": head.task}
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about = json.loads(json.dumps(about))
    about[_CHECKSUM] = _checksum(about, on_cpu)
    # A single entry: safetensors writes several entries in an order that changes from run to run.
    return bytes(save(on_cpu, metadata={"featx": json.dumps(about, sort_keys=True)}))


def _checksum(about: dict[str, object], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        values = tensors[name].numpy()
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _on_disk(path: Path) -> Iterator[Path]:
    """Provide a file that safetensors can map: the path itself, or a copy of an S3 object."""
    if not isinstance(path, S3Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="featx-head-") as file:
        file.write(path.read_bytes())
        file.flush()
        yield Path(file.name)


def read_head(path: Path, device: torch.device) -> tuple[Head, Json]:
    """Read a head and its description from a file."""
    try:
        with _on_disk(path) as local, safe_open(local, "pt") as file:
            about = json.loads((file.metadata() or {}).get("featx", "{}"))
            version = about.get("featx_head")
            if version not in (FORMAT, ATTENTION_FORMAT, TASK_FORMAT):
                raise StoreError(f"{path} is no head that job=probe made, or of another version.")
            names = (*_NAMES, "query") if version == ATTENTION_FORMAT else _NAMES
            tensors = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as error:
        raise StoreError(f"there is no head at {path}: job=probe makes it.") from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read as a head: {error}. {_AGAIN}") from error
    if about.pop(_CHECKSUM, None) != _checksum(about, tensors):
        raise StoreError(
            f"{path} does not have the checksum with which it was written, so it is damaged. "
            f"{_AGAIN}"
        )
    devices = {torch.float64: float64_device(device)}
    tensors = {name: each.to(devices.get(each.dtype, device)) for name, each in tensors.items()}
    num_classes, width = tensors["weight"].shape if tensors["weight"].ndim == 2 else (0, 0)
    shapes = {"bias": (num_classes,), **dict.fromkeys(("mean", "scale", "query"), (width,))}
    if len(about.get("classes", ())) != num_classes or any(
        tuple(tensors[name].shape) != shape for name, shape in shapes.items() if name in tensors
    ):
        raise StoreError(f"{path} is damaged: its tensors do not fit together.")
    attention = None
    if "query" in tensors:
        try:
            tokens = about["tokens"]
            layout = TokenLayout(
                int(tokens["count"]), int(tokens["width"]), bool(tokens["channels_last"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path} cannot be read as a head: its tokens are unknown.") from error
        if layout.width != width:
            raise StoreError(f"{path} is damaged: its tensors do not fit its tokens.")
        attention = Attention(tensors["query"], layout)
    head = Head(
        Scaler(tensors["mean"], tensors["scale"]),
        tensors["weight"],
        tensors["bias"],
        bool(about["probabilities"]),
        bool(about.get("normalises", False)),
        attention,
        str(about["task"]) if version == TASK_FORMAT else CLASSIFICATION,
    )
    return head, about


LOWEST, HIGHEST = 0.1, 10.0
"""Limits of the temperature. If all validation rows are right, the loss falls with the temperature
without end, which would make all probabilities 1."""


def fit_temperature(logits: Matrix, y: Ints) -> float:
    """Return the temperature T in [LOWEST, HIGHEST] with the smallest cross-entropy.

    The loss of softmax(logits / T) is convex in 1 / T. C. Guo et al., On Calibration of Modern
    Neural Networks, ICML 2017.
    """
    from scipy.optimize import minimize_scalar

    z, true = torch.from_numpy(logits), torch.from_numpy(y)

    def loss(inverse: float) -> float:
        return float(torch.nn.functional.cross_entropy(z * inverse, true))

    limits = (1 / HIGHEST, 1 / LOWEST)
    found = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-9})
    return min(HIGHEST, max(LOWEST, 1 / float(found.x)))


def limit_notes(temperature: float) -> list[str]:
    """Return a note if a temperature is one of the limits."""
    if LOWEST * 1.001 < temperature < HIGHEST / 1.001:
        return []
    return [f"the calibration temperature, {temperature:g}, is at the limit of its range"]
