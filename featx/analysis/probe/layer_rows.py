"""Rows of a layer as float32 vectors or tokens."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.metrics import CLASSIFICATION, Ints
from featx.base import check_memory, rows_of_block
from featx.config import ProbeConfig
from featx.errors import ConfigError, ReduceError, StoreError
from featx.layers import RowLayout, channels_last
from featx.store import FeatureStore
from featx.types import Array

MAX_FLAT = 8192
"""Number of values up to which a map or tokens are flattened; larger ones are averaged."""

MAX_VALUE = torch.finfo(torch.float32).max / 2
"""Largest absolute value of a feature; differences of larger ones may be infinite."""


@dataclass(frozen=True)
class LayerRows:
    """One layer of a store, some of its rows, and how each row becomes a vector. Rows are averaged
    over the axes `pooled`, counted with the batch axis, or flattened if it is None.
    """

    store: FeatureStore
    layer: str
    rows: Ints
    pooled: tuple[int, ...] | None
    width: int

    @property
    def reduction(self) -> str:
        """Reduction of rows to vectors: 'none', 'flatten' or 'avg'."""
        if self.pooled is not None:
            return "avg"
        return "none" if self.store[self.layer].ndim == 2 else "flatten"

    def as_dict(self) -> dict[str, object]:
        """Describe what the store holds of the layer, and how the probe makes vectors of it."""
        dataset = self.store[self.layer]
        return {
            "layer": str(dataset.attrs.get("layer", "")),
            "capture": str(dataset.attrs.get("capture", "")),
            "stored": str(dataset.attrs.get("reduce", "")),
            "shape": list(dataset.shape[1:]),
            "then": self.reduction,
            "axes": list(self.pooled or ()),
        }

    def vectors(self, values: torch.Tensor) -> torch.Tensor:
        """Convert stored rows (n, ...) to (n, D) float32."""
        return as_vectors(values, self.pooled, self.width)

    def read(self, places: Ints) -> torch.Tensor:
        """Read the vectors of some of the rows, (n, D) float32 on the CPU."""
        rows = self.rows[places]
        values = np.asarray(self.store[self.layer][rows])
        vectors = self.vectors(torch.from_numpy(values.astype(np.float32, copy=False)))
        self.check(vectors, rows)
        return vectors

    def check(self, vectors: torch.Tensor, rows: Ints) -> None:
        """Check that vectors are finite, and that float32 holds their differences."""
        is_held = (vectors.abs() <= MAX_VALUE).all(1)
        if not bool(is_held.all()):
            row = int(rows[int((~is_held).nonzero()[0, 0])])
            raise StoreError(
                f"{self.store.root}: row {row} ({self.store.key_of(row)}) of {self.layer} is "
                f"marked ok and has values that are not finite, or beyond {MAX_VALUE:.1e}, which a "
                "probe cannot standardise. job=verify says whether they are damaged."
            )


def as_vectors(values: torch.Tensor, pooled: tuple[int, ...] | None, width: int) -> torch.Tensor:
    """Convert stored rows to vectors, (n, D) float32."""
    values = values.to(torch.float32)
    if pooled:
        values = values.mean(pooled)
    return values.reshape(len(values), width)


def layer_vectors(labelled: LabelledRows, layer: str) -> LayerRows:
    """Decide how the rows of a layer become vectors.

    Vectors stay as they are. Maps and tokens are flattened if they have at most MAX_FLAT values,
    and averaged over their positions otherwise. Raises ReduceError if the map is too large, and its
    channel axis is unknown.
    """
    store = labelled.store
    shape = store[layer].shape[1:]
    numbers = int(np.prod(shape, dtype=np.int64))
    if len(shape) < 2 or numbers <= MAX_FLAT:
        return LayerRows(store, layer, labelled.rows, None, numbers)
    if len(shape) == 2:  # tokens (T, C), including the class token
        return LayerRows(store, layer, labelled.rows, (1,), shape[1])
    if len(shape) != 3:
        raise ReduceError(
            f"{layer} has rows of shape {shape}, {numbers} numbers: too many for a probe, and "
            "not a map that it could average. Extract it with a reduction, or leave it out with "
            "layers=."
        )
    is_last = map_channels_last(store, layer, "averaging before a probe")
    axes, width = ((1, 2), shape[2]) if is_last else ((2, 3), shape[0])
    return LayerRows(store, layer, labelled.rows, axes, width)


def map_channels_last(store: FeatureStore, layer: str, purpose: str) -> bool:
    """Return whether the rows of a layer are maps (H, W, C) instead of (C, H, W)."""
    shape, places = store[layer].shape[1:], store[layer].tokens
    if places is not None and (is_first := places.channels_first(shape)) is not None:
        return not is_first  # also of reduce=grid and reduce=align, whatever the proportions
    crop = crop_of(store)
    if crop is None:
        raise ReduceError(
            f"{purpose} does not fit {layer}: the channel axis of its rows {shape} is unknown, "
            "because the transform of the store names no crop "
            f"({str(store.attrs.get('transform', ''))!r}). Extract it with a reduction, or leave "
            "it out with layers=."
        )
    return channels_last(purpose, RowLayout(layer, shape, crop))


def crop_of(store: FeatureStore) -> tuple[int, int] | None:
    """Return the (height, width) of the crop that the transform of a store names, or None."""
    crop = re.search(r"crop (\d+)x(\d+)", str(store.attrs.get("transform", "")))
    return None if crop is None else (int(crop.group(1)), int(crop.group(2)))


class Features:
    """Vectors of one layer: those of the training rows, then those of another store's rows, if any.

    They stay in memory on the device if they and a standardised copy fit into the given size.
    Otherwise they are streamed: read from the store block by block. `whole` is (N, D) float32 on
    the device, or None if the vectors are streamed.
    """

    def __init__(self, parts: list[LayerRows], device: torch.device, memory_bytes: float) -> None:
        self.parts = parts
        self.device = device
        self.width = parts[0].width
        self._starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        self.whole: torch.Tensor | None = None
        num_bytes = 2 * 4 * len(self) * self.width
        if num_bytes <= memory_bytes:
            check_memory(
                # On a GPU, which has the standardised copy, half of it is in this memory.
                num_bytes if device.type == "cpu" else num_bytes // 2,
                f"The {len(self)} vectors of {self.width} numbers",
                "Lower probe.memory_gib, so that they are streamed.",
            )
            whole = torch.empty((len(self), self.width))
            for places in self._spans(np.arange(len(self))):
                whole[places[0] : places[-1] + 1] = self._read(places)
            self.whole = whole.to(device)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def blocks(self, places: Ints, num_outputs: int = 0) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Yield the places of a block in order, and their vectors, (n, D) float32 on the device.

        A block has as many rows as also fit into it with `num_outputs` float64 values each.
        """
        for span in self._spans(places, num_outputs):
            if self.whole is None:
                yield span, self._read(span).to(self.device)
            else:
                yield span, self.whole[torch.from_numpy(span).to(self.device)]

    def take(self, places: Ints) -> torch.Tensor:
        """Copy the vectors of some places to a new (n, D) float32 tensor on the device."""
        vectors = torch.empty((len(places), self.width), device=self.device)
        done = 0
        for span, block in self.blocks(places):
            vectors[done : done + len(span)] = block
            done += len(span)
        return vectors

    def _spans(self, places: Ints, num_outputs: int = 0) -> Iterator[Ints]:
        size = rows_of_block(max(4 * self.width, 8 * num_outputs))
        for start in range(0, len(places), size):
            yield places[start : start + size]

    def _read(self, places: Ints) -> torch.Tensor:
        """Read vectors from the stores, (n, D) float32 on the CPU."""
        vectors = torch.empty((len(places), self.width))
        part_of = np.searchsorted(self._starts, places, side="right") - 1
        for number, part in enumerate(self.parts):
            in_part = np.flatnonzero(part_of == number)
            if len(in_part):
                vectors[torch.from_numpy(in_part)] = part.read(
                    places[in_part] - self._starts[number]
                )
        return vectors


