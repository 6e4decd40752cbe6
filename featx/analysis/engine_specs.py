"""Engines of the jobs: one computes features, the other attributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from featx.config import layer_requests
from featx.errors import InternalError, LayerError, ModelError
from featx.pipeline import EngineSpec

# torch takes seconds to import, and a job selects its engine before it needs torch.
if TYPE_CHECKING:
    import torch

    from featx.config import Config, ReduceConfig
    from featx.engine import Engine
    from featx.layers import CapturePoint, ChosenLayers, Selection
    from featx.models import Backbone


def engine_spec(job: str) -> EngineSpec:
    """Return how the engine of a job is built; `job` is its name as a store records it."""
    return ATTRIBUTIONS if job == "attribute" else FEATURES


def _feature_engine(config: Config, backbone: Backbone, device: torch.device, dtype: str) -> Engine:
    from featx.engine import Engine

    return Engine(backbone, device, dtype, config.target)


def _requested_layers(config: Config, engine: Engine) -> Selection:
    """Select the layers that the config requests, with one traced forward pass."""
    from featx.layers import select

    backbone = engine.backbone
    requests = layer_requests(config)
    traced = engine.trace([name for name, _ in requests])
    selection = select(requests, traced, backbone.classifier, backbone.stages)
    if backbone.missing_heads:
        _leave_out_heads(selection, backbone, [name for name, _ in requests])
    return selection


def _leave_out_heads(selection: Selection, backbone: Backbone, requests: Sequence[str]) -> None:
    """Leave layers that would be logits out of a selection, of weights without a classifier."""
    available = []
    for point, reduce in selection.chosen:
        heads = [
            head for head in backbone.missing_heads if f"{head}.".startswith(f"{point.module}.")
        ]
        is_head = bool(heads) and point.capture == "output" and point.name != "embedding"
        if point.is_gradient or (is_head and point.name in requests):
            subject = "gradients of logits" if point.is_gradient else f"the layer {point.module}"
            raise LayerError(f"{subject}: {no_logits(backbone)}")
        if is_head:
            selection.left_out.append(f"{point.name} (the weights have no classifier that fits)")
        else:
            available.append((point, reduce))
    selection.chosen[:] = available


def no_logits(backbone: Backbone) -> str:
    """Return why a backbone without its classifiers has no logits, and what can be done."""
    return (
        f"{backbone.weights} has no classifier that fits {backbone.name} "
        f"({', '.join(backbone.missing_heads)}), so there are no logits. layers=embedding gives "
        "the vector before the classifier; for logits give weights with one."
    )


def _attributor(config: Config, backbone: Backbone, device: torch.device, dtype: str) -> Engine:
    from featx.analysis.attribution.attributor import Attributor

    if backbone.missing_heads:
        raise ModelError(f"heat maps explain logits: {no_logits(backbone)}")
    layers = [config.layers] if isinstance(config.layers, str) else [*(config.layers or ())]
    layer = layers[0] if layers else None
    return Attributor(backbone, device, dtype, config.target, config.attribute, layer)


def _attribution_layers(config: Config, engine: Engine) -> Selection:
    """Select one dataset per requested attribution method."""
    from featx.analysis.attribution.attributor import Attributor

    if not isinstance(engine, Attributor):
        raise InternalError(f"heat maps were asked of a {type(engine).__qualname__}")
    return engine.select(engine.trace())


def _with_statistics(
    chosen: Sequence[tuple[CapturePoint, ReduceConfig]], config: Config, backbone: Backbone
) -> ChosenLayers:
    """Add the statistics that reduce=pca and reduce=whiten need to the chosen layers."""
    if not any(reduce.statistics_path for _, reduce in chosen):
        return chosen
    from featx.analysis.statistics.projected_reductions import with_statistics

    return with_statistics(chosen, config, backbone)


FEATURES = EngineSpec(_feature_engine, _requested_layers, _with_statistics, captures_layers=True)
"""Engine for captured tensors, used by all jobs except job=attribute."""

ATTRIBUTIONS = EngineSpec(_attributor, _attribution_layers, _with_statistics, captures_layers=False)
"""Engine for heat maps, used by job=attribute."""
