"""Command `model`: forward passes alone, with images on the device, and the roofline of the GPU."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from acceptance.steps import Settings, Step
from featx.config import make_reduce, model_options
from featx.engine import Compute, Engine
from featx.layers import select
from featx.models import build_backbone


@dataclass(frozen=True)
class Job:
    """A model whose speed is measured.

    Attributes:
        name: as it is shown.
        model: name of the model.
        layer: captured layer, or the preset 'embedding'.
        size: side of the images in pixels, or None for that of the model.
        batch_size: images per pass.
        goal: images/s in fp16 on an H100, or None.
    """

    name: str
    model: str
    layer: str = "embedding"
    size: int | None = None
    batch_size: int = 256
    goal: float | None = None


JOBS = (
    Job("ResNet-50", "resnet50", goal=10_000),
    Job("ResNet-50 layer4 maps", "resnet50", layer="layer4"),
    Job("ViT-B/16", "vit_b_16", goal=4_742),
    Job("EfficientNet-B0", "efficientnet_b0"),
    Job("DINOv2-S/14 at 518", "vit_small_patch14_dinov2", size=518, batch_size=64),
    Job("DINOv2-B/14 at 518", "vit_base_patch14_dinov2", size=518, batch_size=64, goal=500),
    Job("CLIP ViT-L/14", "vit_large_patch14_clip_224"),
)
DRY_JOBS = (
    Job("test_resnet", "test_resnet", batch_size=8),
    Job("test_vit", "test_vit", batch_size=8),
)

SECONDS = 1.5
"""Seconds of each timed round."""


def roofline(settings: Settings) -> Mapping[str, Any]:
    """Roofline of the device: a large matrix product, and a copy in its memory."""
    n = 512 if settings.dry_run else 8192
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = (torch.randn(n, n, device=settings.device, dtype=dtype) for _ in range(2))
        per_s = _rate(settings, lambda a=a, b=b: a @ b)
        rows.append({"what": f"{n} x {n} product, {dtype}", "TFLOP/s": 2 * n**3 * per_s / 1e12})
    x = torch.randn((1 << 20) if settings.dry_run else (1 << 29), device=settings.device)
    y = torch.empty_like(x)
    per_s = _rate(settings, lambda: y.copy_(x))
    rows.append({"what": "copy, read and written", "TB/s": 2 * x.nbytes * per_s / 1e12})
    return {"rows": rows}


def models(settings: Settings) -> Mapping[str, Any]:
    """Images/s of featx's engine and of a bare loop, in fp32, bf16 and fp16, in turns."""
    rows: list[dict[str, Any]] = []
    goals: dict[str, bool] = {}
    for job in DRY_JOBS if settings.dry_run else JOBS:
        precisions = ("fp32", "bf16") if settings.dry_run else ("fp32", "bf16", "fp16")
        row: dict[str, Any] = {"model": job.name, "batch": job.batch_size}
        for precision in precisions:
            try:
                rates = _of_engine_and_loop(settings, job, precision)
            except torch.OutOfMemoryError:
                row[precision] = "out of memory"
                continue
            for name, found in rates.items():
                row[f"{precision}, {name}"] = statistics.median(found)
            ratio = statistics.median(
                a / b for a, b in zip(rates["featx"], rates["bare loop"], strict=True)
            )
            row[f"{precision}, ratio"] = ratio
            if precision != "fp32":
                goals[f"{job.name} in {precision} at 0.9 of a bare loop"] = ratio >= 0.9
                of_autocast = row[f"{precision}, featx"] / row[f"{precision}, loop under autocast"]
                goals[f"{job.name} in {precision} at 0.9 of autocast"] = of_autocast >= 0.9
        best = max((row.get(f"{p}, featx", 0.0) for p in precisions[1:]), default=0.0)
        if job.goal is not None:
            goals[f"{job.name} at {job.goal:.0f} images/s"] = best >= job.goal
        rows.append(row)
        gc.collect()
        if settings.device != "cpu":
            torch.cuda.empty_cache()
    return {"rows": rows, "goals": goals}


def batch_sizes(settings: Settings) -> Mapping[str, Any]:
    """Images/s of the engine at several batch sizes, with one and with two streams."""
    jobs = DRY_JOBS[:1] if settings.dry_run else (JOBS[0], JOBS[2])
    sizes = (2, 8) if settings.dry_run else (16, 64, 256, 512)
    rows = []
    for job in jobs:
        for size in sizes:
            with _engine(settings, job) as engine:
                engine.configure_compute(
                    Compute("bf16", False, True, size, fold_batchnorm=settings.device == "cpu")
                )
                x = _images(settings, job, size)
                one = size * _rate(settings, lambda e=engine, x=x: e.rows(x, on_device=True))
                row = {"model": job.name, "batch": size, "one stream": one}
                if settings.device != "cpu":
                    row["two streams"] = _with_two_streams(engine, x)
                rows.append(row)
    return {"rows": rows}


