"""Options of the group `model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from featx.config.checks import check_choice
from featx.errors import ConfigError

LIBRARIES = ("auto", "packaged", "torchvision", "timm", "custom")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


@dataclass
class TransformConfig:
    """Preprocessing of a custom model; library models bring their own."""

    resize: int = 256
    """Shorter side in pixels after resizing."""
    crop: int = 224
    """Side of the square centre crop in pixels."""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Mean of each channel (R, G, B), of values in [0, 1]."""
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Standard deviation of each channel (R, G, B), of values in [0, 1]."""
    interpolation: str = "bilinear"
    """Interpolation of resizing: nearest, bilinear or bicubic, with antialiasing."""

    def __post_init__(self) -> None:
        check_choice("model.transform.interpolation", self.interpolation, INTERPOLATIONS)
        if not 1 <= self.crop <= self.resize:
            raise ConfigError(
                f"model.transform.crop={self.crop}: expected 1 to model.transform.resize"
                f"={self.resize} pixels; give both."
            )
        for key in ("mean", "std"):
            if len(getattr(self, key)) != 3:
                raise ConfigError(f"model.transform.{key}: expected three numbers, one a channel.")
        if min(self.std) <= 0:
            raise ConfigError(f"model.transform.std={self.std}: expected numbers above 0.")


@dataclass
class ModelConfig:
    """Backbone and its weights."""

    name: str = "efficientnet_lite0"
    """Name of the model in its library; set by the option `model` itself unless that names a
    library."""
    library: str = "auto"
    """Library that builds the model: packaged, torchvision, timm or custom; auto takes the first of
    these that knows the name."""
    weights: str | None = "default"
    """Weights: a tag of the library, a path (.safetensors, .pth), 'default', or null for random
    weights of `seed`."""
    init: str = "loaded"
    """loaded keeps these weights; reset replaces them by the model's own random initialisation with
    `seed`, as an untrained baseline that is the same in all else."""
    factory: str | None = None
    """Import path of a function that returns the torch.nn.Module, such as package.module:function,
    for model=custom."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, for model=custom. A resume refuses other values, except for
    arguments that the factory names in its attribute `args_without_effect`."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    """Preprocessing, for model=custom."""

    def __post_init__(self) -> None:
        check_choice("model.library", self.library, LIBRARIES)
        if self.weights == "None":
            self.weights = None  # as Python writes it; no library has a tag of this name
        check_choice("model.init", self.init, ("loaded", "reset"))
        if self.init == "reset" and self.weights is None:
            raise ConfigError(
                "model.init=reset has no effect with model.weights=null, whose weights are random."
            )
        custom = self.library == "custom"
        if custom and not self.factory:
            raise ConfigError(
                "model=custom needs model.factory=package.module:factory, a function that returns "
                "your torch.nn.Module."
            )
        if not custom:
            for key, value in (("factory", self.factory), ("args", self.args)):
                if value:
                    raise ConfigError(f"model.{key} has an effect with model=custom only.")
            if self.transform != TransformConfig():
                raise ConfigError(
                    "model.transform has an effect with model=custom only; "
                    "library models bring the preprocessing of their weights."
                )
