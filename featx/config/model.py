"""Options of the group `model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from featx.base import family
from featx.config.checks import check_choice
from featx.config.member_options import make_options
from featx.errors import ConfigError

_LIBRARY = "model.library"
"""Option that selects the library."""

AUTO_LIBRARY = "auto"
"""Library that stands for the first one that knows the name of the model."""

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


@dataclass
class TransformConfig:
    """Preprocessing of a model that brings none."""

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
    """Backbone and its weights.

    A library with options of its own has them in a subclass beside it, such as
    `featx.models.libraries.custom.CustomOptions`.
    """

    name: str = "efficientnet_lite0"
    """Name of the model in its library; set by the option `model` itself unless that names a
    library."""
    library: str = AUTO_LIBRARY
    """Library that builds the model."""
    weights: str | None = "default"
    """Weights: a tag of the library, a path (.safetensors, .pth), 'default', or null for random
    weights of `seed`."""
    init: str = "loaded"
    """loaded keeps these weights; reset replaces them by the model's own random initialisation with
    `seed`, as an untrained baseline that is the same in all else."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(
                f"model={self.library} needs model.name=NAME, the name of a model of this library."
            )
        if self.weights == "None":
            self.weights = None  # as Python writes it; no library has a tag of this name
        check_choice("model.init", self.init, ("loaded", "reset"))
        if self.init == "reset" and self.weights is None:
            raise ConfigError(
                "model.init=reset has no effect with model.weights=null, whose weights are random."
            )

    @property
    def code(self) -> str | None:
        """Import path of the user's code that builds the model; None if it is a library's code."""
        return None


@dataclass
class LibraryModelConfig(ModelConfig):
    """Options of a model that a library builds, of torchvision and timm."""

    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which the library builds the model, such as
    {dynamic_img_size: true}. A resume refuses other values."""
    input_size: list[int] | None = None
    """Height and width of the images in pixels, such as [448,448]: the model is built for it, and
    the preprocessing follows; null takes the size of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_size is not None and (len(self.input_size) != 2 or min(self.input_size) < 1):
            raise ConfigError(
                f"model.input_size={self.input_size}: expected [height, width] in pixels."
            )

    def refuse_args(self, refused: Mapping[str, str]) -> None:
        """Refuse arguments that featx gives itself or that change what a model is.

        Args:
            refused: name of an argument -> what to do instead.

        Raises:
            ConfigError: model.args has such an argument.
        """
        for name in self.args:
            if name in refused:
                raise ConfigError(f"model.args.{name} cannot be given: {refused[name]}.")


def model_options(**values: Any) -> ModelConfig:
    """Return the options of a model, those of its library included.

    Args:
        values: options without their prefix, such as name='resnet50' and weights=None.

    Raises:
        ConfigError: an option is unknown, invalid, or one of another library.
    """
    defaults = {f.name: f.default for f in fields(ModelConfig)}
    return make_options(_LIBRARY, ModelConfig, {**defaults, **values})


def model_choice(text: str) -> dict[str, str]:
    """Return the options that `model=TEXT` sets: the name of a model, or a library.

    Args:
        text: name of a model, such as 'resnet50', or of a library, such as 'timm', which may have
            a default model.
    """
    libraries = family(_LIBRARY)
    if text == AUTO_LIBRARY or text not in libraries:
        return {"name": text}
    options = libraries.get(text).options or ModelConfig
    default = {f.name: f.default for f in fields(options)}["name"]
    return {"library": text, "name": str(default)}
