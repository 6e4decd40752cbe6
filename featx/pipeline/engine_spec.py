"""Engine spec: how a job builds the engine of its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from featx.config import Config, ReduceConfig
    from featx.engine import Engine
    from featx.layers import CapturePoint, ChosenLayers, Selection
    from featx.models import Backbone


@dataclass(frozen=True)
class EngineSpec:
    """Functions that build the engine of a run and choose its layers.

    All three functions are module-level functions, since workers receive them pickled by name.

    Attributes:
        build: creates the engine from the config, a backbone, a device, and the dtype of its
            values.
        select: finds the requested datasets in one traced forward pass of the engine.
        bind_reductions: completes the reductions that need statistics of a data set.
        captures_layers: whether the datasets are tensors of the layers that the options `layers`
            and `capture` name, which is not so for heat maps.
    """

    build: Callable[[Config, Backbone, torch.device, str], Engine]
    select: Callable[[Config, Engine], Selection]
    bind_reductions: Callable[
        [Sequence[tuple[CapturePoint, ReduceConfig]], Config, Backbone], ChosenLayers
    ]
    captures_layers: bool
