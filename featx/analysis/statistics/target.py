"""Run target of job=stats: rows, layers and parts to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.analysis.statistics.part_moments import StatsLayer
from featx.analysis.statistics.stats_file import stored_resume_state
from featx.analysis.statistics.tokens import feature_axis
from featx.config import Config
from featx.errors import ConfigError
from featx.images import PILLOW
from featx.layers import RowLayout, channel_axis, token_geometries
from featx.pipeline import check_out, list_images, seconds_of_part
from featx.store import content_tags_digest
from featx.types import LayerSpec, Listing, ResumeState, Source, TokenGeometry

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.layers import ChosenLayers

COMMIT_BYTES_PER_S = 40e6
"""Bytes of a part's matrices that are built, synced and merged per second on a busy machine."""

COMMIT_SHARE = 0.1
"""Share of the time of a part that its commit may take."""

_RESOLVED = ("precision", "compile", "channels_last", "batch_size")
"""Recorded settings that a resume uses again."""


class StatsTarget:
    """Run target: statistics in the folder `out`, which may also contain a store.

    Args:
        config: checked config with job=stats.
        source: data set object from Python, or None to open that of the config.

    Attributes:
        dtype: dtype of the values, before any cast to the dtype of a store.
        layers: layers whose statistics are computed; known after `part_limits`.
        axes: layer -> axis of its features, if each position is an observation.
        settings: entries of the fingerprint in addition to those of every run.
        folder: the folder `out`.
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
        self._resume_state = None if config.overwrite else stored_resume_state(self.folder)

    def list_images(self) -> tuple[Source, Listing]:
        """Return the source and its listing in the order of the data set.

        A store in the same folder may have another order.
        """
        source, listing = list_images(self._config, source=self._source)
        if (
            listing.content_tags is not None
        ):  # statistics store no tag per row, so the digest covers all
            self.settings["data.content_tags"] = content_tags_digest(listing)
        return source, listing

    def unfinished(self, listing: Listing, chosen: ChosenLayers) -> ChosenLayers:
        """Return all layers, because one file contains them together."""
        return chosen

    def resume_state(self, names: set[str]) -> ResumeState | None:
        """Return the resume state: the `auto` values chosen before the first part, or None."""
        if self._resume_state is None:
            return None
        settings = self._resume_state.settings
        resolved = {key: settings[key] for key in _RESOLVED}
        resolved["fold_batchnorm"] = settings.get("fold_batchnorm", False)
        resolved["jpeg"] = settings.get("jpeg", PILLOW)
        resolved["heif"] = settings.get("version.pillow_heif")
        if self._resume_state.threads is not None:
            resolved["threads"] = self._resume_state.threads
        return ResumeState(resolved, settings["part_rows"], "the statistics were")

    def part_limits(
        self, engine: Engine, specs: Sequence[LayerSpec], work_s: float
    ) -> tuple[float, float]:
        """Return the maximum number of rows and of seconds per part.

        As for a store, but longer if writing and merging the matrices would take a large share of
        the time.
        """
        places = token_geometries(specs, engine.backbone)
        size = engine.backbone.preprocess.crop
        self.layers = [self._layer(spec, size, places.get(spec.name)) for spec in specs]
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

    def _layer(
        self, spec: LayerSpec, input_size: tuple[int, int], places: TokenGeometry | None = None
    ) -> StatsLayer:
        """Describe one layer, and record the axis of its features."""
        positions = None
        if self._config.stats.observation == "position" and len(spec.shape) > 1:
            axis = channel_axis(spec.reduce, RowLayout(spec.name, spec.shape, input_size))
            self.axes[spec.name] = axis
            positions = math.prod(spec.shape) // spec.shape[axis - 1]
        if places is not None and feature_axis(tuple(spec.shape), places) is None:
            places = None
        return StatsLayer(spec, self._config.stats.covariance, positions, places)
