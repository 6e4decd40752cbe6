"""Option `layers` of jobs that read a store: which layers they use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from featx.base import glob_to_regex
from featx.errors import ConfigError, LayerError, nearest
from featx.store.reader import FeatureStore


def matching_layers(store: FeatureStore, requested: Any) -> tuple[str, ...]:
    """Layers that match a name, a glob or a list of these, each once, in the requested order.

    None stands for all layers. Raises ConfigError if `requested` has another type or is an empty
    list, and LayerError if the store has no matching layer, or no layers at all.
    """
    if not store.layers:
        raise LayerError(f"{store.root} has no layers yet.")
    if requested is None:
        return store.layers
    wanted = [requested] if isinstance(requested, str) else requested
    if isinstance(wanted, Mapping):
        wanted = list(wanted)  # as a run was given layers with their reductions
    if not isinstance(wanted, list | tuple) or not wanted:
        raise ConfigError(f"layers={requested}: expected a name, a glob or a list of them.")
    names: dict[str, None] = {}
    for name in map(str, wanted):
        if name in store:
            names[name] = None
            continue
        pattern = re.compile(glob_to_regex(name))
        matches = [layer for layer in store.layers if pattern.fullmatch(layer)]
        if not matches:
            known = ", ".join(store.layers)
            raise LayerError(
                f"{store.root} has no layer {name!r}; it has {known}.{nearest(name, store.layers)}"
            )
        names |= dict.fromkeys(matches)
    return tuple(names)


def only_layer(store: FeatureStore, requested: Any) -> str:
    """Name of the single layer that matches; None suffices for a store of one layer.

    Raises ConfigError if several layers match, and LayerError if none does.
    """
    names = matching_layers(store, requested)
    if len(names) > 1:
        raise ConfigError(f"name one layer with layers=: {store.root} has {', '.join(names)}.")
    return names[0]
