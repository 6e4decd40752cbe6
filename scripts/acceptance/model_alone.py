"""Command `model`: forward passes alone, with images on the device."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from acceptance.steps import Settings
from featx.config import make_reduce, model_options
from featx.engine import Compute, Engine
from featx.layers import select
from featx.models import build_backbone


@dataclass(frozen=True)
class Job:
    """A model whose speed is measured, with images of `size` pixels, or of its own size."""

    name: str
    model: str
    layer: str = "embedding"
    size: int | None = None
    batch_size: int = 256


JOBS = (
    Job("ResNet-50", "resnet50"),
    Job("ResNet-50 layer4 maps", "resnet50", layer="layer4"),
    Job("ViT-B/16", "vit_b_16"),
    Job("EfficientNet-B0", "efficientnet_b0"),
    Job("DINOv2-S/14 at 518", "vit_small_patch14_dinov2", size=518, batch_size=64),
    Job("DINOv2-B/14 at 518", "vit_base_patch14_dinov2", size=518, batch_size=64),
    Job("CLIP ViT-L/14", "vit_large_patch14_clip_224"),
)
DRY_JOBS = (
    Job("test_resnet", "test_resnet", batch_size=8),
    Job("test_vit", "test_vit", batch_size=8),
)

SECONDS = 1.5
"""Seconds of each timed round."""


def models(settings: Settings) -> Mapping[str, Any]:
    """Images/s of featx's engine and of a bare loop, in fp32, bf16 and fp16, in turns."""
    rows: list[dict[str, Any]] = []
    goals: dict[str, bool] = {}
    for job in DRY_JOBS if settings.dry_run else JOBS:
        row: dict[str, Any] = {"model": job.name, "batch": job.batch_size}
        for precision in ("fp32", "bf16") if settings.dry_run else ("fp32", "bf16", "fp16"):
            try:
                rates = _of_engine_and_loop(settings, job, precision)
            except torch.OutOfMemoryError:
                row[precision] = "out of memory"
                continue
            for name, found in rates.items():
                row[f"{precision}, {name}"] = statistics.median(found)
            for name in ("bare loop", "loop under autocast"):
                pairs = zip(rates["featx"], rates[name], strict=True)
                ratio = statistics.median(mine / other for mine, other in pairs)
                row[f"{precision}, of {name}"] = ratio
                if precision != "fp32":
                    goals[f"{job.name} in {precision} at 0.9 of the {name}"] = ratio >= 0.9
        rows.append(row)
        gc.collect()
        torch.cuda.empty_cache()
    return {"rows": rows, "goals": goals}


def _of_engine_and_loop(settings: Settings, job: Job, precision: str) -> dict[str, list[float]]:
    """Images/s of the engine, and of the bare module in half precision or under autocast.

    Three rounds each, in turns.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with _engine(settings, job, precision) as (engine, x):
        module = _built(job).module.to(settings.device, dtype)
        module = module.to(memory_format=torch.channels_last)
        floats = engine.normalise(x).to(dtype, memory_format=torch.channels_last)

        def bare() -> Any:
            with torch.inference_mode():
                return module(floats)

        def under_autocast() -> Any:
            is_half = dtype != torch.float32
            with torch.inference_mode(), torch.autocast(floats.device.type, dtype, enabled=is_half):
                return module(floats)

        calls: dict[str, Callable[[], Any]] = {
            "featx": lambda: engine.rows(x, on_device=True),
            "bare loop": bare,
            "loop under autocast": under_autocast,
        }
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 if settings.dry_run else 3):
            for name, call in calls.items():
                rates[name].append(job.batch_size * _rate(settings, call))
    return rates


def profile(settings: Settings) -> Mapping[str, Any]:
    """Kernels of a pass, and the share of the time in which the device is busy."""
    rows = []
    for job in DRY_JOBS[:1] if settings.dry_run else (JOBS[0], JOBS[2], JOBS[3]):
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if settings.device != "cpu":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with _engine(settings, job, "bf16") as (engine, x):
            for _ in range(2):
                engine.rows(x, on_device=True)
            with torch.profiler.profile(activities=kinds) as found:
                started_at = time.perf_counter()
                for _ in range(3):
                    engine.rows(x, on_device=True)
                _wait(settings)
                seconds = time.perf_counter() - started_at
        kernels = [e for e in found.events() if "cuda" in str(e.device_type).lower()]
        busy_s = sum(event.device_time for event in kernels) / 1e6
        rows.append({"model": job.name, "kernels a pass": len(kernels) // 3,
                     "device busy": busy_s / seconds if kernels else "no device"})  # fmt: skip
    return {"rows": rows}


def compiled(settings: Settings) -> Mapping[str, Any]:
    """Images/s of the engine, eager and compiled, and the seconds of compiling."""
    rows = []
    for job in DRY_JOBS[:1] if settings.dry_run else (JOBS[0], JOBS[2]):
        row: dict[str, Any] = {"model": job.name}
        for how, is_compiled in (("eager", False), ("compiled", True)):
            with _engine(settings, job, "bf16", is_compiled) as (engine, x):
                started_at = time.perf_counter()
                engine.rows(x, on_device=True)
                row["seconds of compiling"] = time.perf_counter() - started_at
                per_s = _rate(settings, partial(engine.rows, x, on_device=True))
                row[how] = job.batch_size * per_s
        rows.append(row)
    return {"rows": rows}


def _built(job: Job) -> Any:
    size = {} if job.size is None else {"input_size": [job.size, job.size]}
    return build_backbone(model_options(name=job.model, weights=None, **size), 0)


@contextlib.contextmanager
def _engine(
    settings: Settings, job: Job, precision: str, is_compiled: bool = False
) -> Iterator[tuple[Engine, torch.Tensor]]:
    """An engine with the capture of a job, and (B, 3, H, W) random uint8 images on its device."""
    backbone = _built(job)
    height, width = backbone.preprocess.crop
    generator = torch.Generator().manual_seed(0)
    shape = (job.batch_size, 3, height, width)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(settings.device)
    fold = settings.device == "cpu"
    with Engine(backbone, torch.device(settings.device), "float16") as engine:
        requests = [(job.layer, make_reduce("none"))]
        traced = engine.trace([job.layer])
        chosen = select(requests, traced, backbone.classifier, backbone.stages).chosen
        engine.attach_captures(chosen)
        engine.configure_compute(
            Compute(precision, is_compiled, True, job.batch_size, fold_batchnorm=fold)
        )
        yield engine, x


def _rate(settings: Settings, call: Callable[[], Any]) -> float:
    """Calls per second, after two that warm up."""
    for _ in range(2):
        call()
    _wait(settings)
    seconds, calls = (0.05, 1) if settings.dry_run else (SECONDS, 4)
    started_at, count, took = time.perf_counter(), 0, 0.0
    while took < seconds:
        for _ in range(calls):
            call()
        count += calls
        _wait(settings)
        took = time.perf_counter() - started_at
    return count / took


def _wait(settings: Settings) -> None:
    if settings.device != "cpu":
        torch.cuda.synchronize()


STEPS = {
    models: 300,
    profile: 50,
    compiled: 120,
}
"""Step -> seconds after which it is killed."""