def other_settings(settings: Settings) -> Mapping[str, Any]:
    """Images/s of the engine with settings that featx leaves off, or chooses by values only."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    rows = []
    for job in DRY_JOBS[:1] if settings.dry_run else (JOBS[0], JOBS[2]):
        size = job.batch_size
        with _engine(settings, job) as engine:
            x = _images(settings, job, size)

            def rate(engine: Engine = engine, x: torch.Tensor = x) -> float:
                return len(x) * _rate(settings, lambda: engine.rows(x, on_device=True))

            row: dict[str, Any] = {"model": job.name}
            for name, channels_last in (("fp32, channels last", True), ("fp32, contiguous", False)):
                engine.configure_compute(Compute("fp32", False, channels_last, size))
                row[name] = rate()
            engine.configure_compute(Compute("bf16", False, True, size))
            row["bf16"] = rate()
            cudnn.benchmark = True
            row["bf16, cudnn.benchmark"] = rate()
            cudnn.benchmark = False
            matmul.allow_bf16_reduced_precision_reduction = True
            row["bf16, reduced sums"] = rate()
            matmul.allow_bf16_reduced_precision_reduction = False
            rows.append(row)
    return {"rows": rows}


def compiled(settings: Settings) -> Mapping[str, Any]:
    """Images/s of the engine, eager and compiled, and the seconds of compiling."""
    rows = []
    for job in DRY_JOBS[:1] if settings.dry_run else (JOBS[0], JOBS[2]):
        row: dict[str, Any] = {"model": job.name}
        with _engine(settings, job) as engine:
            x = _images(settings, job, job.batch_size)
            for is_compiled in (False, True):
                compute = Compute(
                    "bf16",
                    is_compiled,
                    True,
                    job.batch_size,
                    fold_batchnorm=settings.device == "cpu",
                )
                engine.configure_compute(compute)
                started_at = time.perf_counter()
                engine.rows(x, on_device=True)
                row["seconds of compiling"] = time.perf_counter() - started_at
                per_s = _rate(settings, lambda e=engine, x=x: e.rows(x, on_device=True))
                row["compiled" if is_compiled else "eager"] = job.batch_size * per_s
        rows.append(row)
    return {"rows": rows}


def profile(settings: Settings) -> Mapping[str, Any]:
    """Kernels of a pass, and the share of the time in which the device is idle."""
    rows = []
    for job in DRY_JOBS[:1] if settings.dry_run else (JOBS[0], JOBS[2], JOBS[3]):
        with _engine(settings, job) as engine:
            engine.configure_compute(
                Compute(
                    "bf16", False, True, job.batch_size, fold_batchnorm=settings.device == "cpu"
                )
            )
            x = _images(settings, job, job.batch_size)
            for _ in range(2):
                engine.rows(x, on_device=True)
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if settings.device != "cpu":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
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


def _of_engine_and_loop(settings: Settings, job: Job, precision: str) -> dict[str, list[float]]:
    """Images/s of the engine, and of the bare module in half precision or under autocast.

    Three rounds each, in turns.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    x = _images(settings, job, job.batch_size)
    rates: dict[str, list[float]] = {"featx": [], "bare loop": [], "loop under autocast": []}
    with _engine(settings, job) as engine:
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

        engine.configure_compute(
            Compute(precision, False, True, job.batch_size, fold_batchnorm=settings.device == "cpu")
        )
        for _ in range(1 if settings.dry_run else 3):
            each = _rate(settings, lambda: engine.rows(x, on_device=True))
            rates["featx"].append(job.batch_size * each)
            rates["bare loop"].append(job.batch_size * _rate(settings, bare))
            each = _rate(settings, under_autocast)
            rates["loop under autocast"].append(job.batch_size * each)
    return rates


def _with_two_streams(engine: Engine, x: torch.Tensor) -> float:
    """Images/s of two replicas in threads of their own."""
    from concurrent.futures import ThreadPoolExecutor

    ends_at = time.perf_counter() + SECONDS

    def compute(replica: Engine) -> int:
        count = 0
        with replica.own_stream():
            while time.perf_counter() < ends_at:
                replica.rows(x, on_device=True)
                count += len(x)
        return count

    started_at = time.perf_counter()
    with engine.replicas(2) as replicas, ThreadPoolExecutor(2) as pool:
        count = sum(pool.map(compute, replicas))
    return count / (time.perf_counter() - started_at)


def _built(job: Job) -> Any:
    size = {} if job.size is None else {"input_size": [job.size, job.size]}
    return build_backbone(model_options(name=job.model, weights=None, **size), 0)


def _engine(settings: Settings, job: Job) -> Any:
    """An engine with the capture of a job, as a context manager."""
    import contextlib

    @contextlib.contextmanager
    def opened() -> Any:
        backbone = _built(job)
        with Engine(backbone, torch.device(settings.device), "float16") as engine:
            requests = [(job.layer, make_reduce("none"))]
            traced = engine.trace([job.layer])
            chosen = select(requests, traced, backbone.classifier, backbone.stages).chosen
            engine.attach_captures(chosen)
            yield engine

    return opened()


def _images(settings: Settings, job: Job, count: int) -> torch.Tensor:
    """(B, 3, H, W) random uint8 images on the device."""
    height, width = _built(job).preprocess.crop
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)
    return x.to(settings.device)


def _rate(settings: Settings, call: Callable[[], Any]) -> float:
    """Calls per second, after two that warm up."""
    for _ in range(2):
        call()
    _wait(settings)
    seconds = 0.05 if settings.dry_run else SECONDS
    started_at, count = time.perf_counter(), 0
    while True:
        for _ in range(1 if settings.dry_run else 4):
            call()
            count += 1
        _wait(settings)
        took = time.perf_counter() - started_at
        if took >= seconds:
            return count / took if took else math.inf


def _wait(settings: Settings) -> None:
    if settings.device != "cpu":
        torch.cuda.synchronize()


STEPS = (
    Step("roofline", 60, roofline),
    Step("models", 300, models),
    Step("batch-sizes", 90, batch_sizes),
    Step("profile", 50, profile),
    Step("other-settings", 60, other_settings),
    Step("compiled", 120, compiled),
)
