"""job=layers: all layers and operations that can be captured, in execution order, measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from featx.base import facts, log_message, name_text, print_result
from featx.config import PRESETS, Config, DataConfig, ReduceConfig, layer_requests, names_tuple
from featx.errors import (
    ConfigError,
    DataError,
    LayerError,
    MissingExtraError,
    ModelError,
    WeightsError,
    counted,
)
from featx.jobs.base import JOBS, Input, Job
from featx.models import build_backbone, resolve_library
from featx.pipeline import list_images
from featx.types import Listing, Source

if TYPE_CHECKING:
    import torch

    from featx.engine import Engine
    from featx.layers import CapturePoint, Profile, Trace
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
    from featx.base import choose_device, explained_memory
    from featx.cli import layer_table, title
    from featx.engine import Compute, Engine

    device = choose_device(config.device)
    backbone = _backbone(config)
    image, key = _first_image(config, source, listing, backbone)
    precision = "fp32" if config.precision == "auto" else config.precision
    batch_size = 1 if config.batch_size == "auto" else int(config.batch_size)
    images = image.expand(batch_size, -1, -1, -1)
    show = "all" if config.job.json else config.job.show or "shapes"
    with explained_memory(device), Engine(backbone, device, config.dtype) as engine:
        compute = Compute(precision, False, False, batch_size)
        if show != "watch":
            traced = _trace(engine, config)
            compute = replace(
                compute, channels_last=engine.formats(images, fold_batchnorm=False).channels_last
            )
        engine.configure_compute(compute)
        heading = _heading(config, engine, f"{key} of {_where(config)}{missing}")
        if show == "watch":
            print_result(facts(heading))
            _watch(engine, images)
            return 0
        from featx.layers import profile

        with engine.module_and_input(images) as (module, x):
            profiled = profile(module, x, _MEASURED[show])
    if config.job.json:
        rows = _rows(config, engine, traced, profiled)
        log_message(facts(heading))
        print_result(json.dumps(rows, indent=2))
        return 0
    rows_shown, text = _table_contents(config, engine, traced, profiled, show)
    name = engine.backbone.name
    parts = [
        title(name, traced, engine.backbone.preprocess.shape),
        layer_table(rows_shown, show, device.type == "cuda"),
        facts([*text, *heading[1:]]),
    ]
    print_result("\n\n".join(parts))
    return 0


def _backbone(config: Config) -> Backbone:
    """Build the model; with random weights if its own are not on this machine."""
    try:
        return build_backbone(config.model, config.seed)
    except WeightsError as error:
        # A table of layers needs no weights; a file that the user names is an error.
        if config.model.weights != "default" or config.job.show == "values":
            raise
        log_message(f"{error}\nThe layers are those of the model with random weights.", "warning")
        return build_backbone(replace(config.model, weights=None), config.seed)


def _rows(config: Config, engine: Engine, traced: Trace, profiled: Profile) -> list[dict[str, Any]]:
    """Return the rows of all layers, or of those that `layers` names.

    Unlike a run, the list takes every call of a module that is called several times.
    """
    from featx.cli import matching_names, table_rows

    names = _names(config, engine, traced)
    kinds = [name.partition(":")[2] or "output" for name in names] or names_tuple(config.capture)
    item_bytes = np.dtype(config.dtype).itemsize
    requests = [] if config.layers is None else layer_requests(config)
    has_output = any(name.startswith(("embedding", "output")) for name, _ in requests)
    rows = table_rows(
        traced, item_bytes, tuple(dict.fromkeys(kinds)), profiled, has_output=has_output
    )
    if not names:
        return rows
    matches = set()
    for name in names:
        names_of_request = matching_names(name, [row["name"] for row in rows])
        if not names_of_request:
            # relu@1 is the layer relu if that is called once; others raise an error.
            names_of_request = [_row_name(point) for point in _points(name, engine, traced)]
        matches.update(names_of_request)
    return [row for row in rows if row["name"] in matches]


def _names(config: Config, engine: Engine, traced: Trace) -> list[str]:
    """Return the names and globs of `layers` with the layers of a preset; [] lists all layers."""
    row_names = []
    for name, _ in [] if config.layers is None else layer_requests(config):
        if name.partition(":")[0] in PRESETS:
            for point in _points(name, engine, traced):
                # The embedding is that of another layer, whose row is listed.
                row_names.append(_row_name(point) if point.name == "embedding" else point.name)
        else:
            row_names.append(name)
    return row_names


def _row_name(point: CapturePoint) -> str:
    """Return the name in the table of a tensor; `output` is that of the model."""
    from featx.layers import element_name

    layer = (point.layer or "output") + element_name(point.path)
    return layer if point.capture == "output" else f"{layer}:{point.capture}"


def _points(request: str, engine: Engine, traced: Trace) -> list[CapturePoint]:
    """Return the capture points that a run would take for one entry of `layers`."""
    from featx.layers import select

    backbone = engine.backbone
    requests = [(request, ReduceConfig())]
    chosen = select(requests, traced, backbone.classifier, backbone.stages).chosen
    return [point for point, _ in chosen]


def _table_contents(
    config: Config, engine: Engine, traced: Trace, profiled: Profile, show: str
) -> tuple[list[dict[str, object]], list[tuple[str, str]]]:
    """Return the rows of the table, and remarks about them, each as (name, text)."""
    from featx.cli import last_stage, outline, remarks, table_rows, usage

    rows = _rows(config, engine, traced, profiled)
    lines: list[tuple[str, str]] = []
    stage = None
    if config.layers is None:
        num_all = len(rows)
        modules = outline(traced)
        stage = last_stage(traced, modules)
        item_bytes = np.dtype(config.dtype).itemsize
        rows = table_rows(traced, item_bytes, names_tuple(config.capture), profiled, modules)
        inside = f", 'layers=[{stage}.**]' for what is inside {stage}" if stage else ""
        lines += [
            ("listed", f"{len(rows)} of {num_all} layers and operations"),
            ("more", f"'layers=[**]' for all{inside}"),
        ]
    if show == "shapes":
        lines.append(("columns", "job.show=cost, values, all or watch; job.json=true"))
    lines += remarks(show, traced, profiled)
    if show == "shapes":
        lines.append(("embedding", _embedding_text(engine, traced)))
        lines.append(("use", usage(rows, stage)))
    return rows, [(name, text) for name, text in lines if text]


def _embedding_text(engine: Engine, traced: Trace) -> str:
    """Describe which tensor the default of `layers` is, or return '' if the model has none."""
    try:
        (point,) = _points("embedding", engine, traced)
    except LayerError:
        return ""
    prefix = "" if point.capture == "output" else f"the {point.capture} of "
    return f"{prefix}{point.layer or 'the output of the model'}; the default of layers"


def _images(config: Config) -> tuple[Source, Listing, Config, str]:
    """List the data set, or the sample of featx if the default data set is not installed."""
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

    decoding = DecodeSettings.of_run(config, backbone.preprocess, listing)
    with Loader(source, listing, decoding) as loader:
        for row in range(min(_TRIED_IMAGES, len(listing))):
            images = loader.load([row])
            if len(images):
                return images, name_text(bytes(listing.keys[row]))
    raise DataError(
        f"none of the first {counted(min(_TRIED_IMAGES, len(listing)), 'image')} of "
        f"{_where(config)} can be read, and job=layers needs one. "
        "data=sample takes an image that comes with featx."
    )


def _where(config: Config) -> str:
    return config.data.root or f"data={config.data.name}"


def _heading(config: Config, engine: Engine, image: str) -> list[tuple[str, str]]:
    backbone, compute = engine.backbone, engine.compute
    height, width = backbone.preprocess.crop
    auto = " (precision=auto stays fp32 here)" if config.precision == "auto" else ""
    return [
        ("model", f"{backbone.name}, weights {backbone.weights}"),
        ("image", f"{image}, as {compute.batch_size}x3x{height}x{width}"),
        ("computed", f"{compute.precision}{auto} on {engine.device}, in eval mode"),
    ]


def _trace(engine: Engine, config: Config) -> Trace:
    """Trace one forward pass on noise, and where the embedding is found if it will be shown."""
    try:
        requested_names = (
            [] if config.layers is None else [name for name, _ in layer_requests(config)]
        )
        is_table = not config.job.json and config.job.show in (None, "shapes")
        return engine.trace(["embedding", *requested_names] if is_table else requested_names)
    except Exception as error:
        message = " ".join(str(error).split())
        raise ModelError(
            f"a forward pass of {engine.backbone.name} failed: {type(error).__name__}: {message}. "
            "job.show=watch prints every call up to the one that fails."
        ) from error


def _watch(engine: Engine, images: torch.Tensor) -> None:
    from featx.layers import watch

    print_result(
        "shapes include the batch; ms are of this first pass, and include those of inner layers"
    )
    print_result()
    log = None
    try:
        with engine.module_and_input(images) as (module, x), watch(module, print_result) as log:
            module(x)
    except Exception as error:
        if log is None or not log.failure:
            raise
        raise ModelError(log.failure) from error


def _check(config: Config) -> None:
    """Refuse names of layers with job.show=watch."""
    if config.layers is not None and config.job.show == "watch":
        raise ConfigError("layers has no effect with job.show=watch, which prints every call.")


JOBS.register(
    Job(
        "layers",
        "List the layers that can be captured, with shapes, cost and values.",
        run=run,
        input=Input.IMAGES,
        reads=(
            *("job.json", "model", "data", "layers", "capture"),
            *("precision", "dtype", "batch_size", "device", "decode", "seed"),
        ),
        ignores=("model.golden",),
        why="it lists layers, and stores nothing",
        shows=("shapes", "cost", "values", "all", "watch"),
        check=_check,
    )
)
