"""Roofline of this CPU: GFLOP/s of models, compared with those of a large matrix product."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from benchmarks.commands import Add

SIDE = 2048
"""Side of the square matrices: their product is 17 GFLOP, and they do not fit the caches."""


def run(arguments: argparse.Namespace) -> None:
    """GFLOP/s in fp32 with all threads: a matrix product, and models eager and compiled."""
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from featx.base import keep_freed_memory

    keep_freed_memory()
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    limit = 2 * SIDE**3 / _seconds(lambda: a @ b, arguments.runs) / 1e9
    print(f"matrix product: {limit:.0f} GFLOP/s")
    shape = (arguments.batch_size, 3, 224, 224)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    for name in arguments.models:
        module = timm.create_model(name).eval().to(memory_format=torch.channels_last)
        with torch.no_grad():
            with FlopCounterMode(display=False) as counter:
                module(x)
            gflop = counter.get_total_flops() / 1e9
            kinds = {"eager": module, "compiled": _compiled(module)}
            for kind, forward in kinds.items():
                seconds = _seconds(lambda forward=forward: forward(x), arguments.runs)
                rate, speed = arguments.batch_size / seconds, gflop / seconds
                print(
                    f"{name}, {kind}: {rate:.1f} images/s, {speed:.0f} GFLOP/s, "
                    f"{speed / limit:.2f} of the matrix product"
                )


def _compiled(module: object) -> Callable[..., object]:
    """Compile as `Engine.configure_compute` does; with freezing, inductor folds BatchNorm."""
    import torch

    return torch.compile(module, dynamic=False, options={"freezing": True})


def _seconds(function: Callable[[], object], runs: int) -> float:
    """Median seconds of some calls after a first one that is not counted."""
    function()
    seconds = []
    for _ in range(runs):
        started_at = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds)


def add_commands(add: Add) -> None:
    """Register the command of this module."""
    command = add("roofline", run)
    command.add_argument("--models", nargs="+", default=["resnet50", "vit_base_patch16_224"])
    command.add_argument("--batch-size", type=int, default=16)
    command.add_argument("--runs", type=int, default=5)
