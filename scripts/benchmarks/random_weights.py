"""The run that is measured where weights do not matter: they are drawn from the seed."""

from __future__ import annotations

from pathlib import Path

from featx.config.run_config import Config
from featx.config.saved_config import saved_yaml
from featx.config.schema import from_keywords, from_omegaconf


def run_of(model: str, layer: str, photos: Path, **keys: object) -> tuple[Config, str]:
    """One layer of all photos, in fp32 unless `keys` say otherwise.

    Args:
        model: a name of torchvision or timm.
        layer: a name.
        photos: a folder.
        keys: others of the command.

    Returns:
        the config, and its YAML as a store keeps it.
    """
    weights = {"name": model, "weights": None}
    node = from_keywords(
        {"model": weights, "layers": [layer], "data": photos, "precision": "fp32", **keys}
    )
    return from_omegaconf(node), saved_yaml(node)
