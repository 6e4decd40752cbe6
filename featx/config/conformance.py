"""Options of the comparison with the model library's own path at the start of a run."""

from __future__ import annotations

from dataclasses import dataclass

from featx.config.checks import check_choice
from featx.errors import ConfigError

MAX_CONFORMANCE_IMAGES = 16
"""Largest number of images that are compared; so many are read before a long run anyway."""


@dataclass
class ConformanceConfig:
    """Comparison of some images with the model library's own path, before a run starts."""

    mode: str = "strict"
    """strict refuses a run whose values differ by more than featx promises (docs/models.md); warn
    runs with a warning; off leaves the comparison out."""
    images: int = 8
    """Number of images that go through the library's own transform and forward pass, 1 to 16; a
    resume compares none."""

    def __post_init__(self) -> None:
        check_choice("conformance.mode", self.mode, ("off", "warn", "strict"))
        if not 1 <= self.images <= MAX_CONFORMANCE_IMAGES:
            raise ConfigError(
                f"conformance.images={self.images}: expected 1 to {MAX_CONFORMANCE_IMAGES}."
            )
