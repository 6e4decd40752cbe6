"""Options of the group `model.window`."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt

from featx.config.checks import options
from featx.config.transform import Side
from featx.errors import ConfigError

_USUAL_OVERLAP = 0.5


@options("model.window")
class WindowConfig:
    """Windows in which an image goes through the model at its own size."""

    size: Side = None
    """Side of square windows in pixels, or [height,width], for which the model is built: an image
    keeps its own size and goes through the model in windows, whose maps are blended into one. null
    resizes and crops images instead."""
    overlap: Annotated[float, Ge(0), Lt(1)] = _USUAL_OVERLAP
    """Share of a window that the next one repeats, along each axis; rounded up to whole patches."""

    def __post_init__(self) -> None:
        if self.size is None and self.overlap != _USUAL_OVERLAP:
            raise ConfigError(
                f"model.window.overlap={self.overlap:g} has no effect without model.window.size, "
                "the side of the windows in pixels."
            )

    @property
    def sides(self) -> tuple[int, int] | None:
        """(height, width) of a window in pixels; None without windows."""
        if self.size is None or isinstance(self.size, int):
            return None if self.size is None else (self.size, self.size)
        return self.size[0], self.size[1]
