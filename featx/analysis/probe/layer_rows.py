"""How the probes take the rows of a layer: as vectors or tokens."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from featx.analysis.layer_vectors import LayerRows, LayerVectors
from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.metrics import CLASSIFICATION, Ints
from featx.base import check_memory, cpu_threads
from featx.config import ProbeConfig
from featx.errors import ConfigError, ReduceError
from featx.layers import RowLayout, channels_last, is_heat_map
from featx.store import FeatureStore
from featx.types import Array

MAX_FLAT = 8192
"""Number of values up to which a map or tokens are flattened; larger ones are averaged."""


def probe_rows(store: FeatureStore, layer: str, rows: Ints) -> LayerRows:
    """Decide how the rows of a layer become vectors.

    Vectors stay as they are. Maps and tokens are flattened if they have at most MAX_FLAT values,
    and averaged over their positions otherwise. Raises ReduceError if the map is too large, and its
    channel axis is unknown.
    """
    shape = store[layer].shape[1:]
    numbers = int(np.prod(shape, dtype=np.int64))
    if len(shape) < 2 or numbers <= MAX_FLAT:
        return LayerRows(store, layer, rows)
    if len(shape) == 2 and not _has_heat_maps(store, layer):  # (T, C), including the class token
        return LayerRows(store, layer, rows, (1,))
    if len(shape) != 3:
        raise ReduceError(
            f"{layer} has rows of shape {shape}, {numbers} numbers: too many for a probe, and "
            "not a map that it could average. Extract it with a reduction, or leave it out with "
            "layers=."
        )
    is_last = map_channels_last(store, layer, "averaging before a probe")
    return LayerRows(store, layer, rows, (1, 2) if is_last else (2, 3))


def _has_heat_maps(store: FeatureStore, layer: str) -> bool:
    """Return whether the rows of a layer are heat maps, which are no tokens."""
    array = store[layer]
    return is_heat_map(array.shape[1:], array.attrs.get("capture", "output"))


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


def open_vectors(
    parts: Sequence[LayerRows], device: torch.device, memory_bytes: float
) -> LayerVectors:
    """Open the vectors of a layer, in memory if they and a standardised copy fit into a size."""
    num_rows, width = sum(len(part.rows) for part in parts), parts[0].width
    num_bytes = 2 * 4 * num_rows * width
    if device.type != "cuda" and num_bytes <= memory_bytes:
        check_memory(
            num_bytes,
            f"The {num_rows} vectors of {width} numbers",
            "Lower probe.memory_gib, so that they are streamed.",
        )
    return LayerVectors(parts, device, memory_bytes / 2)


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

    def __init__(self, layout: TokenLayout, features: LayerVectors) -> None:
        self.layout = layout
        self.features = features
        self.device = features.device
        self.width = layout.width

    def blocks(self, places: Ints) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Yield the places of a block in order, and all their tokens, (n * T, D) float32."""
        for span, block in self.features.blocks(places):
            yield span, self.layout.tokens(block).reshape(-1, self.width)


def token_layout(store: FeatureStore, layer: str, option: str) -> TokenLayout | None:
    """Return how the rows of a layer form tokens, or None if a row is a vector or a heat map."""
    shape = store[layer].shape[1:]
    if _has_heat_maps(store, layer):
        return None
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
            remedy = f"'layers=[{','.join(token_layers)}]' leaves {pronoun} out."
        raise ConfigError(
            f"{option} needs tokens or maps, and {', '.join(vector_layers)} "
            f"{'has' if len(vector_layers) == 1 else 'have'} one vector or heat map a row. {remedy}"
        )


def layer_tokens(
    labelled: Sequence[LabelledRows], layer: str, device: torch.device, memory_bytes: float
) -> Tokens:
    """Return the tokens of a layer that has them, as `require_tokens` has checked."""
    layout = token_layout(labelled[0].store, layer, ATTENTIVE)
    assert layout is not None, "require_tokens has been called"
    parts = [LayerRows(each.store, layer, each.rows) for each in labelled]
    return Tokens(layout, open_vectors(parts, device, memory_bytes))


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

    features: LayerVectors
    y: Array
    num_outputs: int
    options: ProbeConfig
    seed: int
    tokens: Tokens | None = None
    task: str = CLASSIFICATION


SMALL_NUMBERS = 1 << 21
"""Number of values of a matrix up to which one thread is used: a product with it ends before a
second thread could help."""


def threads_for(numbers: int, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Context that uses one thread if a matrix on the CPU is small.

    With other busy processes, two threads that wait for each other after every small operation took
    60 times as long.
    """
    return cpu_threads(1 if device.type == "cpu" and numbers <= SMALL_NUMBERS else None)
