"""Tokens of a layer: what the attentive probe reads instead of vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.layer_rows import Features, LayerRows, map_channels_last
from featx.errors import ConfigError
from featx.store import FeatureStore

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
    """Tokens of one layer: those of the training rows, then those of another store's rows, if any.

    Args:
        layout: how a row forms tokens.
        features: rows as flattened vectors of T * D values, in memory or streamed.
    """

    def __init__(self, layout: TokenLayout, features: Features) -> None:
        self.layout = layout
        self.features = features
        self.device = features.device
        self.width = layout.width

    def blocks(
        self, places: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor]]:
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
