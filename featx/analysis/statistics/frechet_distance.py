"""The Fréchet distance between a layer's values over two data sets, from their statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featx.analysis.statistics import covariance
from featx.analysis.statistics.stats_file import Statistics, open_stats
from featx.errors import ConfigError, StoreMismatchError

_SAME = ("layer", "capture", "target", "reduce", "row", "shape", "weights_sha256", "transform")
"""What has to be the same of both, beside the reduction's parameters, for a distance to say
something of the pictures."""


def frechet_distance(
    a: Statistics | str | Path, b: Statistics | str | Path, layer: str | None = None
) -> float:
    """How far apart two data sets lie in a layer's values; with an Inception model, the FID.

        featx.frechet_distance("runs/real/stats.h5", "runs/made/stats.h5", "avgpool")

    Args:
        a, b: statistics, or where they are; covariances are over n - 1, as in the published code.
        layer: its name; may be left out where there is one only.

    Raises:
        StoreMismatchError: the two are of different models, transforms or tensors.
        LayerError: one of them does not have the layer.
        ConfigError: there are several layers and none is named, or only variances were kept.
        StoreError: a file is not there, not finished, or damaged.
    """
    a, b = (x if isinstance(x, Statistics) else open_stats(x) for x in (a, b))
    if layer is None:
        layer = _only_layer(a, b)
    refuse_other_values(a.about(layer), b.about(layer), f"{a.path} and {b.path}, {layer}")
    return covariance.frechet_distance(a[layer], b[layer])


def refuse_other_values(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    """Raise StoreMismatchError where what two files say of a layer's values differs.

    Args:
        a, b: as `Statistics.about` gives them.
        what: begins the message.
    """
    keys = [*_SAME, *sorted({key for key in {**a, **b} if key.startswith("reduce_")})]
    changed = [
        f"  {key}: {a.get(key)!r} and {b.get(key)!r}" for key in keys if a.get(key) != b.get(key)
    ]
    if changed:
        raise StoreMismatchError(
            f"{what}: these are statistics of different values, so a distance between them says "
            "nothing of the pictures:\n" + "\n".join(changed)
        )


def _only_layer(a: Statistics, b: Statistics) -> str:
    common = [name for name in a if name in b]
    if len(common) != 1:
        names = ", ".join(common) or "none"
        raise ConfigError(f"name the layer: {a.path} and {b.path} have in common: {names}.")
    return common[0]
