"""Options of job=attribute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from featx.config.checks import NAMES, check_choice, check_effects, names_tuple, only_with
from featx.errors import ConfigError

METHODS = (
    "saliency",
    "input_x_gradient",
    "integrated_gradients",
    "gradcam",
    "guided_gradcam",
    "occlusion",
)
OF_A_LAYER = ("gradcam", "guided_gradcam")
BY_CAPTUM = ("integrated_gradients", "occlusion")
BASELINES = ("black", "mean", "blur")
DEFAULT_BASELINE = "mean"
DEFAULT_STEPS = 32
"""Points between baseline and image; the fields are None so that a value without effect shows."""
MAX_PROJECTOR_IMAGES = 1 << 14
"""Largest number of images in TensorBoard's projector: sprites of 64 pixels on a sheet of 8192
pixels, which browsers can show."""


@dataclass
class AttributeConfig:
    """Heat maps that job=attribute computes and draws."""

    method: Annotated[Any, NAMES] = "gradcam"
    """Method of attribution: saliency, input_x_gradient, integrated_gradients, gradcam,
    guided_gradcam or occlusion, or a list of them."""
    layer: str | None = field(default=None, metadata=only_with("method", *OF_A_LAYER))
    """Layer of gradcam and guided_gradcam. null takes the last stage; of a transformer with a class
    token it takes the stage before, whose patch tokens still have an effect."""
    steps: int | None = field(default=None, metadata=only_with("method", "integrated_gradients"))
    """Number of points between baseline and image for integrated_gradients, 32 when not given."""
    baseline: str | None = field(default=None, metadata=only_with("method", *BY_CAPTUM))
    """Image without information in integrated_gradients and occlusion: black, mean (of the model's
    preprocessing; when not given) or blur (the image itself, blurred)."""
    window: int | None = field(default=None, metadata=only_with("method", "occlusion"))
    """Side of the square that occlusion hides, in pixels of the crop; a seventh of the crop when
    not given."""
    stride: int | None = field(default=None, metadata=only_with("method", "occlusion"))
    """Pixels from one square of occlusion to the next, half of attribute.window when not given."""
    per_class: int = 8
    """Number of rows drawn for each class of the data set, on one sheet below OUT/sheets; 0 draws
    none."""
    feature_map_layer: str | None = None
    """Layer whose feature maps are drawn as well, for the first image of each sheet."""

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("attribute.method", method, METHODS)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"attribute.method={self.method}: expected some of {METHODS}.")
        if self.baseline is not None:
            check_choice("attribute.baseline", self.baseline, BASELINES)
        check_effects("attribute", self)
        for key in ("steps", "window", "stride"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"attribute.{key}={value}: expected at least 1.")
        if self.window and self.stride and self.stride > self.window:
            raise ConfigError(
                f"attribute.stride={self.stride} is larger than attribute.window={self.window}: "
                "pixels between two squares would never be hidden."
            )
        if self.per_class < 0:
            raise ConfigError(f"attribute.per_class={self.per_class}: expected 0 or more.")
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
