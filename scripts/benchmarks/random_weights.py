"""Config of a run whose weights are random, because they do not matter to its speed."""

from __future__ import annotations

from pathlib import Path

from featx.config import Config, from_composed, from_keywords, saved_yaml


def make_config(model: str, layer: str, photos: Path, **options: object) -> tuple[Config, str]:
    """Make the config of one layer of all photos, in fp32 unless `options` say otherwise.

    Args:
        model: name of a model of torchvision or timm.
        layer: name of a layer.
        photos: folder of images.
        options: further options of the command.

    Returns:
        the config, and its YAML as a store keeps it.
    """
    weights = {"name": model, "weights": None}
    node = from_keywords(
        {"model": weights, "layers": [layer], "data": photos, "precision": "fp32", **options}
    )
    return from_composed(node), saved_yaml(node)
