"""Settings that decide the values of a layer of a store, besides the images."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from featx.errors import StoreMismatchError
from featx.store import FeatureStore, Run, manifest_of

_SAME = ("layer", "capture", "target", "reduce", "row", "shape", "weights_sha256", "transform")
"""Settings that decide values, besides the parameters of the reduction and those of the model."""

_OF_WEIGHTS = ("model.init", "model.checkpoint")
"""Settings of the model that decide its weights only, whose checksum is compared."""


def refuse_other_values(
    one: Mapping[str, object], other: Mapping[str, object], subject: str
) -> None:
    """Raise StoreMismatchError, which begins with `subject`, unless two descriptions
    (as of `Statistics.about`) are of the same values of a layer.
    """
    names = [*_SAME, *sorted(k for k in {**one, **other} if k.startswith(("reduce_", "model.")))]
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    message = f"{subject}: these are different values, which are not comparable"
    refuse_changes(pairs, "{!r} and {!r}", message)


def refuse_changes(
    pairs: Mapping[str, tuple[object, object]], text: str, message: str, advice: str = ""
) -> None:
    """Raise StoreMismatchError if the two values of a pair differ.

    A line with the name and `text`, in which both stand, follows the message for each such pair.
    """
    lines = [
        f"  {name}: {text.format(*pair)}" for name, pair in pairs.items() if pair[0] != pair[1]
    ]
    if lines:
        raise StoreMismatchError("\n".join([f"{message}:", *lines, *filter(None, [advice])]))


def run_of_layer(store: FeatureStore, layer: str) -> Run | None:
    """Return the run that computed a layer, or None without the featx.json of the store."""
    manifest = manifest_of(store)
    return None if manifest is None else manifest.first_run_with(layer)


def refuse_other_layer(store: FeatureStore, other: FeatureStore, layer: str) -> None:
    """Raise StoreMismatchError unless a layer of two stores holds the same kind of values.

    The gradient target and the arguments of the model are compared if both have their featx.json.
    """
    mine, theirs = (_stored_settings(each, layer) for each in (store, other))
    run, other_run = (run_of_layer(each, layer) for each in (store, other))
    if run is not None and other_run is not None:
        mine |= _run_settings(run, layer)
        theirs |= _run_settings(other_run, layer)
    refuse_other_values(mine, theirs, f"{store.root} and {other.root}, {layer}")


def _stored_settings(store: FeatureStore, layer: str) -> dict[str, object]:
    """Return the settings that the attributes of a store have."""
    settings: dict[str, object] = {
        name: store.attrs.get(name) for name in ("weights_sha256", "transform")
    }
    for name, value in store[layer].attrs.items():
        if name in ("layer", "capture", "reduce") or name.startswith("reduce_"):
            settings[name] = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return {**settings, "shape": store[layer].shape[1:]}


def _run_settings(run: Run, layer: str) -> dict[str, object]:
    """Return the settings that only the fingerprint of a run has."""
    fingerprint = run.header.fingerprint
    line = str(fingerprint.get(f"layer.{layer}", ""))
    return {**model_values(fingerprint), "target": line.partition(", target ")[2]}


def model_values(fingerprint: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of the model in a fingerprint that decide values besides the weights."""
    names = [key for key in fingerprint if key.startswith("model.") and key not in _OF_WEIGHTS]
    settings: dict[str, object] = json.loads(json.dumps({key: fingerprint[key] for key in names}))
    return settings
