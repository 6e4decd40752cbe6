"""model=patches: a convolution on patches with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featx.config import Count, ModelConfig, TransformConfig, options
from featx.errors import WeightsError
from featx.models import LibraryFunctions, library_member

if TYPE_CHECKING:
    from torch import nn

    from featx.models import Backbone


@options("model")
class PatchesOptions(ModelConfig):
    """Options of model=patches."""

    name: str = "patches16"
    library: str = "patches"
    width: Count = 8
    """Number of channels."""


def build(config: PatchesOptions, seed: int) -> Backbone:
    """Build the model that the options describe."""
    from featx.models import Backbone, random_id, stated_preprocess

    if config.weights is not None:
        raise WeightsError("model=patches has random weights only: add model.weights=null.")
    return Backbone(
        module=untrained(config, seed),
        name=f"patches/{config.name}",
        weights=random_id(seed),
        preprocess=stated_preprocess(TransformConfig(resize=64, crop=64)),
        reentrant=True,
    )


def untrained(config: PatchesOptions, seed: int) -> nn.Module:
    """Return the module with random weights."""
    from torch import nn

    from featx.models import seeded

    side = int(config.name.removeprefix("patches"))
    with seeded(seed):
        patches = nn.Conv2d(3, config.width, kernel_size=side, stride=side)
        return nn.Sequential(patches, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


LIBRARY = library_member(
    "patches",
    "A convolution on patches with random weights.",
    PatchesOptions,
    LibraryFunctions(build=build, untrained=untrained, names=lambda: ("patches8", "patches16")),
)
