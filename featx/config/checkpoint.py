"""Options of the group `model.checkpoint`."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from featx.config.checks import Matching, options
from featx.errors import ConfigError

_DIGITS = "the 64 hex digits that `sha256sum FILE` prints"


@options("model.checkpoint")
class CheckpointConfig:
    """Choice and conversion of the tensors of a file in `model.weights`."""

    prefix: str | None = None
    """Text before the names of the model in the file, such as 'teacher/backbone.', in which '/'
    stands for nesting; null finds it, unless several state dicts fit."""
    resample: bool = False
    """Whether the conversion of a file whose names are not those of the model (by
    checkpoint_filter_fn of timm, with model=timm) may interpolate position embeddings and patch
    embeddings of another size, which changes the features."""
    sha256: Annotated[str | None, Matching("[0-9a-fA-F]{64}"), _DIGITS] = None
    """SHA-256 that the file must have, in 64 hex digits; it is checked before the file is read."""

    def __post_init__(self) -> None:
        if self.sha256 is not None:
            object.__setattr__(self, "sha256", self.sha256.lower())

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
        if not is_converted and self.resample:
            raise ConfigError(
                "model.checkpoint.resample has an effect with model=timm only, which has functions "
                "that convert files."
            )
