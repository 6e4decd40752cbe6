"""Options of the group `reduce`, and the names of presets, captures and scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass

from featx.errors import ConfigError, nearest

PROJECTIONS = ("pca", "whiten")
REDUCTIONS = ("none", "flatten", "avg", "max", "gem", "cls", "patch_avg", "grid", *PROJECTIONS)
PRESETS = ("embedding", "stages", "leaves", "all")
CAPTURES = ("output", "input", "grad_output", "grad_input", "attention")
GRADIENTS = ("grad_output", "grad_input")
SCALARS = ("label", "predicted", "loss", "entropy", "logsumexp")
_OF_REDUCTIONS = {
    "p": ("gem",),
    "size": ("grid",),
    "stats": PROJECTIONS,
    "k": PROJECTIONS,
    "epsilon": ("whiten",),
    "zca": ("whiten",),
}
"""Option -> the reductions that read it; the others refuse it."""


@dataclass
class ReduceConfig:
    """Reduction of a captured tensor to the stored row."""

    name: str = "none"
    """Name of the reduction; set by the option `reduce` itself."""
    p: float | None = None
    """Exponent of gem, 3 when not given."""
    size: int | None = None
    """Number of cells per side of grid, 2 when not given."""
    stats: str | None = None
    """stats.h5 of job=stats, or its folder, for pca and whiten. The reduction that the statistics
    were computed after is applied first."""
    k: int | None = None
    """Number of directions that pca and whiten keep, those of largest variance; all when not
    given."""
    epsilon: float | None = None
    """Number that whiten adds to each variance, in the unit of the variances, so that noise is not
    amplified; 0 when not given."""
    zca: bool | None = None
    """Rotate the result of whiten back into the axes of the features; false when not given."""

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ConfigError(
                f"reduce={self.name}: expected one of {', '.join(REDUCTIONS)}."
                f"{nearest(str(self.name), REDUCTIONS)}"
            )
        for key, owners in _OF_REDUCTIONS.items():
            value = getattr(self, key)
            if value is not None and self.name not in owners:
                names = " and ".join(f"reduce={owner}" for owner in owners)
                raise ConfigError(f"reduce.{key} has an effect with {names} only.")
        for key in ("p", "size", "k"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"reduce.{key}={value}: expected a number above 0.")
        if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
            raise ConfigError(f"reduce.epsilon={self.epsilon}: expected a number of at least 0.")
        if self.name in PROJECTIONS and not self.stats:
            raise ConfigError(
                f"reduce={self.name} needs reduce.stats=FILE, the stats.h5 that job=stats made."
            )

    @property
    def args(self) -> dict[str, float | str]:
        """Parameters of the reduction with defaults filled in, as a store records them.

        pca and whiten add those of their statistics.
        """
        if self.name == "gem":
            return {"p": 3.0 if self.p is None else self.p}
        if self.name == "grid":
            return {"size": 2 if self.size is None else self.size}
        if self.name == "whiten":
            return {"epsilon": self.epsilon or 0.0, "zca": bool(self.zca)}
        return {}
