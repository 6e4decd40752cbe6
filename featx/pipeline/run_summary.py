"""Descriptions of a run: what the command prints before it and after it."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from featx.base import WIDTH, command_text, facts, shown_path, size_text, table
from featx.config import DataConfig, TransformConfig, UnpreparedModelConfig
from featx.errors import counted
from featx.layers import POOLED
from featx.storage import parse_path
from featx.store import layout
from featx.types import Json, Listing

if TYPE_CHECKING:
    from featx.pipeline.run_context import RunContext

_SHOWN_LAYERS = 20
"""Number of datasets that are listed before a run."""

_INDENT = len("precision  ")
"""Width of the names before a description, where lines of layers begin."""

_DIGITS = 8
"""Number of digits of a checksum that are shown to people."""


def describe_run(context: RunContext, output: str, layers: str = "") -> list[tuple[str, str]]:
    """Describe data, model, layers, device and output of a run, with the reason of each `auto`.

    `output` is path and state of the output; `layers` are lines that describe the layers, or ''
    for the datasets of a store. Return (name, text) of what a reader asks for.
    """
    config = context.config
    layers = layers or layers_text(context)
    rows = [*describe_request(context), ("layers" if "\n" in layers else "layer", layers)]
    if context.left_out:
        rows.append(("left out", "\n".join(context.left_out)))
    # A reduction over positions leaves vectors as they are.
    vectors = context.engine.collector.vector_names
    if vectors and not isinstance(config.layers, Mapping) and config.reduce.name in POOLED:
        listed = ", ".join(sorted(vectors)[:_SHOWN_LAYERS])
        verb = "has" if len(vectors) == 1 else "have"
        effect = f"reduce={config.reduce.name} leaves a vector as it is"
        rows.append(("note", f"{listed} {verb} no positions: {effect}"))
    rows += describe_computation(context)
    rows.append(("output", f"{output}, parts of {counted(context.part_rows, 'row')}"))
    return rows


def describe_request(context: RunContext) -> list[tuple[str, str]]:
    """Describe images and model of a run, and what of their defaults was changed."""
    config, header, backbone = context.config, context.header, context.engine.backbone
    model = f"{header.model}, weights {header.weights}"
    if config.model.weights is not None:
        model += f" (sha256 {header.weights_sha256[:_DIGITS]}...)"
    rows = [
        ("data", data_text(context.config.data, context.listing)),
        ("model", model),
        *backbone.choices.items(),
    ]
    # Only model libraries whose preprocessing can be changed have the option.
    has_transform = getattr(config.model, "transform", None) not in (None, TransformConfig())
    if has_transform or context.windows is not None:
        rows.append(("transform", header.transform))
    elif isinstance(config.model, UnpreparedModelConfig):
        rows.append(
            (
                "transform",
                f"{header.transform}: assumed, because the model brings none; "
                "model.transform.resize, crop, mean and std state another (in Python "
                "model_transform_resize=... and so on)",
            )
        )
    if context.windows is not None:
        rows.append(("windows", context.windows.describe(context.engine.compute.batch_size)))
    if config.decode != "fast":
        rows.append(("decode", config.decode))
    return rows


def describe_computation(context: RunContext) -> list[tuple[str, str]]:
    """Describe device, batches and precision, and what slows the model down."""
    engine, choices, parallelism = context.engine, context.choices, context.parallelism
    compute = engine.compute

    devices = Counter(map(str, context.devices))
    parts = [
        ", ".join(f"{n} x {d}" if n > 1 else d for d, n in devices.items()).replace("cpu", "CPU")
    ]
    # Threads and parallel batches; nothing if a device computes one batch at a time.
    choice = choices.get("threads", choices.get("streams", ""))
    why = f" ({choice.partition(' (')[2]}" if " (" in choice else ""
    if parallelism.threads is not None:
        threads = counted(parallelism.threads, "thread")
        if parallelism.replicas > 1:
            threads = f"{parallelism.replicas} parallel batches with {threads} each"
        parts.append(threads + why)
    elif "streams" in choices:
        parts.append(f"{counted(parallelism.replicas, 'stream')}{why}")
    parts.append(f"batches of {compute.batch_size}")
    parts.append("compiled" if compute.compile else "not compiled")

    precision = choices.get("precision", compute.precision)
    rows = [("device", ", ".join(parts)), ("precision", precision)]
    if engine.captures.follows_data and "fold_batchnorm" in choices:
        rows.append(("fold_batchnorm", choices["fold_batchnorm"]))
    if context.conformance is not None:
        rows.append(("conforms", context.conformance.line))
    # What makes the model slower than it could be, with the reason.
    if doubt := engine.weights.cast.doubt:
        rows.append(("weights", f"cast to {compute.precision} in each pass; cast once, {doubt}"))
    if plain := engine.unfused_modules:
        shown = ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else "")
        rows.append(("attention", f"fused attention is off for this run in {shown} ({len(plain)})"))
    return rows


def data_text(data: DataConfig, listing: Listing) -> str:
    """Describe the data set: its name, number of images and classes, and what is left out."""
    labels = listing.labels
    classes = "no labels"
    if listing.classes:
        used = len(np.unique(labels[labels >= 0]))
        known = counted(len(listing.classes), "class", "classes")
        classes = known if used == len(listing.classes) else f"{used} of {known}"
        if unlabelled := int((labels < 0).sum()):
            classes += f", {unlabelled} without a label"
    if listing.label_note:
        classes += f" ({listing.label_note})"
    where = shown_path(data.root) if data.root else data.name
    text = f"{where}: {counted(len(listing), 'image')}, {classes}"
    if listing.skipped:
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(listing.skipped.items()))
        text += f"\nleft out: {skipped}"
    return text


def layers_text(context: RunContext) -> str:
    """Return one line per dataset with name, shape, dtype, bytes an image, and where the name does
    not say it, capture, layer and reduction.
    """
    cells = []
    for spec in context.specs[:_SHOWN_LAYERS]:
        shape = "x".join(map(str, spec.shape)) or "1 value"
        if len(spec.shape) == 1:
            shape = counted(spec.shape[0], "value")
        of_layer = f" of {spec.layer}" if spec.layer else ""
        origin = f"({spec.capture}{of_layer})"
        if spec.name == spec.layer:
            origin = "" if spec.reduce == "none" else spec.reduce
        size = f"{size_text(spec.row_bytes)} an image"
        cells.append((spec.name, shape, spec.dtype, size, origin))
    text = table((), cells, left=5, width=WIDTH - _INDENT)
    more = len(context.specs) - len(cells)
    return text + (f"\n... and {more} more" if more else "")


def describe_end(summary: Json, out: str, using: Sequence[str] = ()) -> str:
    """Describe a finished run: its output, its bottleneck, and the next command.

    `using` are lines of Python that use `store`, instead of the commands for features.
    """
    shown = shown_path(parse_path(out))
    opening = f"featx.open({json.dumps(shown, ensure_ascii=False)})"

    # Rows, failures, size and speed, and the bottleneck.
    speed = "nothing was left to do"
    if summary["images_per_second"]:
        speed = f"{summary['images_per_second']:.1f} images/s"
    elif num_recomputed := summary.get("rows_recomputed"):
        speed = f"{counted(num_recomputed, 'row')} computed again"
    rows_text, size = counted(summary["rows"], "row"), size_text(summary["bytes"])
    text = f"Done: {rows_text}, {summary['failures']} failed, {size}, {speed}."
    # A run of which most images failed says nothing about what would make it faster.
    if summary["bottleneck"] and 2 * summary["failures"] < summary["rows"]:
        text += f" Limited by {summary['bottleneck']}."
    text = textwrap.fill(text, WIDTH)

    rows = []
    if seconds := summary["start_seconds"]:
        steps = ", ".join(f"{step} {value:.1f}" for step, value in seconds.items())
        rows.append(("start", f"{sum(seconds.values()):.1f} s: {steps}"))
    if counts := summary["decoder_warnings"]:
        ordered = sorted(counts.items(), key=lambda item: -item[1])
        lines = [f"{counted(count, 'image')}: {reason}" for reason, count in ordered]
        rows.append(("warnings", "\n".join(lines)))
    if summary["failures"]:
        rows.append(("failed", shown_path(parse_path(out) / layout.FAILURES_CSV)))
    rows.append(("store", shown))
    if using:
        python = "\n".join(["import featx", f"store = {opening}", *using])
        return f"{text}\n\n{facts(rows)}\n\n{python}"

    # The commands that most people run next, and Python that reads the last layer.
    lines = [command_text("job=report", f"store={shown}")]
    layer = json.dumps(summary["layers"][-1])
    reading = f"[{layer}][:10]"
    if summary["classes"] > 1:
        lines.insert(0, command_text("job=probe", f"store={shown}"))
        reading = f".xy({layer})"
    if len(opening + reading) > WIDTH - len("store  "):
        lines += [f"store = {opening}", f"store{reading}"]
    else:
        lines.append(opening + reading)
    rows.append(("next", "\n".join(lines)))
    return f"{text}\n\n{facts(rows)}"
