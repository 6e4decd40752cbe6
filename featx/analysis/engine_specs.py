"""Engines of the jobs: one computes features, the other attributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from featx.config import layer_requests
from featx.errors import InternalError
from featx.pipeline import EngineSpec

# torch takes seconds to import, and a job selects its engine before it needs torch.
if TYPE_CHECKING:
    import torch

    from featx.config import Config, ReduceConfig
    from featx.engine import Engine
    from featx.layers import CapturePoint, ChosenLayers, Selection
    from featx.models import Backbone


def engine_spec(job: str) -> EngineSpec:
    """Return how the engine of a job is built.

    Args:
        job: name of the job that made or makes a store, as the store records it.
    """
    return ATTRIBUTIONS if job == "attribute" else FEATURES


def _feature_engine(config: Config, backbone: Backbone, device: torch.device, dtype: str) -> Engine:
    """Create an engine that computes captured tensors."""
    from featx.engine import Engine

    return Engine(backbone, device, dtype, config.target)


def _requested_layers(config: Config, engine: Engine) -> Selection:
    """Select the layers that the config requests, with one traced forward pass."""
    from featx.layers import select

    backbone = engine.backbone
    requests = layer_requests(config)
    traced = engine.trace([name for name, _ in requests])
    return select(requests, traced, backbone.classifier, backbone.stages)


def _attributor(config: Config, backbone: Backbone, device: torch.device, dtype: str) -> Engine:
    """Create an engine that computes heat maps."""
    from featx.analysis.attribution.attributor import Attributor

    return Attributor(backbone, device, dtype, config.target, config.attribute)


def _attributed_layers(config: Config, engine: Engine) -> Selection:
    """Select one dataset per requested attribution method."""
    from featx.analysis.attribution.attributor import Attributor

    if not isinstance(engine, Attributor):
        raise InternalError(f"heat maps were asked of a {type(engine).__qualname__}")
    return engine.select(engine.trace())


def _with_statistics(
    chosen: Sequence[tuple[CapturePoint, ReduceConfig]], config: Config, backbone: Backbone
) -> ChosenLayers:
    """Add the statistics that reduce=pca and reduce=whiten need to the chosen layers."""
    from featx.analysis.statistics.projected_reductions import with_statistics

    return with_statistics(chosen, config, backbone)


FEATURES = EngineSpec(_feature_engine, _requested_layers, _with_statistics, captures_layers=True)
"""Engine for captured tensors, used by all jobs except job=attribute."""

ATTRIBUTIONS = EngineSpec(_attributor, _attributed_layers, _with_statistics, captures_layers=False)
"""Engine for heat maps, used by job=attribute."""
