"""Command `correctness`: values, resumes and failures on the GPU, compared with the CPU."""

from __future__ import annotations

import csv
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

import featx as featx_module
from acceptance.photographs import large_folder, odd_folder
from acceptance.steps import REPOSITORY, Settings, Step, featx

MODELS = ("resnet50", "vit_b_16", "efficientnet_b0", "convnext_tiny")
HALF_MODELS = MODELS[:2]
"""Models of half-precisions, which starts three commands for each."""

DRY_MODELS = ("test_resnet",)

IMAGES = 512
"""Number of images of the stores that are compared."""


def _models(settings: Settings) -> tuple[str, ...]:
    return DRY_MODELS if settings.dry_run else MODELS


def _store(settings: Settings, name: str) -> Path:
    """An output folder that does not exist."""
    folder = settings.work / "stores" / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _extract(settings: Settings, name: str, model: str, *options: str) -> Path:
    """Extract the embedding of some photos into a new store."""
    out = _store(settings, name)
    photos = large_folder(settings, IMAGES)
    keys = (f"model={model}", "model.weights=null", f"data={photos}", f"out={out}")
    featx(settings, *keys, *options)
    return out


def digests(store: Path) -> dict[str, str]:
    """SHA-256 of the features, keys and statuses of a packed store."""
    with h5py.File(store / "features.h5", "r") as file:
        names = [f"features/{name}" for name in file["features"]] + ["key", "status"]
        return {name: hashlib.sha256(file[name][:].tobytes()).hexdigest() for name in names}


def smallest_cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Smallest cosine between a row of `a` and the same row of `b`, both (n, D).

    Rows of random weights may be zero: two such rows are equal and count as 1, one as 0.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    product = norms[0] * norms[1]
    cosines = (a * b).sum(1) / np.where(product == 0, 1, product)
    return float(np.where((norms[0] == 0) & (norms[1] == 0), 1, cosines).min())


