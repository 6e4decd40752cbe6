"""Tables that the command prints before and after a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from featx.base import facts, size_text
from featx.errors import counted
from featx.types import LayerSpec

if TYPE_CHECKING:
    from featx.pipeline.run_context import RunContext


def describe_run(context: RunContext) -> list[tuple[str, str]]:
    """Rows (name, text) of the table before a run: data, model, layers and settings."""
    config, listing, header = context.config, context.listing, context.header
    classes = f", {len(listing.classes)} classes" if listing.classes else ", no labels"
    data = f"{config.data.root or config.data.name}: {counted(len(listing), 'image')}{classes}"
    if listing.skipped:
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(listing.skipped.items()))
        data += f"\nleft out: {skipped}"
    compute = context.engine.compute
    devices = Counter(map(str, context.devices))
    settings = {
        **context.engine.backbone.choices,
        "precision": compute.precision,
        "compile": str(compute.compile).lower(),
        "fold_batchnorm": str(compute.fold_batchnorm).lower(),
        "batch_size": str(compute.batch_size),
        "part_rows": str(context.part_rows),
        **({} if context.at_once.threads is None else {"threads": str(context.at_once.threads)}),
        **({"streams": str(context.at_once.replicas)} if "streams" in context.choices else {}),
    }
    rows = [
        ("data", data),
        ("model", f"{header.model}, weights {header.weights}"),
        ("", f"sha256 {header.weights_sha256}"),
        ("transform", f"{header.transform}, decode={config.decode}"),
        ("layers", layers_text(context)),
        ("device", ", ".join(f"{n} x {d}" if n > 1 else d for d, n in devices.items())),
        *((name, context.choices.get(name, value)) for name, value in settings.items()),
    ]
    if doubt := context.engine.why_cast_each_pass:
        rows.append(("weights", f"cast to {compute.precision} in each pass; cast once, {doubt}"))
    if plain := context.engine.unfused:
        shown = ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else "")
        rows.append(("attention", f"fused attention is off for this run in {shown} ({len(plain)})"))
    if context.left_out:
        rows.append(("left out", "\n".join(context.left_out)))
    return rows


def layers_text(context: RunContext) -> str:
    """One line per dataset with name, shape, dtype and bytes per row; at most 20 datasets."""
    shown = context.specs[:20]
    lines = [
        f"{spec.name}  {spec.shape}  {spec.dtype}  {size_text(spec.row_bytes)} a row"
        + (f"  ({_origin(spec)})" if spec.name != spec.layer else "")
        for spec in shown
    ]
    if len(context.specs) > len(shown):
        lines.append(f"... and {len(context.specs) - len(shown)} more")
    return "\n".join(lines)


def _origin(spec: LayerSpec) -> str:
    """Capture and layer of a dataset; attributions at the input have no layer."""
    return f"{spec.capture} of {spec.layer}" if spec.layer else spec.capture


def trial_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Table rows that compare a run with its trial; empty if this process computed nothing."""
    promised, share = summary["trial_images_per_second"], summary["share_of_trial"]
    if not promised:
        return []
    text = f"reading, decoding and model promised {promised:.1f} images/s"
    text += "" if share is None else f"; the run reached {share:.2f} of it"
    slow = [("slow", summary["below_trial"])] if summary["below_trial"] else []
    return [("trial", text), *slow]


def describe_end(summary: Mapping[str, Any], out: str, using: str | None = None) -> str:
    """Text after a run: a table, and Python lines that open the result.

    Args:
        summary: content of summary.json.
        out: path or URL of the store.
        using: Python lines that use `store`; None reads features and labels of the first layer.
    """
    rate = summary["images_per_second"]
    warnings = summary["decoder_warnings"]
    rows = [
        ("rows", str(summary["rows"])),
        ("failures", str(summary["failures"])),
        *([("warnings", _warnings_text(warnings))] if warnings else []),
        ("images/s", f"{rate:.1f}" if rate else "nothing was left to do"),
        *trial_rows(summary),
        ("seconds", seconds_text(summary["seconds"])),
        *([("bound by", summary["bottleneck"])] if summary["bottleneck"] else []),
        ("size", size_text(summary["bytes"])),
        ("memory", f"{summary['peak_memory_mib']} MiB at the peak"),
        ("store", out),
    ]
    layer = summary["layers"][0]
    if using is None:
        using = (
            f'X, y = store.xy("{layer}")      # ok rows only; store["{layer}"][10:20] reads lazily'
        )
    opening = f"import featx\nstore = featx.open({json.dumps(out, ensure_ascii=False)})\n{using}"
    return f"{facts(rows)}\n\n{opening}"


def seconds_text(seconds: Mapping[str, float | None]) -> str:
    """Busy seconds of each stage whose seconds are known."""
    known = [f"{stage} {value:.1f}" for stage, value in seconds.items() if value is not None]
    if len(known) < len(seconds):
        known.append("others not known, as workers ended before they could tell them")
    return ", ".join(known)


def _warnings_text(counts: Mapping[str, int]) -> str:
    """Number of images by decoder warning, most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return "\n".join(f"{counted(count, 'image')}: {reason}" for reason, count in ordered)
