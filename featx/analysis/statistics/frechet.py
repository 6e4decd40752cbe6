"""Fréchet distance between the values of a layer over two data sets, from their statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featx.analysis.statistics.covariance import gaussian_distance
from featx.analysis.statistics.reader import Statistics, open_stats
from featx.errors import ConfigError, StoreMismatchError

_SAME = ("layer", "capture", "target", "reduce", "row", "shape", "weights_sha256", "transform")
"""Attributes that must be equal, in addition to the parameters of the reduction, for a distance to
compare the images."""


def frechet_distance(
    a: Statistics | str | Path, b: Statistics | str | Path, layer: str | None = None
) -> float:
    """Compute the Fréchet distance of two data sets in a layer; the FID, with an Inception model.

        featx.frechet_distance("runs/real/stats.h5", "runs/made/stats.h5", "avgpool")

    Args:
        a: statistics or their path; covariances are divided by n - 1, as in the published code.
        b: statistics or their path.
        layer: name of the layer; may be None if both have only one in common.

    Raises:
        StoreMismatchError: models, transforms or tensors differ.
        LayerError: one of the files has no such layer.
        ConfigError: `layer` is None although there are several layers or none, or only variances
            are stored.
        StoreError: a file is missing, incomplete or damaged.
    """
    a, b = (x if isinstance(x, Statistics) else open_stats(x) for x in (a, b))
    if layer is None:
        layer = _only_layer(a, b)
    refuse_other_values(a.about(layer), b.about(layer), f"{a.path} and {b.path}, {layer}")
    return gaussian_distance(a[layer], b[layer])


def refuse_other_values(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    """Check that two files or stores hold the same values of a layer.

    Args:
        a: description as returned by `Statistics.about`.
        b: description as returned by `Statistics.about`.
        what: beginning of the error message.

    Raises:
        StoreMismatchError: they do not.
    """
    keys = [*_SAME, *sorted({key for key in {**a, **b} if key.startswith("reduce_")})]
    changed = [
        f"  {key}: {a.get(key)!r} and {b.get(key)!r}" for key in keys if a.get(key) != b.get(key)
    ]
    if changed:
        raise StoreMismatchError(
            f"{what}: these are different values, so a distance between them does not compare "
            "the images:\n" + "\n".join(changed)
        )


def _only_layer(a: Statistics, b: Statistics) -> str:
    """Return the only layer that both files have."""
    common = [name for name in a if name in b]
    if len(common) != 1:
        names = ", ".join(common) or "none"
        raise ConfigError(f"name the layer: {a.path} and {b.path} have in common: {names}.")
    return common[0]
