"""A model of a few weights, images for it, and the jobs in this process: a run takes 0.1 s."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import featx
from featx import jobs
from featx.config import Config, from_composed, from_keywords, saved_yaml

MODEL = {
    "name": "tiny",
    "library": "custom",
    "factory": "zoo:TwoStageConvNet",
    "weights": None,
    "transform": {"resize": 32, "crop": 32},
}

TRUSTED = {key: MODEL[key] for key in ("name", "library", "factory")}
"""The code of the model, for a job that reads the rest in the store."""

KEYS = {
    "model": MODEL,
    "layers": ["conv"],
    "precision": "fp32",
    "compile": False,
    "batch_size": 4,
    "part_rows": 8,
    "out": "store",
}
"""Small parts, and nothing left to be decided by measurement."""

SIX_PARTS = {**KEYS, "part_rows": 4}
"""The same with a part for each batch, six of 21 images: a run can end between any two of them."""

COMMAND = (
    "model=custom",
    "model.factory=zoo:TwoStageConvNet",
    "model.weights=null",
    "model.transform.resize=32",
    "model.transform.crop=32",
    "layers=[conv]",
    "precision=fp32",
    "compile=false",
    "batch_size=4",
    "part_rows=4",
    "out=store",
)
"""SIX_PARTS for the command; PYTHONPATH has to name this folder."""


def write_image(path: Path, seed: int) -> None:
    """Sixteen squares of strong colours: no two seeds give features that resemble each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_encoded(seed, path.suffix))


@functools.cache  # most tests write the same ones
def _encoded(seed: int, suffix: str) -> bytes:
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(squares.repeat(12, 0).repeat(12, 1)).save(
        data, Image.registered_extensions()[suffix.lower()]
    )
    return data.getvalue()


def write_images(root: Path, count: int = 21) -> Path:
    """PNG files in two class folders, every third name free for an image that comes later."""
    for i in range(count):
        write_image(root / ("cat", "dog")[i % 2] / f"{3 * i:03d}.png", i)
    return root


def extract(data: object, **keys: Any) -> featx.FeatureStore:
    """featx.extract with KEYS, where nothing else is given."""
    return featx.extract(**{**KEYS, "data": data, **keys})


def extract_six_parts(data: object, **keys: Any) -> featx.FeatureStore:
    """featx.extract with SIX_PARTS, where nothing else is given."""
    return extract(data, **{**SIX_PARTS, **keys})


def extract_in_steps(photos: Path, **keys: Any) -> None:
    """A store that grew: ten rows, one more layer of them, and then the other rows of both."""
    limited = {"name": "folder", "root": str(photos), "limit": 10}
    extract_six_parts(limited, **keys)
    extract_six_parts(limited, layers=["pool"], **keys)
    extract_six_parts(photos, layers=["conv", "pool"], grow=True, **keys)


def run_job(job: str, *, json: bool = False, show: str | None = None, **keys: Any) -> int:
    """The exit code of a job as the command runs it; its errors come through."""
    if job == "verify":
        # Code is imported only where the command names it.
        keys = {"model": TRUSTED, **keys}
    node = job_options(job, json=json, show=show, **keys)
    config = from_composed(node)
    jobs.check(config)
    return jobs.run(config, saved_yaml(node))


def job_output(job: str, **keys: Any) -> tuple[int, Any]:
    """The exit code of a job, and what it prints with job.json=true, which is all of its stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_job(job, json=True, **keys)
    return code, json.loads(printed.getvalue())


def job_result(job: str, **keys: Any) -> Any:
    """What a job that succeeds prints with job.json=true."""
    code, found = job_output(job, **keys)
    assert code == 0
    return found


def job_options(
    job: str, *, json: bool = False, show: str | None = None, **keys: Any
) -> dict[str, Any]:
    """The config of a job as the command composes it."""
    node = from_keywords(keys)
    node["job"].update(name=job, json=json, show=show)
    return node


def job_config(job: str, **keys: Any) -> Config:
    """The checked config of a job."""
    config = from_composed(job_options(job, **keys))
    jobs.check(config)
    return config
