"""The engines that jobs compute with: one for features, one for attributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from featx.config.layer_requests import layer_requests
from featx.pipeline.engine_spec import EngineSpec

# torch takes seconds to import, and a job names its engine before it is needed.
if TYPE_CHECKING:
    import torch

    from featx.config import ReduceConfig
    from featx.config.run_config import Config
    from featx.engine.engine import Engine
    from featx.layers.projection import ChosenLayers
    from featx.layers.selection import Selection
    from featx.layers.trace import CapturePoint
    from featx.models.base import Backbone


def engine_spec(job: str) -> EngineSpec:
    """The engine of a job, by the name of the job that made a store."""
    return ATTRIBUTIONS if job == "attribute" else FEATURES


def _feature_engine(config: Config, backbone: Backbone, device: torch.device, dtype: str) -> Engine:
    """An engine that gives captured tensors."""
    from featx.engine.engine import Engine

    return Engine(backbone, device, dtype, config.target)


def _requested_layers(config: Config, engine: Engine) -> Selection:
    """The layers that the config asks for, found in one traced pass."""
    from featx.layers.selection import select

    backbone = engine.backbone
    requests = layer_requests(config)
    traced = engine.trace([name for name, _ in requests])
    return select(requests, traced, backbone.classifier, backbone.stages)


def _attributor(config: Config, backbone: Backbone, device: torch.device, dtype: str) -> Engine:
    """An engine that gives heat maps."""
    from featx.analysis.attribution.attributor import Attributor

    return Attributor(backbone, device, dtype, config.target, config.attribute)


def _attributed_layers(config: Config, engine: Engine) -> Selection:
    """The datasets of the methods that the config asks for."""
    from featx.analysis.attribution.attributor import Attributor

    assert isinstance(engine, Attributor)
    return engine.select(engine.trace())


def _with_statistics(
    chosen: Sequence[tuple[CapturePoint, ReduceConfig]], config: Config, backbone: Backbone
) -> ChosenLayers:
    """The chosen layers, with the statistics that reduce=pca and reduce=whiten need."""
    from featx.analysis.statistics.projected_reductions import with_statistics

    return with_statistics(chosen, config, backbone)


FEATURES = EngineSpec(_feature_engine, _requested_layers, _with_statistics)
"""Captured tensors: all jobs but job=attribute."""

ATTRIBUTIONS = EngineSpec(_attributor, _attributed_layers, _with_statistics)
"""Heat maps: job=attribute."""
