"""job=plan: rows, disk space, memory and time of an extraction; writes nothing."""

from __future__ import annotations

import math
import time
from dataclasses import asdict

from featx.analysis import FEATURES
from featx.base import Section, shown_path, size_text, time_text
from featx.config import Config
from featx.errors import counted
from featx.jobs.base import JOBS, RUN_OPTIONS, Input, Job, print_summary
from featx.pipeline import (
    FeatureOutput,
    RunContext,
    build_run_context,
    describe_computation,
    describe_request,
    layers_text,
)
from featx.storage import AtomicFolder, is_url, parse_path
from featx.store import LARGEST_PACKED_BYTES, is_streamed, leftover_bytes, packed_size_bound
from featx.types import Json, Part

_TRIAL_BATCHES = 2
"""Number of batches that are read to measure the speed of reading."""


def run(config: Config, config_yaml: str) -> int:
    """Print time, disk space, memory and what they rest on; returns 1 if the run would fail."""
    output = FeatureOutput(config)
    with build_run_context(config, config_yaml, FEATURES, output) as context:
        plan = _plan(config, context, *output.planned(context))
        print_summary(config, plan, *_sections(context, plan))
    return 1 if _obstacle(plan) else 0


def _plan(
    config: Config, context: RunContext, num_left: int, store_bytes: int
) -> dict[str, object]:
    """Return the plan in JSON types; sizes in bytes, times in seconds. The run would compute
    `num_left` rows, and the features of the store would have `store_bytes` then.
    """
    num_rows = len(context.listing)
    seconds_read = _seconds_per_image_read(context)
    needed = context.row_bytes * num_left
    compute = context.engine.compute
    part = min(context.part_rows, num_rows) * context.row_bytes
    # One part is filled while the one before it is built and held as a file.
    held = 0 if is_streamed(parse_path(config.out), config.codec, part) else 3 * part
    height, width = context.engine.backbone.preprocess.crop
    batch = compute.batch_size * 3 * height * width * 4
    maps = 0 if context.windows is None else context.windows.map_bytes
    # Measured on a CPU with layers of 10^6 values: the values of a batch in float32 and in the
    # dtype of the store, their magnitudes, and the batches that wait to be written take ten times
    # the float32 values of a batch.
    outputs = 10 * 4 * context.batch_rows * sum(math.prod(spec.shape) for spec in context.specs)
    memory = (
        context.engine.weights.num_bytes + context.listing_bytes + held + 6 * batch + maps + outputs
    )
    is_small = store_bytes <= LARGEST_PACKED_BYTES
    packs = num_left > 0 and (config.pack is True or (config.pack == "auto" and is_small))
    disk_free = None
    if not is_url(config.out):
        root = parse_path(config.out)
        # The run deletes what earlier ones have left over.
        disk_free = AtomicFolder(root).free_bytes() + leftover_bytes(root)
    return {
        "rows": num_rows,
        "rows_left": num_left,
        "layers": {
            spec.name: {"shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.row_bytes}
            for spec in context.specs
        },
        **asdict(compute),
        "part_rows": context.part_rows,
        "packs": packs and config.pack is True,
        "disk_needed": needed,
        "disk_needed_while_packing": packed_size_bound(needed + packs * store_bytes),
        "disk_free": disk_free,
        "memory": memory,
        "images_per_second_model": 1 / context.model_s,
        "images_per_second_read": 1 / seconds_read if seconds_read else None,
        "seconds": num_left * max(context.model_s, seconds_read or 0.0),
    }


def _seconds_per_image_read(context: RunContext) -> float | None:
    """Measure reading and decoding the first images without the model; None if all of them fail."""
    size = min(len(context.listing), 8 * context.loader.num_decoders)
    part = Part(0, 0, min(len(context.listing), size * _TRIAL_BATCHES))
    num_failed = 0
    started_at = time.perf_counter()
    for _, batch in context.loader.batches([part], size if context.windows is None else 1):
        num_failed += len(batch.failures)
    elapsed_s = time.perf_counter() - started_at
    return None if num_failed == len(part) else elapsed_s / len(part)


def _sections(context: RunContext, plan: Json) -> list[Section]:
    """Describe the plan for people: the answer, what it rests on, and the command that follows."""
    needed, free, peak = (
        None if plan[name] is None else size_text(plan[name])
        for name in ("disk_needed", "disk_free", "disk_needed_while_packing")
    )
    num_left, images = plan["rows_left"], counted(plan["rows"], "image")
    if num_left < plan["rows"]:
        images = f"{num_left} of {images}, the others are in the store"
    answer = f"{images}: about {time_text(plan['seconds'])} after the start, {needed} of features."
    if not _fits(plan):
        keeps = ", or pack=false" if plan["disk_free"] > plan["disk_needed"] else ""
        answer += f"\nNOT ENOUGH disk space: choose another out=DIR, or a reduction{keeps}."
    elif free is not None and plan["disk_free"] <= plan["disk_needed_while_packing"]:
        answer += "\nToo little disk space to pack: the parts are kept."
    disk = f"{needed}, in an object store"
    if free is not None:
        disk = f"{needed}, {peak} at the peak; {free} free"
    model, read = plan["images_per_second_model"], plan["images_per_second_read"]
    if read is None:
        speed = f"model {model:.1f} images/s; no image could be read"
    else:
        limit = "the model" if model <= read else "reading images"
        speed = f"model {model:.1f} images/s, reading {read:.1f} images/s: limited by {limit}"
    rows = [
        *describe_request(context),
        ("layers", layers_text(context)),
        ("left out", "\n".join(context.left_out) or None),
        ("disk", disk),
        ("memory", f"about {size_text(plan['memory'])} besides PyTorch"),
        ("speed", speed),
        *describe_computation(context),
        ("output", f"{shown_path(parse_path(context.config.out))}, nothing was written"),
    ]
    return [answer, rows, _obstacle(plan) or "The same command without job=plan runs it."]


def _obstacle(plan: Json) -> str:
    """Return why the command without job=plan would fail, or ''."""
    if not _fits(plan):
        return "The same command without job=plan would fail: the disk has too little space."
    if plan["images_per_second_read"] is None:
        return "The same command without job=plan would fail: none of the images tried can be read."
    return ""


def _fits(plan: Json) -> bool:
    """Return whether the disk has room for the parts, and for the packed file if that is asked."""
    needed = plan["disk_needed_while_packing" if plan["packs"] else "disk_needed"]
    return plan["disk_free"] is None or bool(plan["disk_free"] > needed)


JOBS.register(
    Job(
        "plan",
        "Show rows, disk space, memory and time of an extraction; writes nothing.",
        run=run,
        input=Input.IMAGES,
        reads=(*RUN_OPTIONS, "job.json", "executor", "tensorboard"),
        makes_store=True,
    )
)
