"""job=layers: all layers and operations that can be captured, in execution order, measured."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from featx.base import facts, log_message, print_result
from featx.config import Config, DataConfig, captures
from featx.errors import DataError, MissingExtraError, ModelError
from featx.images import CrashList
from featx.jobs.base import JOBS, Input, Job
from featx.layers import Trace
from featx.models import build_backbone, resolve_library
from featx.pipeline import list_images
from featx.types import Listing, Source

if TYPE_CHECKING:
    import torch

    from featx.engine import Engine
    from featx.models import Backbone

_TRIED_IMAGES = 16
"""Number of images that are tried until one can be read."""

_MEASURED = {
    "shapes": ("values",),
    "cost": ("values", "times", "memory"),
    "values": ("values",),
    "all": ("values", "times", "memory"),
}


def run(config: Config, config_yaml: str) -> int:
    """Print a table, JSON, or every call during a forward pass; returns the exit code 0."""
    resolve_library(config.model)
    source, listing, config, missing = _images(config)
    # These import torch, which is not needed to report that the data set cannot be read.
    from featx.base import choose_device
    from featx.cli import WIDTH, layer_rows, layer_table, remarks
    from featx.engine import Compute, Engine

    device = choose_device(config.device)
    backbone = build_backbone(config.model, config.seed)
    image, key = _first_image(config, source, listing, backbone)
    precision = "fp32" if config.precision == "auto" else config.precision
    batch_size = 1 if config.batch_size == "auto" else int(config.batch_size)
    images = image.expand(batch_size, -1, -1, -1)
    show = "all" if config.job.json else config.job.show
    with Engine(backbone, device, config.dtype) as engine:
        compute = Compute(precision, False, False, batch_size)
        if show != "watch":
            traced = _trace(engine)
            compute = replace(
                compute, channels_last=engine.formats(images, fold_batchnorm=False).channels_last
            )
        engine.configure_compute(compute)
        heading = _heading(config, engine, f"{key} of {_where(config)}{missing}")
        if show == "watch":
            print_result(heading)
            _watch(engine, images)
            return 0
        from featx.layers import profile

        with engine.as_computed(images) as (module, x):
            profiled = profile(module, x, _MEASURED[show])
    rows = layer_rows(traced, np.dtype(config.dtype).itemsize, captures(config), profiled)
    if config.job.json:
        log_message(heading)
        print_result(json.dumps(rows, indent=2))
        return 0
    print_result(heading)
    print_result()
    print_result(layer_table(rows, show, device.type == "cuda"))
    print_result()
    for line in remarks(show, traced, profiled):
        print_result(textwrap.fill(line, WIDTH, subsequent_indent="  "))
    return 0


def _images(config: Config) -> tuple[Source, Listing, Config, str]:
    """List the data set, or the sample of featx if the default data set is not installed.

    Returns:
        Source, listing, config with this data set, and a remark for the output.
    """
    try:
        return *list_images(config), config, ""
    except MissingExtraError:
        if config.data != DataConfig():
            raise
        sample = replace(config, data=DataConfig(name="sample"))
        return *list_images(sample), sample, f" (data={config.data.name} is not installed)"


def _first_image(
    config: Config, source: Source, listing: Listing, backbone: Backbone
) -> tuple[torch.Tensor, str]:
    """Return the first readable image, (1, 3, H, W) as the loader gives it, and its key."""
    from featx.images import DecodeSettings, Loader

    decoding = DecodeSettings.of_run(config, backbone.preprocess, listing, CrashList(None))
    with Loader(source, listing, decoding, batch_size=1) as loader:
        loader.decode_crash_list()
        for row in range(min(_TRIED_IMAGES, len(listing))):
            images = loader.load([row])
            if len(images):
                return images, os.fsdecode(bytes(listing.keys[row]))
    raise DataError(
        f"none of the first {min(_TRIED_IMAGES, len(listing))} images of "
        f"{_where(config)} can be read, and job=layers needs one. "
        "data=sample takes an image that comes with featx."
    )


def _where(config: Config) -> str:
    """Return the path of the data set, or its kind."""
    return config.data.root or f"data={config.data.name}"


def _heading(config: Config, engine: Engine, image: str) -> str:
    """Describe model, image and computation."""
    backbone, compute = engine.backbone, engine.compute
    height, width = backbone.preprocess.crop
    auto = " (precision=auto stays fp32 here)" if config.precision == "auto" else ""
    rows = [
        ("model", f"{backbone.name}, weights {backbone.weights}"),
        ("image", f"{image}, as {compute.batch_size}x3x{height}x{width}"),
        ("computed", f"{compute.precision}{auto} on {engine.device}, in eval mode"),
    ]
    return facts(rows)


def _trace(engine: Engine) -> Trace:
    """Trace one forward pass on noise.

    Raises:
        ModelError: the pass failed.
    """
    try:
        return engine.trace()
    except Exception as error:
        message = " ".join(str(error).split())
        raise ModelError(
            f"a forward pass of {engine.backbone.name} failed: {type(error).__name__}: {message}. "
            "job.show=watch prints every call up to the one that fails."
        ) from error


def _watch(engine: Engine, images: torch.Tensor) -> None:
    """Print every call during one forward pass."""
    from featx.layers import log_forward

    print_result(
        "shapes include the batch; ms are of this first pass, and include those of inner layers"
    )
    print_result()
    with engine.as_computed(images) as (module, x):
        log_forward(module, x, print_result)


JOBS.register(
    Job(
        "layers",
        "List the layers that can be captured, with shapes, cost and values.",
        run=run,
        input=Input.IMAGES,
        reads=(
            *("job.json", "job.show", "model", "data", "capture", "precision", "dtype"),
            *("batch_size", "device", "decode", "seed"),
        ),
        why="it lists all layers, and stores nothing",
    )
)
