"""Engines on tiny modules, and how quick one says it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from featx.config import ReduceConfig, make_reduce
from featx.engine import Compute, Engine, TimedRows
from featx.engine.auto_settings import CPU_BATCH
from featx.images import Preprocess
from featx.layers import select
from featx.models import Backbone

CPU = torch.device("cpu")
FP32 = Compute("fp32", False, False, 4)


def backbone_of(module: nn.Module, side: int = 8, num_prefix_tokens: int = 0) -> Backbone:
    """A module that takes (B, 3, side, side), with a transform that nobody calls."""
    preprocess = Preprocess(
        reference=lambda image: torch.zeros(3, side, side),
        crop=(side, side),
        resize=side,
        interpolation="bilinear",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    torch.manual_seed(0)
    return Backbone(module, "test", "random", preprocess, num_prefix_tokens)


@contextlib.contextmanager
def bound(
    backbone: Backbone,
    *layers: str | tuple[str, str | ReduceConfig],
    dtype: str = "float32",
    device: torch.device = CPU,
    images: torch.Tensor | None = None,
    target: str | int = "predicted",
) -> Iterator[Engine]:
    """An engine with captures of `layers`: names, or (name, reduction); proven on `images`."""
    pairs = [(layer, "none") if isinstance(layer, str) else layer for layer in layers]
    with Engine(backbone, device, dtype, target) as engine:
        traced = engine.trace([name for name, _ in pairs])
        requests = [(name, make_reduce(r) if isinstance(r, str) else r) for name, r in pairs]
        found = select(requests, traced, backbone.classifier, backbone.stages)
        engine.trial_images = images
        engine.attach_captures(found.chosen)
        engine.configure_compute(FP32)
        engine.chosen = found.chosen  # type: ignore[attr-defined]
        yield engine


def assert_refused(
    error: type[Exception], message: str, backbone: Backbone, *layers: Any, **options: Any
) -> None:
    """An engine with captures of `layers`, as of `bound`, is refused before the first run."""
    with pytest.raises(error, match=message), bound(backbone, *layers, **options):
        pass


def hooked(module: nn.Module, layer: str, x: torch.Tensor, call: int = 1) -> torch.Tensor:
    """What a layer gave, by a hook of our own that copies at once."""
    seen: list[torch.Tensor] = []
    handle = module.get_submodule(layer).register_forward_hook(
        lambda m, args, out: seen.append(out.clone())
    )
    with torch.no_grad():
        module(x.clone())
    handle.remove()
    return seen[call - 1]


def num_hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def noise(batch_size: int = 4, side: int = 8, seed: int = 3) -> torch.Tensor:
    return torch.randn(batch_size, 3, side, side, generator=torch.Generator().manual_seed(seed))


def of_speed(
    monkeypatch: pytest.MonkeyPatch,
    seconds_per_image: float,
    in_bf16: float | None = None,
    cpu_batch: int = CPU_BATCH,
) -> None:
    """Let every engine measure the same seconds per image.

    Args:
        monkeypatch: pytest's.
        seconds_per_image: what it measures.
        in_bf16: what it measures in bf16; the CPU is taken for one that has units for it.
        cpu_batch: largest batch size that batch_size=auto chooses.
    """

    def measured(engine: Engine, images: torch.Tensor, **_: object) -> TimedRows:
        in_fp32 = in_bf16 is None or engine.compute.precision == "fp32"
        return TimedRows(engine.run(images), seconds_per_image if in_fp32 else in_bf16)

    monkeypatch.setattr(Engine, "time_passes", measured)
    monkeypatch.setattr("featx.engine.auto_settings.CPU_BATCH", cpu_batch)
    if in_bf16 is not None:
        with_bf16(monkeypatch)


def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for one that has units for bf16."""
    monkeypatch.setattr("featx.engine.precision_choice.may_have_bf16", lambda: True)
