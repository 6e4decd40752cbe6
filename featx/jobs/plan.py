"""job=plan: what extract would do and what it would take; writes nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from featx.analysis.engine_specs import FEATURES
from featx.base.console import print_result
from featx.base.machine import num_cpus
from featx.base.text import facts, size_text, time_text
from featx.config.run_config import Config
from featx.pipeline.run_context import RunContext, build_run_context
from featx.pipeline.run_summary import describe_run
from featx.storage.local_folder import AtomicFolder
from featx.storage.s3_path import is_url, parse_path
from featx.store.leftovers import leftover_bytes
from featx.store.pack import packed_size_bound
from featx.types import Part

_PROBE_BATCHES = 2


def run(config: Config, config_yaml: str) -> int:
    """Print rows, shapes, bytes, disk, memory and time; returns the exit code."""
    with build_run_context(config, config_yaml, FEATURES) as context:
        plan = _plan(config, context)
        if config.job.json:
            print_result(json.dumps(plan, indent=2))
        else:
            print_result(facts([*describe_run(context), *_lines(plan)]))
    return 0


def _plan(config: Config, context: RunContext) -> dict[str, Any]:
    num_rows = len(context.listing)
    seconds_read = _seconds_per_image_read(context)
    stored = context.row_bytes * num_rows
    compute = context.engine.compute
    part = min(context.part_rows, num_rows) * context.row_bytes
    height, width = context.engine.backbone.preprocess.crop
    batch = compute.batch_size * 3 * height * width * 4
    return {
        "rows": num_rows,
        "layers": {
            spec.name: {"shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.row_bytes}
            for spec in context.specs
        },
        **compute.as_dict(),
        "part_rows": context.part_rows,
        "disk_needed": stored,
        "disk_needed_while_packing": packed_size_bound(2 * stored),
        "disk_free": None if is_url(config.out) else _free_bytes(parse_path(config.out)),
        "memory": context.engine.weight_bytes + 3 * part + 6 * batch,
        "images_per_second_model": 1 / context.trial.model_s,
        "images_per_second_read": 1 / seconds_read if seconds_read else None,
        "seconds": num_rows * max(context.trial.model_s, seconds_read or 0.0),
    }


def _free_bytes(root: Path) -> int:
    """Room for a store, with what the run frees when it deletes the leftovers of a killed one."""
    return AtomicFolder(root).free_bytes() + leftover_bytes(root)


def _seconds_per_image_read(context: RunContext) -> float | None:
    """Reading and decoding alone, with all threads, measured on the first images."""
    size = min(len(context.listing), 8 * num_cpus())
    part = Part(0, 0, min(len(context.listing), size * _PROBE_BATCHES))
    with context.loader(size) as loader:
        begun = time.perf_counter()
        count = sum(batch.count for _, batch in loader.batches([part]))
        return (time.perf_counter() - begun) / count


def _disk_line(plan: dict[str, Any]) -> str:
    needed = f"{size_text(plan['disk_needed'])} for the features"
    if plan["disk_free"] is None:
        return f"{needed}, in an object store"
    enough = plan["disk_free"] > plan["disk_needed_while_packing"]
    advice = "" if enough else "\nNOT ENOUGH: choose another out=DIR, a reduction, or pack=false"
    return (
        f"{needed}, {size_text(plan['disk_needed_while_packing'])} while packing, "
        f"{size_text(plan['disk_free'])} free{advice}"
    )


def _lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    model, read = plan["images_per_second_model"], plan["images_per_second_read"]
    return [
        ("rows", str(plan["rows"])),
        ("disk", _disk_line(plan)),
        ("memory", f"about {size_text(plan['memory'])} besides torch itself"),
        ("speed", f"model {model:.1f} images/s, reading {read:.1f} images/s"),
        ("time", f"about {time_text(plan['seconds'])} after the start"),
    ]