def gpu_tests(settings: Settings) -> Mapping[str, Any]:
    """The tests that are marked gpu; a dry run only collects them."""
    collect = ["--collect-only"] if settings.dry_run else ["-rs"]
    done = subprocess.run(
        # Warnings are errors, and pytest-benchmark, where it is installed, has some of its own.
        [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-o", "addopts=--strict-markers",
         "-m", "gpu", "-q", *collect, "tests"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
    (settings.out / "pytest-gpu.log").write_text(done.stdout[-200_000:] + done.stderr[-20_000:])
    passed = re.findall(r"(\d+)(?:/\d+)? (?:passed|tests collected)", last)
    is_right = done.returncode == 0 and passed and int(passed[0]) > 0
    return {"rows": [{"pytest -m gpu": last}], "wrong": [] if is_right else [last]}


def against_the_cpu(settings: Settings) -> Mapping[str, Any]:
    """fp32 on the device against fp32 on the CPU: largest difference over largest value."""
    rows, wrong = [], []
    for model in _models(settings):
        options = ("precision=fp32", "dtype=float32", "data.limit=64")
        on_device = _extract(settings, f"device-{model}", model, *options)
        on_cpu = _extract(settings, f"cpu-{model}", model, *options, "device=cpu")
        a, b = (featx_module.open(str(path))["embedding"][:] for path in (on_device, on_cpu))
        error = float(np.abs(a - b).max() / np.abs(b).max())
        rows.append({"model": model, "relative difference": error})
        if not error < 1e-4:
            wrong.append(f"{model} differs by {error:.2e} from the CPU in fp32")
    return {"rows": rows, "wrong": wrong}


def half_precisions(settings: Settings) -> Mapping[str, Any]:
    """fp16 and bf16 against fp32 on the device: smallest cosine of a row."""
    rows, wrong = [], []
    for model in DRY_MODELS if settings.dry_run else HALF_MODELS:
        stores = {
            precision: _extract(
                settings, f"{precision}-{model}", model, f"precision={precision}", "data.limit=64"
            )
            for precision in ("fp32", *(() if settings.dry_run else ("fp16",)), "bf16")
        }
        exact = featx_module.open(str(stores["fp32"]))["embedding"][:]
        for precision, store in list(stores.items())[1:]:
            found = featx_module.open(str(store))["embedding"][:]
            cosine = smallest_cosine(found, exact)
            rows.append({"model": model, "precision": precision, "smallest cosine": cosine})
            if not cosine > 0.99:
                wrong.append(f"{model} in {precision} has a cosine of {cosine:.5f} to fp32")
    goals = {f"{row['model']} {row['precision']} has cosines of at least 0.999":
             row["smallest cosine"] >= 0.999 for row in rows}  # fmt: skip
    return {"rows": rows, "wrong": wrong, "goals": goals}


def equal_bytes(settings: Settings) -> Mapping[str, Any]:
    """The same store alone, beside a process that uses the device, and by two processes."""
    model, rows = _models(settings)[0], []
    options = ("precision=bf16", "batch_size=32", "part_rows=32")
    expected = digests(_extract(settings, "alone", model, *options))
    rows.append({"how": "alone", "equal": True})
    busy = subprocess.Popen(
        [sys.executable, "-c", _BUSY, settings.device], stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(2 if settings.dry_run else 8)
        beside = digests(_extract(settings, "beside", model, *options))
    finally:
        busy.kill()
        busy.wait()
    rows.append({"how": "another process uses the device", "equal": beside == expected})
    two = digests(_extract(settings, "two", model, *options, "executor.workers=2"))
    # On a CPU each of two processes has half of the threads, and so other last bits.
    is_same = two == expected or settings.dry_run
    rows.append({"how": "two processes", "equal": two == expected})
    again = digests(_extract(settings, "again", model, *options))
    rows.append({"how": "alone again", "equal": again == expected})
    wrong = [f"other bytes: {row['how']}" for row in rows[1:] if not row["equal"]]
    return {"rows": rows, "wrong": [text for text in wrong if "two" not in text or not is_same]}


_BUSY = """
import sys, torch
x = torch.randn(4096 if "cuda" in sys.argv[1] else 256, 2048, device=sys.argv[1])
while True:
    x = torch.tanh(x @ torch.randn(2048, 2048, device=sys.argv[1]))
"""


def kills_and_resumes(settings: Settings) -> Mapping[str, Any]:
    """SIGKILL in the middle, and the same command again: equal bytes."""
    model, rows, wrong = _models(settings)[0], [], []
    photos = large_folder(settings, IMAGES)
    for decode in ("fast", "reference"):
        options = (
            f"decode={decode}",
            "precision=bf16",
            "batch_size=8",
            "part_rows=8",
        )
        expected = _extract(settings, f"whole-{decode}", model, *options)
        for share in (0.3, 0.6):
            out = _store(settings, f"killed-{decode}-{share}")
            keys = (f"model={model}", "model.weights=null", f"data={photos}", f"out={out}")
            total = len(featx_module.open(str(expected))) // 8
            process = subprocess.Popen(
                [sys.executable, "-m", "featx", f"device={settings.device}", *keys, *options,
                 "pack=false"],
                cwd=settings.work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while len(list((out / "parts").glob("part-*.h5"))) < share * total:
                if process.poll() is not None:
                    break
                time.sleep(0.01)
            done_before = process.poll() is not None
            process.send_signal(signal.SIGKILL)
            process.wait()
            left = len(list((out / "parts").glob("part-*.h5")))
            featx(settings, *keys, *options)
            is_same = digests(out) == digests(expected)
            rows.append({"decode": decode, "killed after": f"{left} of {total} parts",
                         "equal": is_same, "ended before": done_before})  # fmt: skip
            if not is_same:
                wrong.append(f"other bytes after a kill at {share}, decode={decode}")
    return {"rows": rows, "wrong": wrong}


def odd_files(settings: Settings) -> Mapping[str, Any]:
    """decode=fast and decode=reference: the same failures, and cosines of the rest."""
    photos, stores = odd_folder(settings), {}
    for decode in ("fast", "reference"):
        out = _store(settings, f"odd-{decode}")
        featx(settings, f"model={_models(settings)[0]}", "model.weights=null", f"data={photos}",
              f"out={out}", f"decode={decode}", "precision=fp32", "max_failures=1.0")  # fmt: skip
        stores[decode] = out
    fast, other = (featx_module.open(str(path)) for path in stores.values())
    failed = []
    for path in stores.values():
        with (path / "failures.csv").open(newline="") as file:
            failed.append({(line["key"], line["status"]) for line in csv.DictReader(file)})
    ok = fast.ok & other.ok
    cosine = smallest_cosine(*(store["embedding"][:][ok] for store in (fast, other)))
    same = failed[0] == failed[1]
    wrong = [] if same else [f"other rows fail: {failed[0] ^ failed[1]}"]
    row = {"files": len(fast), "failed": len(failed[0]), "the same fail": same,
           "smallest cosine": cosine}  # fmt: skip
    goals = {"odd files have a cosine of at least 0.999 between the decoders": cosine >= 0.999}
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
    module = settings.work / "reads_tf32.py"
    module.write_text(_READS_TF32)
    out, photos = _store(settings, "reads-tf32"), large_folder(settings, IMAGES)
    done = subprocess.run(
        [sys.executable, "-m", "featx", f"device={settings.device}", "model=custom",
         "model.factory=reads_tf32:build", "model.weights=null", f"data={photos}",
         "data.limit=32", "layers=[conv]", "reduce=avg", f"out={out}"],
        cwd=settings.work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wrong = [] if done.returncode == 0 else [done.stderr.strip()[-400:]]
    return {"rows": [{"reads torch.backends.cudnn.allow_tf32": not wrong}], "wrong": wrong}


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

STEPS = (
    Step("gpu-tests", 200, gpu_tests),
    Step("against-the-cpu", 150, against_the_cpu),
    Step("half-precisions", 150, half_precisions),
    Step("equal-bytes", 120, equal_bytes),
    Step("kills-and-resumes", 150, kills_and_resumes),
    Step("odd-files", 60, odd_files),
    Step("low-memory", 60, low_memory),
    Step("reads-tf32", 40, reads_tf32),
)
