"""Options of job=attribute."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from featx.config.checks import Count, NaturalNumber, OneOrMore, OnlyWith, names_tuple, options
from featx.errors import ConfigError

Method = Literal[
    "saliency", "input_x_gradient", "integrated_gradients", "gradcam", "guided_gradcam", "occlusion"
]
METHODS: tuple[str, ...] = get_args(Method)
OF_A_LAYER = ("gradcam", "guided_gradcam")
BY_CAPTUM = ("integrated_gradients", "occlusion")
DEFAULT_BASELINE = "mean"
DEFAULT_STEPS = 32
"""Points between baseline and image; the fields are None so that a value without effect shows."""
MAX_PROJECTOR_IMAGES = 1 << 14
"""Largest number of images in TensorBoard's projector: sprites of 64 pixels on a sheet of 8192
pixels, which browsers can show."""


@options("attribute")
class AttributeConfig:
    """Heat maps that job=attribute computes and draws."""

    method: OneOrMore[Method] = "gradcam"
    """Method of attribution: saliency, input_x_gradient, integrated_gradients, gradcam,
    guided_gradcam or occlusion, or a list of them."""
    layer: Annotated[str | None, OnlyWith("method", *OF_A_LAYER)] = None
    """Layer of gradcam and guided_gradcam. null takes the last stage; of a transformer with a class
    token it takes the stage before, whose patch tokens still have an effect."""
    steps: Annotated[Count | None, OnlyWith("method", "integrated_gradients")] = None
    """Number of points between baseline and image for integrated_gradients, 32 when not given."""
    baseline: Annotated[Literal["black", "mean", "blur"] | None, OnlyWith("method", *BY_CAPTUM)] = (
        None
    )
    """Image without information in integrated_gradients and occlusion: black, mean (of the model's
    preprocessing; when not given) or blur (the image itself, blurred)."""
    window: Annotated[Count | None, OnlyWith("method", "occlusion")] = None
    """Side of the square that occlusion hides, in pixels of the crop; a seventh of the crop when
    not given."""
    stride: Annotated[Count | None, OnlyWith("method", "occlusion")] = None
    """Pixels from one square of occlusion to the next, half of attribute.window when not given."""
    per_class: NaturalNumber = 8
    """Number of rows drawn for each class of the data set, on one sheet below OUT/sheets; 0 draws
    none."""
    feature_map_layer: str | None = None
    """Layer whose feature maps are drawn as well, for the first image of each sheet."""

    def __post_init__(self) -> None:
        if self.window and self.stride and self.stride > self.window:
            raise ConfigError(
                f"attribute.stride={self.stride} is larger than attribute.window={self.window}: "
                "pixels between two squares would never be hidden."
            )
        if self.feature_map_layer is not None and not self.per_class:
            raise ConfigError(
                "attribute.feature_map_layer draws a row of each sheet: attribute.per_class=0."
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """The option `method` as a tuple."""
        return names_tuple(self.method)

    def settings(self, method: str) -> dict[str, Any]:
        """Return the options that change the values of a method, with defaults; not the layer."""
        settings: dict[str, Any] = {}
        if method == "integrated_gradients":
            settings["steps"] = self.steps or DEFAULT_STEPS
        if method == "occlusion":
            settings |= {"window": self.window, "stride": self.stride}
        if method in BY_CAPTUM:
            settings["baseline"] = self.baseline or DEFAULT_BASELINE
        return settings
