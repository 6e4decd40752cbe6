"""Options of the comparison with the model library's own path at the start of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from featx.config.checks import options

MAX_CONFORMANCE_IMAGES = 16
"""Largest number of images that are compared; so many are read before a long run anyway."""


@options("conformance")
class ConformanceConfig:
    """Comparison of some images with the model library's own path, before a run starts."""

    mode: Literal["off", "warn", "strict"] = "strict"
    """strict refuses a run whose values differ by more than featx promises (docs/models.md); warn
    runs with a warning; off leaves the comparison out."""
    images: Annotated[int, Ge(1), Le(MAX_CONFORMANCE_IMAGES)] = 8
    """Number of images that go through the library's own transform and forward pass, 1 to 16; a
    resume compares none."""
