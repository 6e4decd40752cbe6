"""Command `end-to-end`: JPEG files to a store, decoding alone, and what auto chooses."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import torch
from benchmarks.images import NoFiles, measure_loader
from torchvision import datasets, models, transforms

from acceptance.photographs import large_folder
from acceptance.steps import DRY_IMAGES, Settings, featx
from featx.base import keep_freed_memory, num_cpus
from featx.sources import FolderSource

NAMES = 90_000
"""Names of JPEG files in the folder of the runs."""

JOBS = {
    "ResNet-50 avgpool": (90_000, ("model=resnet50", "layers=[avgpool]")),
    "ViT-B/16": (90_000, ("model=vit_b_16",)),
    "DINOv2-B/14 at 518": (10_000, ("model=vit_base_patch14_dinov2", "model.input_size=[518,518]")),
    "CLIP ViT-L/14": (24_000, ("model=vit_large_patch14_clip_224",)),
    "ResNet-50 layer4 maps": (15_000, ("model=resnet50", "layers=[layer4]")),
}
"""Name -> number of rows, and options."""

DRY_JOBS = {name: (DRY_IMAGES, (f"model={name}",)) for name in ("test_resnet", "test_vit")}


def decoding(settings: Settings) -> Mapping[str, Any]:
    """Images/s of reading, decoding and resizing alone."""
    keep_freed_memory()  # as the command does, before any thread has memory of its own
    num_empty, num_photos = (512, DRY_IMAGES) if settings.dry_run else (100_000, 12_000)
    photos = FolderSource(large_folder(settings, NAMES))
    empty = measure_loader(NoFiles(num_empty), num_empty, 256, True)["images_per_second"]
    device = torch.device(settings.device)
    real = measure_loader(photos, num_photos, 256, False, device)["images_per_second"]
    return {
        "rows": [
            {"decoded by": "nothing", "images/s": empty},
            {
                "decoded by": f"{num_cpus()} processes",
                "images/s": real,
                "images/s and core": real / num_cpus(),
            },
        ],
        "goals": {"one process delivers 15,000 images/s": empty >= 15_000},
    }


def runs(settings: Settings) -> Mapping[str, Any]:
    """Every job with one process and with two on one device."""
    rows: list[dict[str, Any]] = []
    for name, (count, options) in (DRY_JOBS if settings.dry_run else JOBS).items():
        for how, given in (("one process", ()), ("two processes", ("executor.workers=2",))):
            try:
                _run(settings, rows, name, how, count, (*options, *given))
            except RuntimeError as error:
                rows.append({"job": name, "how": how, "error": str(error)[-300:]})
    return {"rows": rows}


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
            "host, MiB": summary["peak_memory_mib"],
        }
    )
    return rate


def precisions(settings: Settings) -> Mapping[str, Any]:
    """Full runs with each precision: auto has to choose the fastest one."""
    rows: list[dict[str, Any]] = []
    goals = {}
    jobs = DRY_JOBS if settings.dry_run else JOBS
    tried = ("fp32", "bf16") if settings.dry_run else ("fp32", "bf16", "fp16")
    for name, (count, options) in list(jobs.items())[:2]:
        rates = {
            precision: _run(settings, rows, name, precision, min(count, 20_000),
                            (*options, f"precision={precision}"))
            for precision in (*tried, "auto")
        }  # fmt: skip
        best = max(rates[precision] for precision in tried)
        goals[f"{name}: precision=auto at 0.9 of the fastest"] = rates["auto"] >= 0.9 * best
    return {"rows": rows, "goals": goals}


def dataloader_scripts(settings: Settings) -> Mapping[str, Any]:
    """Images/s of the script that a user of PyTorch writes.

    A DataLoader with a worker for each CPU, Pillow and the transform of torchvision, bf16 autocast,
    channels-last, page-locked memory, batches of 256, and one HDF5 file at the end.
    """
    size = 8 if settings.dry_run else 256
    device = torch.device(settings.device)
    dataset = datasets.ImageFolder(
        str(large_folder(settings, NAMES)),
        transforms.Compose([
            transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]),
    )  # fmt: skip
    chosen = torch.utils.data.Subset(dataset, range(min(len(dataset), 15_000)))
    rows: list[dict[str, Any]] = []
    found: list[Any] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        """Keep what is left of maps that are pooled, and of tokens the first."""
        row = output.flatten(1) if output.dim() == 4 else output[:, 0]
        found.append(row.float().cpu().numpy())

    for name, layer in (("resnet50", "avgpool"), ("vit_b_16", "encoder.ln")):
        model = models.get_model(name).eval().to(device, memory_format=torch.channels_last)
        model.get_submodule(layer).register_forward_hook(keep)
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


STEPS = {
    decoding: 120,
    dataloader_scripts: 60,
    runs: 380,
    precisions: 150,
}
"""Step -> seconds after which it is killed."""
