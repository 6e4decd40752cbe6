"""Command `correctness`: values, resumes and failures on the GPU, compared with the CPU."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from benchmarks.measuring import smallest_cosine

import featx as featx_module
from acceptance.photographs import large_folder, odd_folder
from acceptance.steps import Settings, featx

MODELS = ("resnet50", "vit_b_16", "efficientnet_b0", "convnext_tiny")
DRY_MODELS = ("test_resnet",)

IMAGES = 512
"""Number of images of the stores that are compared."""


def _models(settings: Settings) -> tuple[str, ...]:
    return DRY_MODELS if settings.dry_run else MODELS


def _options(settings: Settings, name: str, model: str, *options: str) -> tuple[Path, list[str]]:
    """An output folder that does not exist, and the options of a run of some photos into it."""
    out = settings.work / "stores" / name
    shutil.rmtree(out, ignore_errors=True)
    photos = large_folder(settings, IMAGES)
    return out, [f"model={model}", "model.weights=null", f"data={photos}", f"out={out}", *options]


def _extract(settings: Settings, name: str, model: str, *options: str) -> Path:
    """Extract the embedding of some photos into a new store."""
    out, given = _options(settings, name, model, *options)
    featx(settings, *given)
    return out


def _embedding(store: Path) -> Any:
    return featx_module.open(store)["embedding"][:]


def contents(store: Path) -> dict[str, bytes]:
    """Bytes of the features, keys and statuses of a packed store."""
    with h5py.File(store / "features.h5", "r") as file:
        names = [f"features/{name}" for name in file["features"]] + ["key", "status"]
        return {name: file[name][:].tobytes() for name in names}


def against_the_cpu(settings: Settings) -> Mapping[str, Any]:
    """fp32 on the device against fp32 on the CPU: largest difference over largest value."""
    rows, wrong = [], []
    for model in _models(settings):
        options = ("precision=fp32", "dtype=float32", "data.limit=64")
        a = _embedding(_extract(settings, f"device-{model}", model, *options))
        b = _embedding(_extract(settings, f"cpu-{model}", model, *options, "device=cpu"))
        error = float(np.abs(a - b).max() / np.abs(b).max())
        rows.append({"model": model, "relative difference": error})
        if not error < 1e-4:
            wrong.append(f"{model} differs by {error:.2e} from the CPU in fp32")
    return {"rows": rows, "wrong": wrong}


def half_precisions(settings: Settings) -> Mapping[str, Any]:
    """fp16 and bf16 against fp32 on the device: smallest cosine of a row."""
    rows, wrong, goals = [], [], {}
    for model in _models(settings)[:2]:
        found = {}
        for precision in ("fp32", "bf16", *(() if settings.dry_run else ("fp16",))):
            options = (f"precision={precision}", "data.limit=64")
            store = _extract(settings, f"{precision}-{model}", model, *options)
            found[precision] = _embedding(store)
        exact = found.pop("fp32")
        for precision, values in found.items():
            cosine = smallest_cosine(values, exact)
            rows.append({"model": model, "precision": precision, "smallest cosine": cosine})
            goals[f"{model} {precision} has cosines of at least 0.999"] = cosine >= 0.999
            if not cosine > 0.99:
                wrong.append(f"{model} in {precision} has a cosine of {cosine:.5f} to fp32")
    return {"rows": rows, "wrong": wrong, "goals": goals}


def equal_bytes(settings: Settings) -> Mapping[str, Any]:
    """The same store alone, beside a process that uses the device, and by two processes."""

    def extracted(name: str, *more: str) -> dict[str, bytes]:
        options = ("precision=bf16", "batch_size=32", "part_rows=32", *more)
        return contents(_extract(settings, name, _models(settings)[0], *options))

    expected = extracted("alone")
    busy = subprocess.Popen(
        [sys.executable, "-c", _BUSY, settings.device], stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(2 if settings.dry_run else 8)
        found = {"another process uses the device": extracted("beside")}
    finally:
        busy.kill()
        busy.wait()
    if not settings.dry_run:  # on a CPU each of two has half of the threads, so other last bits
        found["two processes"] = extracted("two", "executor.workers=2")
    found["alone again"] = extracted("again")
    rows = [{"how": how, "equal": values == expected} for how, values in found.items()]
    return {"rows": rows, "wrong": [f"other bytes: {r['how']}" for r in rows if not r["equal"]]}


_BUSY = """
import sys, torch
x = torch.randn(4096 if "cuda" in sys.argv[1] else 256, 2048, device=sys.argv[1])
while True:
    x = torch.tanh(x @ torch.randn(2048, 2048, device=sys.argv[1]))
