"""What the Resolver measures, on engines that only say how long a pass takes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from featx.engine import Compute, Engine
from featx.keys import from_keywords, from_omegaconf
from featx.run.resolve import Resolver

CLOCK = "featx.engine.time.perf_counter"


class Timed:
    """An engine of a device whose first pass is slow, as one that loads kernels; then 1 ms."""

    seconds_per_image = Engine.seconds_per_image

    def __init__(self, device: str, first_s: float) -> None:
        self.device = types.SimpleNamespace(type=device)
        self.compute = Compute("fp32", False, False, 4)
        self.passes = 0
        self.now = 0.0
        self._first_s = first_s

    def run(self, images: torch.Tensor) -> None:
        self.passes += 1
        self.now += self._first_s if self.passes == 1 else 0.001


@pytest.mark.parametrize(
    ("device", "first_s", "passes", "seconds"),
    [("cpu", 2.0, 1, 0.5), ("cpu", 0.1, 2, 0.00025), ("cuda", 2.0, 2, 0.00025)],
)
def test_a_slow_pass_is_repeated_where_it_may_have_been_a_warm_up(
    monkeypatch: pytest.MonkeyPatch, device: str, first_s: float, passes: int, seconds: float
) -> None:
    engine: Any = Timed(device, first_s)
    monkeypatch.setattr(CLOCK, lambda: engine.now)
    config = from_omegaconf(from_keywords({"out": "store"}))
    resolver = Resolver(config, engine, torch.zeros(4, 3, 2, 2, dtype=torch.uint8), 100, None)
    resolver._time()
    assert engine.passes == passes
    assert resolver.seconds_per_image == pytest.approx(seconds)