ATTENTIVE = "probe.method=attentive"
"""Name of the attentive probe in messages."""


@dataclass(frozen=True)
class TokenLayout:
    """Arrangement of tokens in the values of a flattened row.

    Attributes:
        count: T, the number of tokens: positions of a map, or tokens including the class token.
        width: D, the number of values of a token.
        channels_last: whether the values of a token lie next to each other; those of a map (C, H,
            W) do not.
    """

    count: int
    width: int
    channels_last: bool

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """View flattened rows (n, T * D) as tokens (n, T, D)."""
        if self.channels_last:
            return x.reshape(len(x), self.count, self.width)
        return x.reshape(len(x), self.width, self.count).transpose(1, 2)


class Tokens:
    """Tokens of one layer: of the training rows, then of another store's rows, if any."""

    def __init__(self, layout: TokenLayout, features: Features) -> None:
        self.layout = layout
        self.features = features
        self.device = features.device
        self.width = layout.width

    def blocks(self, places: Ints) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Yield the places of a block in order, and all their tokens, (n * T, D) float32."""
        for span, block in self.features.blocks(places):
            yield span, self.layout.tokens(block).reshape(-1, self.width)


def token_layout(store: FeatureStore, layer: str, option: str) -> TokenLayout | None:
    """Return how the rows of a layer form tokens, or None if a row is a single vector."""
    shape = store[layer].shape[1:]
    if len(shape) == 2:
        layout = TokenLayout(shape[0], shape[1], True)
    elif len(shape) == 3 and map_channels_last(store, layer, option):
        layout = TokenLayout(shape[0] * shape[1], shape[2], True)
    elif len(shape) == 3:
        layout = TokenLayout(shape[1] * shape[2], shape[0], False)
    else:
        return None
    return layout if layout.count > 1 else None


def require_tokens(store: FeatureStore, layers: Sequence[str], option: str) -> None:
    """Check that every layer has tokens or a map."""
    vector_layers = [layer for layer in layers if token_layout(store, layer, option) is None]
    if vector_layers:
        token_layers = [layer for layer in layers if layer not in vector_layers]
        remedy = "Extract a layer with reduce=none, which keeps tokens and maps, or reduce=grid."
        if token_layers:
            pronoun = "it" if len(vector_layers) == 1 else "them"
            remedy = f"layers=[{','.join(token_layers)}] leaves {pronoun} out."
        raise ConfigError(
            f"{option} needs tokens or maps, and {', '.join(vector_layers)} "
            f"{'has' if len(vector_layers) == 1 else 'have'} one vector a row. {remedy}"
        )


def layer_tokens(
    labelled: Sequence[LabelledRows], layer: str, device: torch.device, memory_bytes: float
) -> Tokens:
    """Return the tokens of a layer that has them, as `require_tokens` has checked."""
    layout = token_layout(labelled[0].store, layer, ATTENTIVE)
    assert layout is not None, "require_tokens has been called"
    width = layout.count * layout.width
    parts = [LayerRows(each.store, layer, each.rows, None, width) for each in labelled]
    return Tokens(layout, Features(parts, device, memory_bytes))


@dataclass(frozen=True)
class Problem:
    """One layer and what is predicted from it.

    Attributes:
        features: (N, D) vectors of all places.
        y: (N,) int64 class of each place, or (N, T) float64 numbers, or labels as 1 and 0.
        num_outputs: C or T.
        tokens: tokens of all places for the attentive probe, or None without it.
        task: 'classification', 'regression' or 'multilabel'.
    """

    features: Features
    y: Array
    num_outputs: int
    options: ProbeConfig
    seed: int
    tokens: Tokens | None = None
    task: str = CLASSIFICATION


SMALL_NUMBERS = 1 << 21
"""Number of values of a matrix up to which one thread is used: a product with it ends before a
second thread could help."""


@contextlib.contextmanager
def threads_for(numbers: int, device: torch.device) -> Iterator[None]:
    """Use one thread inside the block if a matrix on the CPU is small.

    With other busy processes, two threads that wait for each other after every small operation took
    60 times as long.
    """
    num_threads = torch.get_num_threads()
    if device.type == "cpu" and numbers <= SMALL_NUMBERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