"""


def kills_and_resumes(settings: Settings) -> Mapping[str, Any]:
    """SIGKILL in the middle, and the same command again: equal bytes."""
    model, rows, wrong = _models(settings)[0], [], []
    for decode in ("fast", "reference"):
        options = (f"decode={decode}", "precision=bf16", "batch_size=8", "part_rows=8")
        expected = _extract(settings, f"whole-{decode}", model, *options)
        total = len(featx_module.open(expected)) // 8
        for share in (0.3, 0.6):
            out, given = _options(settings, f"killed-{decode}-{share}", model, *options)
            process = subprocess.Popen(
                [sys.executable, "-m", "featx", f"device={settings.device}", *given, "pack=false"],
                cwd=settings.work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while len(list((out / "parts").glob("part-*.h5"))) < share * total:
                if process.poll() is not None:
                    break
                time.sleep(0.01)
            process.kill()
            process.wait()
            left = len(list((out / "parts").glob("part-*.h5")))
            featx(settings, *given)
            is_same = contents(out) == contents(expected)
            killed_after = f"{left} of {total} parts"
            rows.append({"decode": decode, "killed after": killed_after, "equal": is_same})
            if not is_same:
                wrong.append(f"other bytes after a kill at {share}, decode={decode}")
    return {"rows": rows, "wrong": wrong}


def odd_files(settings: Settings) -> Mapping[str, Any]:
    """decode=fast and decode=reference: the same failures, and cosines of the rest."""
    photos, stores, failed = odd_folder(settings), [], []
    for decode in ("fast", "reference"):
        store = _extract(
            settings, f"odd-{decode}", _models(settings)[0], f"data={photos}",
            f"decode={decode}", "precision=fp32", "max_failures=1.0",
        )  # fmt: skip
        stores.append(featx_module.open(store))
        with (store / "failures.csv").open(newline="") as file:
            failed.append({(line["key"], line["status"]) for line in csv.DictReader(file)})
    ok = stores[0].ok & stores[1].ok
    cosine = smallest_cosine(*(store["embedding"][:][ok] for store in stores))
    differ = failed[0] ^ failed[1]
    row = {"files": len(ok), "failed": len(failed[0]), "smallest cosine": cosine}
    goals = {"odd files have a cosine of at least 0.999 between the decoders": cosine >= 0.999}
    wrong = [f"other rows fail: {differ}"] if differ else []
    return {"rows": [row], "wrong": wrong, "goals": goals}


def low_memory(settings: Settings) -> Mapping[str, Any]:
    """A device with 4 GiB free: the batch is halved until it fits, and the run ends well."""
    if settings.dry_run:
        return {"rows": [{"free": "not tried on a CPU"}]}
    import torch

    free = torch.cuda.mem_get_info()[0]
    kept = torch.empty(max(0, free - 4 * 2**30), dtype=torch.uint8, device=settings.device)
    out = _extract(settings, "low-memory", "vit_b_16", "precision=fp32", "data.limit=256")
    manifest = (out / "featx.json").read_text()
    size = int(re.findall(r'"batch_size": ?(\d+)', manifest)[0])
    del kept
    return {"rows": [{"free": "4 GiB", "batch_size": size}], "wrong": []}


def reads_tf32(settings: Settings) -> Mapping[str, Any]:
    """A model whose forward pass reads the settings that featx changes on CUDA."""
    (settings.work / "reads_tf32.py").write_text(_READS_TF32)
    _extract(
        settings, "reads-tf32", "custom", "model.factory=reads_tf32:build", "data.limit=32",
        "layers=[conv]", "reduce=avg",
    )  # fmt: skip
    return {"rows": [{"reads torch.backends.cudnn.allow_tf32": True}]}


_READS_TF32 = """
import torch
from torch import nn


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        assert torch.backends.cudnn.allow_tf32 in (True, False)
        with torch.backends.cudnn.flags(enabled=True):
            return self.conv(x.to(self.conv.weight.dtype))


def build():
    torch.manual_seed(0)
    return Reads()
"""

STEPS = {
    against_the_cpu: 150,
    half_precisions: 150,
    equal_bytes: 120,
    kills_and_resumes: 150,
    odd_files: 60,
    low_memory: 60,
    reads_tf32: 40,
}
"""Step -> seconds after which it is killed."""
