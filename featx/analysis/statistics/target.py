"""What job=stats has to compute: rows, layers and parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.analysis.statistics.part_moments import StatsLayer
from featx.analysis.statistics.stats_file import statistics_begun
from featx.config.run_config import Config
from featx.errors import ConfigError
from featx.images.decode import PILLOW
from featx.layers.reductions import channel_axis
from featx.pipeline.run_target import check_out, list_images, seconds_of_part
from featx.store.listing import marks_digest
from featx.types import LayerSpec, Listing, ResumeState, Source

if TYPE_CHECKING:
    from featx.engine.engine import Engine
    from featx.layers.projection import ChosenLayers

COMMIT_BYTES_PER_S = 40e6
"""Bytes of a part's matrices that are built, synced and merged in a second, on a busy machine."""

COMMIT_SHARE = 0.1
"""Of a part's time that its commit may take."""

_RESOLVED = ("precision", "compile", "channels_last", "batch_size")


class StatsTarget:
    """Statistics in the folder that `out` names, beside a store that may be there.

    Attributes:
        dtype: values are taken in float32, before any cast to a store's dtype.
        layers: whose statistics are taken; known after `part_limits`.
        axes: layer -> the axis of its features, where each position is a row.
    """

    dtype = "float32"

    def __init__(self, config: Config, source: Source | None = None) -> None:
        self.layers: list[StatsLayer] = []
        self.axes: dict[str, int] = {}
        self.settings: dict[str, Any] = {
            "dtype": self.dtype,
            "stats.observation": config.stats.observation,
            "stats.covariance": config.stats.covariance,
        }
        if config.takes_gradients:
            self.settings["target"] = config.target
        self._config = config
        self._source = source
        self.folder: Path | None = Path(config.out).expanduser()
        check_out(self.folder)
        self._begun = None if config.overwrite else statistics_begun(self.folder)

    def list_images(self) -> tuple[Source, Listing]:
        """The rows as the data set lists them; a store in the same folder has its own order."""
        source, listing = list_images(self._config, source=self._source)
        if listing.marks is not None:  # no row says which image it is of, so all of them do
            self.settings["data.marks"] = marks_digest(listing)
        return source, listing

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """All layers: one file holds them together."""
        return chosen

    def begun(self, names: set[str]) -> ResumeState | None:
        """What was decided before the first part was done."""
        if self._begun is None:
            return None
        settings = self._begun.settings
        resolved = {key: settings[key] for key in _RESOLVED}
        resolved["fold_batchnorm"] = settings.get("fold_batchnorm", False)
        resolved["jpeg"] = settings.get("jpeg", PILLOW)
        resolved["heif"] = settings.get("version.pillow_heif")
        if self._begun.threads is not None:
            resolved["threads"] = self._begun.threads
        return ResumeState(resolved, settings["part_rows"], "the statistics were")

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """As of a store, longer where writing and merging the matrices would take much of it.

        Raises:
            ConfigError: a matrix would be too large.
            ReduceError: the positions of a layer are unknown.
        """
        self.layers = [self._layer(spec, engine.backbone.preprocess.crop) for spec in specs]
        if self._config.stats.observation == "position" and not self.axes:
            raise ConfigError(
                "stats.observation=position has no effect: the rows of these layers are vectors. "
                "Leave it out, or take layers with maps or tokens, or another reduction."
            )
        full = self._config.stats.covariance == "full"
        numbers = sum(layer.dim ** (2 if full else 1) for layer in self.layers)
        commit_s = 8 * numbers / COMMIT_BYTES_PER_S
        seconds = seconds_of_part(work_s, self._config.executor.task_seconds)
        return float("inf"), max(seconds, commit_s / COMMIT_SHARE)

    def _layer(self, spec: LayerSpec, input_size: tuple[int, int]) -> StatsLayer:
        positions = None
        if self._config.stats.observation == "position" and len(spec.shape) > 1:
            axis = channel_axis(spec.reduce, spec.name, spec.shape, input_size)
            self.axes[spec.name] = axis
            positions = math.prod(spec.shape) // spec.shape[axis - 1]
        return StatsLayer(spec, self._config.stats.covariance, positions)
