"""Option `layers` of jobs that read a store: which layers they use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from featx.base import glob_to_regex
from featx.errors import ConfigError, LayerError, nearest
from featx.store.reader import FeatureStore


def matching_layers(store: FeatureStore, asked: Any) -> tuple[str, ...]:
    """Layers that match names and globs, each once, in the requested order.

    Args:
        store: open store.
        asked: name, glob, list of these, or None for all layers.

    Raises:
        ConfigError: `asked` has another type or is an empty list.
        LayerError: the store has no matching layer, or no layers at all.
    """
    if not store.layers:
        raise LayerError(f"{store.root} has no layers yet.")
    if asked is None:
        return store.layers
    wanted = [asked] if isinstance(asked, str) else asked
    if isinstance(wanted, Mapping):
        wanted = list(wanted)  # as a run was given layers with their reductions
    if not isinstance(wanted, list | tuple) or not wanted:
        raise ConfigError(f"layers={asked}: expected a name, a glob or a list of them.")
    found: dict[str, None] = {}
    for name in map(str, wanted):
        if name in store:
            found[name] = None
            continue
        pattern = re.compile(glob_to_regex(name))
        matches = [layer for layer in store.layers if pattern.fullmatch(layer)]
        if not matches:
            known = ", ".join(store.layers)
            raise LayerError(
                f"{store.root} has no layer {name!r}; it has {known}.{nearest(name, store.layers)}"
            )
        found |= dict.fromkeys(matches)
    return tuple(found)


def only_layer(store: FeatureStore, asked: Any) -> str:
    """Name of the single layer that matches a name or glob.

    Args:
        store: Open store.
        asked: As of `matching_layers`; None suffices for a store of one layer.

    Raises:
        ConfigError: Several layers match.
        LayerError: No layer matches.
    """
    names = matching_layers(store, asked)
    if len(names) > 1:
        raise ConfigError(f"name one layer with layers=: {store.root} has {', '.join(names)}.")
    return names[0]
