"""Options of the group `model.checkpoint`."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from featx.config.checks import Matching, options
from featx.errors import ConfigError

_DIGITS = "the 64 hex digits that `sha256sum FILE` prints"


@options("model.checkpoint")
class CheckpointConfig:
    """Choice and conversion of the tensors of a file in `model.weights`."""

    prefix: str | None = None
    """Text before the names of the model in the file, such as 'teacher/backbone.', in which '/'
    stands for nesting; null finds it, unless several state dicts fit."""
    convert: Literal["auto", "none", "timm"] = "auto"
    """Conversion of a file whose names are not those of the model: timm uses checkpoint_filter_fn
    of the family (model=timm only), auto does so where the family has one, none refuses the
    file."""
    resample: bool = False
    """Whether the conversion may interpolate position embeddings and patch embeddings of another
    size, which changes the features."""
    sha256: Annotated[str | None, Matching("[0-9a-fA-F]{64}"), _DIGITS] = None
    """SHA-256 that the file must have, in 64 hex digits; it is checked before the file is read."""

    def __post_init__(self) -> None:
        if self.sha256 is not None:
            object.__setattr__(self, "sha256", self.sha256.lower())
        if self.resample and self.convert == "none":
            raise ConfigError(
                "model.checkpoint.resample=true has no effect with convert=none: the conversion "
                "is what resamples."
            )

    def check_effect(self, has_file: bool, is_converted: bool) -> None:
        """Refuse options that would have no effect.

        Args:
            has_file: whether `model.weights` is a file of the user's own.
            is_converted: whether the library of the model can convert the names of a file.

        Raises:
            ConfigError: an option would have no effect.
        """
        if not has_file and self != CheckpointConfig():
            usual = CheckpointConfig()
            keys = [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]
            raise ConfigError(
                f"model.checkpoint.{keys[0]} has an effect with a file of your own in "
                "model.weights only."
            )
        if not is_converted and (self.resample or self.convert == "timm"):
            key = "resample" if self.resample else "convert"
            raise ConfigError(
                f"model.checkpoint.{key} has an effect with model=timm only, which has functions "
                "that convert files."
            )
