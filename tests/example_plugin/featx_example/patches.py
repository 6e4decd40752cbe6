"""model=patches: a convolution on patches with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featx.config import Count, ModelConfig, options
from featx.models import ModelLibrary

if TYPE_CHECKING:
    from torch import nn

    from featx.models import Backbone


@options("model")
class PatchesOptions(ModelConfig):
    """Options of model=patches."""

    name: str = "patches16"
    library: str = "patches"
    weights: str | None = None
    width: Count = 8
    """Number of channels."""


class Patches(ModelLibrary[PatchesOptions]):
    """Models whose name has the side of the patches."""

    def build(self, config: PatchesOptions, seed: int) -> Backbone:
        """Build the model that the options describe."""
        from featx.config import TransformConfig
        from featx.models import Backbone, random_id, stated_preprocess

        preprocess = stated_preprocess(TransformConfig(resize=64, crop=64))
        module = self.untrained(config, seed)
        return Backbone(module, f"patches/{config.name}", random_id(seed), preprocess)

    def untrained(self, config: PatchesOptions, seed: int) -> nn.Module:
        """Return the module with random weights."""
        from torch import nn

        from featx.models import seeded

        side = int(config.name.removeprefix("patches"))
        with seeded(seed):
            return nn.Sequential(nn.Conv2d(3, config.width, side, side), nn.AdaptiveAvgPool2d(1))

    def names(self) -> tuple[str, ...]:
        """Return the names of the models."""
        return "patches8", "patches16"


LIBRARY = Patches("patches", "A convolution on patches with random weights.", PatchesOptions)
