"""Forward passes alone on this machine: freed memory, copies of captured tensors."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks.commands import COMMAND, Add


def measure_model(model: str, batch_size: int, keep_memory: bool, seconds: float) -> float:
    """Images per second of a timm model, channels-last fp32, random weights."""
    import timm
    import torch

    from featx.base import keep_freed_memory

    if keep_memory:
        keep_freed_memory()
    module = timm.create_model(model).eval().to(memory_format=torch.channels_last)
    x = torch.randn(batch_size, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        started_at, count = time.perf_counter(), 0
        while time.perf_counter() - started_at < seconds:
            module(x)
            count += batch_size
        return count / (time.perf_counter() - started_at)


def malloc(arguments: argparse.Namespace) -> None:
    """Images per second with freed memory kept, and not; each figure is a process of its own."""
    if arguments.one:
        keep_memory = arguments.one == "kept"
        print(measure_model(arguments.model, arguments.batch_size, keep_memory, arguments.seconds))
        return
    rates: dict[str, list[float]] = {"default": [], "kept": []}
    for _ in range(arguments.runs):
        for kind, figures in rates.items():
            command = [*COMMAND, *sys.argv[1:], "--one", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            figures.append(float(done.stdout))
    for kind, figures in rates.items():
        median = statistics.median(figures)
        print(f"{kind:8} {median:6.1f} images/s ({min(figures):.1f} to {max(figures):.1f})")
    ratio = statistics.median(rates["kept"]) / statistics.median(rates["default"])
    print(f"ratio    {ratio:6.2f}")


def compare_copies(model: str, layers: str, reduce: str, arguments: argparse.Namespace) -> None:
    """Print a line: the engine as it is, and with a copy of every tensor that a hook sees."""
    import torch

    from featx.config import make_reduce, model_options
    from featx.engine import Compute, Engine
    from featx.layers import CapturePoint, select
    from featx.models import build_backbone

    backbone = build_backbone(model_options(name=model, weights=None), 0)
    images = torch.randn(arguments.batch_size, 3, *backbone.preprocess.crop)
    with Engine(backbone, torch.device("cpu"), arguments.dtype) as engine:
        captures = select([(layers, make_reduce(reduce))], engine.trace(), None, None).chosen
        if reduce == "avg":  # of maps and tokens only: a vector has no average
            shapes = {call.module: call.outputs for call in engine.trace().calls}
            captures = [
                pair for pair in captures if len(next(iter(shapes[pair[0].module].values()))) > 2
            ]
        engine.attach_captures(captures)
        collector, bytes_seen = engine._collector, 0
        keep = collector.keep

        def copy_first(point: CapturePoint, tensor: torch.Tensor) -> torch.Tensor:
            nonlocal bytes_seen
            bytes_seen += tensor.nbytes
            return keep(point, tensor.clone())

        seconds: dict[str, list[float]] = {"where needed": [], "everywhere": []}
        for _ in range(arguments.runs):
            for variant, figures in seconds.items():
                collector.keep = keep if variant == "where needed" else copy_first
                engine.configure_compute(Compute("fp32", False, False, len(images)))
                engine.run(images)
                started_at = time.perf_counter()
                bytes_seen = 0
                engine.run(images)
                figures.append(time.perf_counter() - started_at)
        # What is cast to another dtype, or reduced, is a new tensor without a copy.
        copied = collector._copied & collector._views if arguments.dtype == "float32" else ()
        needed = sum(4 * int(np.prod(collector._row_shapes[name])) for name in copied)
        each = bytes_seen / len(images)
    fast, slow = (1e3 * statistics.median(figures) / len(images) for figures in seconds.values())
    print(
        f"{model:9} {layers:6} {reduce:7} {len(captures):5} layers {each / 1e6:8.1f} "
        f"{needed / 1e6:8.1f} MB/image {slow:8.1f} {fast:8.1f} ms/image {slow / fast:6.2f}",
        flush=True,
    )


def copies(arguments: argparse.Namespace) -> None:
    """Bytes copied and time per image, with a copy of every tensor and with the needed ones."""
    print(f"stored as {arguments.dtype}; everywhere, where needed")
    for model in arguments.models:
        for layers in ("leaves", "all"):
            for reduce in ("none", "avg"):
                compare_copies(model, layers, reduce, arguments)


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("malloc", malloc)
    command.add_argument("--model", default="tf_efficientnet_lite0")
    command.add_argument("--batch-size", type=int, default=16)
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--seconds", type=float, default=5)
    command.add_argument("--one", choices=["default", "kept"], help=argparse.SUPPRESS)
    command = add("copies", copies)
    command.add_argument("--models", nargs="+", default=["resnet50", "vit_b_16"])
    command.add_argument(
        "--dtype", default="float32", help="of the store: float32 needs copies most"
    )
    command.add_argument("--batch-size", type=int, default=2)
    command.add_argument("--runs", type=int, default=3)
