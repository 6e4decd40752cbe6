"""Command `end-to-end`: JPEG files to a store, decoding alone, and what auto chooses."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from acceptance.photographs import large_folder
from acceptance.steps import Settings, Step, featx

if TYPE_CHECKING:
    import torch

    from featx.images import DecodeSettings
    from featx.types import Listing, Source

NAMES = 90_000
"""Names of JPEG files in the folder of the runs."""

JOBS = {
    "ResNet-50 avgpool": (90_000, ("model=resnet50", "layers=[avgpool]")),
    "ViT-B/16": (90_000, ("model=vit_b_16",)),
    "EfficientNet-B0": (60_000, ("model=efficientnet_b0",)),
    "DINOv2-B/14 at 518": (10_000, ("model=vit_base_patch14_dinov2", "model.input_size=[518,518]")),
    "CLIP ViT-L/14": (24_000, ("model=vit_large_patch14_clip_224",)),
    "ResNet-50 layer4 maps": (15_000, ("model=resnet50", "layers=[layer4]")),
}
"""Name -> number of rows, and options."""

DRY_JOBS = {
    "test_resnet": (64, ("model=test_resnet",)),
    "test_vit": (64, ("model=test_vit",)),
}

GOALS = {
    ("ResNet-50 avgpool", "one process"): 6_000,
    ("ResNet-50 avgpool", "two processes"): 10_000,
}
"""Job and number of processes -> images/s on one H100 with 16 cores."""


def decoding(settings: Settings) -> Mapping[str, Any]:
    """Images/s of reading, decoding and resizing alone."""
    import torch
    from benchmarks import loader_overhead

    from featx.base import keep_freed_memory, num_cpus
    from featx.config import DataConfig, from_composed, from_keywords
    from featx.images import DecodeSettings
    from featx.models import build_backbone
    from featx.sources import open_source

    keep_freed_memory()  # as the command does, before any thread has memory of its own
    folder = large_folder(settings, NAMES)
    config = from_composed(from_keywords(
        {"model": {"name": "resnet18", "weights": None}, "data": str(folder), "out": "unused"}
    ))  # fmt: skip
    assert isinstance(config.data, DataConfig)
    source = open_source(config.data)
    listing = source.listing().head(64 if settings.dry_run else 12_000)
    preprocess = build_backbone(config.model, 0).preprocess
    decode = DecodeSettings.of_run(config, preprocess, listing)
    device = torch.device(settings.device)
    cpus = num_cpus()

    num_empty = 512 if settings.dry_run else 100_000
    empty = loader_overhead.measure(loader_overhead.NoFiles(num_empty), num_empty, 256, True)
    rows = [
        {"decoded by": "nothing", "images/s": empty.images_per_second},
        {"decoded by": f"{cpus} processes", "images/s": _rate(source, listing, decode, device)},
    ]
    rows[-1]["images/s and core"] = rows[-1]["images/s"] / cpus
    return {
        "rows": rows,
        "goals": {
            "one process delivers 15,000 images/s": empty.images_per_second >= 15_000,
        },
    }


def _rate(source: Source, listing: Listing, decode: DecodeSettings, device: torch.device) -> float:
    """Images/s of a loader whose batches are not used."""
    from featx.images import Loader
    from featx.types import Part

    with Loader(source, listing, decode, device) as loader:
        started_at = time.perf_counter()
        count = sum(batch.count for _, batch in loader.batches([Part(0, 0, len(listing))], 256))
        return count / (time.perf_counter() - started_at)


def runs(settings: Settings) -> Mapping[str, Any]:
    """Every job with one process and with two on one device."""
    rows: list[dict[str, Any]] = []
    goals: dict[str, bool] = {}
    for name, (count, options) in (DRY_JOBS if settings.dry_run else JOBS).items():
        rates: dict[str, float] = {}
        for how, given in _VARIANTS.items():
            try:
                rates[how] = _run(settings, rows, name, how, count, (*options, *given))
            except RuntimeError as error:
                rows.append({"job": name, "how": how, "error": str(error)[-300:]})
        for (job, how), goal in GOALS.items():
            if job == name and how in rates:
                goals[f"{name}, {how}: {goal} images/s"] = rates[how] >= goal
        if {"one process", "two processes"} <= rates.keys():
            text = f"{name}: two processes are not slower than one"
            goals[text] = rates["two processes"] >= 0.95 * rates["one process"]
    return {"rows": rows, "goals": goals}


_VARIANTS = {"one process": (), "two processes": ("executor.workers=2",)}
"""How a job is run -> the options for it."""


def _run(
    settings: Settings,
    rows: list[dict[str, Any]],
    name: str,
    how: str,
    count: int,
    options: tuple[str, ...],
) -> float:
    """Run once, add a row with what its summary says, and return its images/s."""
    out = settings.work / "stores" / "run"
    shutil.rmtree(out, ignore_errors=True)
    photos = large_folder(settings, NAMES)
    started_at = time.perf_counter()
    with _device_use(settings) as use:
        featx(settings, "model.weights=null", f"data={photos}", f"data.limit={count}",
              f"out={out}", "pack=false", "precision=auto", *options)  # fmt: skip
    seconds = time.perf_counter() - started_at
    summary = json.loads((out / "summary.json").read_text())
    manifest = json.loads((out / "featx.json").read_text())
    rate = float(summary["images_per_second"] or 0.0)
    rows.append(
        {
            "job": name,
            "how": how,
            "images/s": rate,
            "precision": manifest["fingerprint"]["precision"],
            "command, s": seconds,
            "bottleneck": summary["bottleneck"] or "",
            "device busy, %": use[-1] if use else "",
            "host, MiB": summary["peak_memory_mib"],
        }
    )
    return rate


@contextlib.contextmanager
def _device_use(settings: Settings) -> Iterator[list[float]]:
    """List that gets the mean use of the device in percent when the block ends, if it is known."""
    found: list[float] = []
    if settings.dry_run or shutil.which("nvidia-smi") is None:
        yield found
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True) as sampler:
        try:
            yield found
        finally:
            sampler.terminate()
            printed, _ = sampler.communicate()
            samples = [float(line) for line in printed.split() if line.strip().isdigit()]
            busy = [sample for sample in samples if sample > 0]  # start and end of the command
            found.append(sum(busy) / len(busy) if busy else 0.0)


def precisions(settings: Settings) -> Mapping[str, Any]:
    """Full runs with each precision: auto has to choose the fastest one."""
    rows: list[dict[str, Any]] = []
    goals = {}
    jobs = DRY_JOBS if settings.dry_run else {
        name: (20_000, JOBS[name][1]) for name in ("ResNet-50 avgpool", "ViT-B/16")
    }  # fmt: skip
    tried = ("fp32", "bf16") if settings.dry_run else ("fp32", "bf16", "fp16")
    for name, (count, options) in jobs.items():
        rates = {}
        for precision in (*tried, "auto"):
            found: list[dict[str, Any]] = []
            given = (*options, f"precision={precision}")
            rates[precision] = _run(settings, found, name, precision, count, given)
            rows += found
        best = max(rates[precision] for precision in tried)
        goals[f"{name}: precision=auto at 0.9 of the fastest"] = rates["auto"] >= 0.9 * best
    return {"rows": rows, "goals": goals}


def dataloader_scripts(settings: Settings) -> Mapping[str, Any]:
    """Images/s of the script that a user of PyTorch writes.

    A DataLoader with a worker for each CPU, Pillow and the transform of torchvision, bf16 autocast,
    channels-last, page-locked memory, batches of 256, and one HDF5 file at the end.
    """
    import os

    import h5py
    import numpy as np
    import torch
    from torchvision import datasets, models, transforms

    size = 8 if settings.dry_run else 256
    device = torch.device(settings.device)
    dataset = datasets.ImageFolder(
        str(large_folder(settings, NAMES)),
        transforms.Compose([
            transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]),
    )  # fmt: skip
    rows = []
    for name, layer in (("resnet50", "avgpool"), ("vit_b_16", "encoder.ln")):
        model = models.get_model(name).eval().to(device, memory_format=torch.channels_last)
        found: list[Any] = []

        def keep(
            module: Any, args: Any, output: torch.Tensor, name: str = name, found: list[Any] = found
        ) -> None:
            row = output.flatten(1) if name == "resnet50" else output[:, 0]
            found.append(row.float().cpu().numpy())

        model.get_submodule(layer).register_forward_hook(keep)
        chosen = torch.utils.data.Subset(dataset, range(min(len(dataset), 15_000)))
        loader = torch.utils.data.DataLoader(
            chosen, size, num_workers=os.cpu_count() or 1, pin_memory=device.type == "cuda"
        )
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
            model(torch.zeros(size, 3, 224, 224, device=device))
            found.clear()
            started_at = time.perf_counter()
            for images, _ in loader:
                x = images.to(device, non_blocking=True, memory_format=torch.channels_last)
                model(x)
            with h5py.File(settings.work / "script.h5", "w") as file:
                file["features"] = np.concatenate(found)
        rate = len(chosen) / (time.perf_counter() - started_at)
        rows.append({"script": name, "images/s": rate})
    return {"rows": rows}


STEPS = (
    Step("decoding", 120, decoding),
    Step("dataloader-scripts", 60, dataloader_scripts),
    Step("runs", 380, runs),
    Step("precisions", 150, precisions),
)
