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
from featx.types import Json, LayerSpec, Listing

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
    layers = layers or layers_text(context)
    left_out = [("left out", "\n".join(context.left_out))] if context.left_out else []
    return [
        *describe_request(context),
        ("layers" if "\n" in layers else "layer", layers),
        *left_out,
        *_unreduced_rows(context),
        *describe_computation(context),
        ("output", f"{output}, parts of {counted(context.part_rows, 'row')}"),
    ]


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
    compute, choices = context.engine.compute, context.choices
    devices = Counter(map(str, context.devices))
    parts = [
        ", ".join(f"{n} x {d}" if n > 1 else d for d, n in devices.items()).replace("cpu", "CPU"),
        *_parallel_text(context),
        f"batches of {compute.batch_size}",
        "compiled" if compute.compile else "not compiled",
    ]
    precision = choices.get("precision", compute.precision)
    rows = [("device", ", ".join(parts)), ("precision", precision)]
    if context.engine.captures.follows_data and "fold_batchnorm" in choices:
        rows.append(("fold_batchnorm", choices["fold_batchnorm"]))
    if context.conformance is not None:
        rows.append(("conforms", context.conformance.line))
    return [*rows, *_doubts(context)]


def data_text(data: DataConfig, listing: Listing) -> str:
    """Describe the data set: its name, number of images and classes, and what is left out."""
    classes = _classes_text(listing)
    where = shown_path(data.root) if data.root else data.name
    text = f"{where}: {counted(len(listing), 'image')}, {classes}"
    if listing.skipped:
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(listing.skipped.items()))
        text += f"\nleft out: {skipped}"
    return text


def _classes_text(listing: Listing) -> str:
    """Describe the classes of the rows, and how many rows have no label."""
    note = listing.label_note
    if not listing.classes:
        return f"no labels ({note})" if note else "no labels"
    used = len(np.unique(listing.labels[listing.labels >= 0]))
    known = counted(len(listing.classes), "class", "classes")
    text = known if used == len(listing.classes) else f"{used} of {known}"
    if unlabelled := int((listing.labels < 0).sum()):
        text += f", {unlabelled} without a label"
    return f"{text} ({note})" if note else text


def _parallel_text(context: RunContext) -> list[str]:
    """Describe threads and parallel batches; empty if a device computes one batch at a time."""
    parallelism = context.parallelism
    choice = context.choices.get("threads", context.choices.get("streams", ""))
    why = f" ({choice.partition(' (')[2]}" if " (" in choice else ""
    if parallelism.threads is None:
        has_streams = "streams" in context.choices
        return [f"{counted(parallelism.replicas, 'stream')}{why}"] if has_streams else []
    threads = counted(parallelism.threads, "thread")
    if parallelism.replicas > 1:
        return [f"{parallelism.replicas} parallel batches with {threads} each{why}"]
    return [threads + why]


def _doubts(context: RunContext) -> list[tuple[str, str]]:
    """Describe what makes the model slower than it could be, with the reason."""
    engine, rows = context.engine, []
    if doubt := engine.weights.cast.doubt:
        precision = engine.compute.precision
        rows.append(("weights", f"cast to {precision} in each pass; cast once, {doubt}"))
    if plain := engine.unfused_modules:
        shown = ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else "")
        rows.append(("attention", f"fused attention is off for this run in {shown} ({len(plain)})"))
    return rows


def _unreduced_rows(context: RunContext) -> list[tuple[str, str]]:
    """Return a note on vectors, which a reduction over positions leaves as they are."""
    vectors = context.engine.collector.vector_names
    if not vectors or isinstance(context.config.layers, Mapping):
        return []
    if (name := context.config.reduce.name) not in POOLED:
        return []
    listed = ", ".join(sorted(vectors)[:_SHOWN_LAYERS])
    verb = "has" if len(vectors) == 1 else "have"
    return [("note", f"{listed} {verb} no positions: reduce={name} leaves a vector as it is")]


def layers_text(context: RunContext) -> str:
    """Return one line per dataset with name, shape, dtype and bytes an image."""
    shown = context.specs[:_SHOWN_LAYERS]
    cells = [
        (spec.name, _shape_text(spec), spec.dtype, f"{size_text(spec.row_bytes)} an image",
         _origin(spec))
        for spec in shown
    ]  # fmt: skip
    more = len(context.specs) - len(shown)
    text = table((), cells, left=5, width=WIDTH - _INDENT)
    return text + (f"\n... and {more} more" if more else "")


def _shape_text(spec: LayerSpec) -> str:
    if len(spec.shape) == 1:
        return counted(spec.shape[0], "value")
    return "x".join(map(str, spec.shape)) or "1 value"


def _origin(spec: LayerSpec) -> str:
    """Capture and layer of a dataset if its name does not say them, and its reduction."""
    if spec.name == spec.layer:
        return "" if spec.reduce == "none" else spec.reduce
    return f"({spec.capture} of {spec.layer})" if spec.layer else f"({spec.capture})"


def describe_end(summary: Json, out: str, using: Sequence[str] = ()) -> str:
    """Describe a finished run: its output, its bottleneck, and the next command.

    `using` are lines of Python that use `store`, instead of the commands for features.
    """
    shown = shown_path(parse_path(out))
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
    text = textwrap.fill(_verdict(summary), WIDTH)
    if using:
        opening = "\n".join(["import featx", f"store = {_opening_text(shown)}", *using])
        return f"{text}\n\n{facts(rows)}\n\n{opening}"
    return f"{text}\n\n{facts([*rows, ('next', _following(summary, shown))])}"


def _verdict(summary: Json) -> str:
    """Return a sentence on rows, failures, size and speed, and one on the bottleneck."""
    rate, left = summary["images_per_second"], "nothing was left to do"
    if num_recomputed := summary.get("rows_recomputed"):
        left = f"{counted(num_recomputed, 'row')} computed again"
    parts = [
        counted(summary["rows"], "row"),
        f"{summary['failures']} failed",
        size_text(summary["bytes"]),
        f"{rate:.1f} images/s" if rate else left,
    ]
    # A run of which most images failed says nothing about what would make it faster.
    is_telling = summary["bottleneck"] and 2 * summary["failures"] < summary["rows"]
    limit = f" Limited by {summary['bottleneck']}." if is_telling else ""
    return f"Done: {', '.join(parts)}.{limit}"


def _following(summary: Json, out: str) -> str:
    """Return the commands that most people run next, and Python that reads the last layer."""
    has_classes = summary["classes"] > 1
    layer, opened = json.dumps(summary["layers"][-1]), _opening_text(out)
    reading = f".xy({layer})" if has_classes else f"[{layer}][:10]"
    if len(opened + reading) > WIDTH - len("store  "):
        opened, reading = f"store = {opened}", f"store{reading}"
    else:
        opened, reading = "", opened + reading
    lines = [
        command_text("job=probe", f"store={out}") if has_classes else "",
        command_text("job=report", f"store={out}"),
        opened,
        reading,
    ]
    return "\n".join(line for line in lines if line)


def _opening_text(out: str) -> str:
    """Return the Python expression that opens a store."""
    return f"featx.open({json.dumps(out, ensure_ascii=False)})"
