"""Descriptions of an open store: the text of `repr`, and a table for notebooks.

Both read columns of the listing only, never images or features, and both also describe a store
whose columns are damaged.
"""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from featx.base import printable, shown_path, size_text
from featx.errors import StoreError, counted
from featx.types import Status, with_features

if TYPE_CHECKING:
    from featx.store.reader import FeatureStore

MAX_LAYERS = 12
"""Number of layers that a description lists."""

_CELL = "padding:.2em 1.2em .2em 0;text-align"
_RULE = "border-bottom:1px solid rgba(128,128,128,.6)"


def describe_text(store: FeatureStore) -> str:
    """Return a few lines of at most about 80 columns: rows, layers, model and weights."""
    listed = store.layers[:MAX_LAYERS]
    shapes = [str(store[name].shape) for name in listed]
    widths = [max(map(len, column)) for column in (listed, shapes)]
    lines = [f"<FeatureStore {shown_path(store.root)}: {', '.join(_states(store))}>"]
    for name, shape in zip(listed, shapes, strict=True):
        dtype, reduced = str(store[name].dtype), _reduction(store, name)
        lines.append(f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<8}  {reduced}".rstrip())
    if len(store.layers) > MAX_LAYERS:
        lines.append(f"  ... {len(store.layers) - MAX_LAYERS} more")
    return "\n".join([*lines, f"  {', '.join(_model(store))}"])


def describe_html(store: FeatureStore) -> str:
    """Return the same as a table, with the size of each layer and the reasons of failures.

    It has inline styles only, no script and no fixed colours, so it is readable in light and dark
    notebooks, also where style elements are removed.
    """
    rows = "".join(
        f'<tr><td style="{_CELL}:left"><code>{html.escape(name)}</code></td>'
        f'<td style="{_CELL}:right">{store[name].shape}</td>'
        f'<td style="{_CELL}:left">{store[name].dtype}</td>'
        f'<td style="{_CELL}:left">{html.escape(_reduction(store, name) or "none")}</td>'
        f'<td style="text-align:right">{size_text(store[name].nbytes)}</td></tr>'
        for name in store.layers[:MAX_LAYERS]
    )
    if len(store.layers) > MAX_LAYERS:
        rows += f"<tr><td>... {len(store.layers) - MAX_LAYERS} more</td></tr>"
    heads = "".join(
        f'<th style="{_CELL}:{side}">{name}</th>'
        for name, side in (
            *(("layer", "left"), ("shape", "right"), ("dtype", "left")),
            *(("reduction", "left"), ("size", "right")),
        )
    )
    model, *weights = map(html.escape, _model(store))
    origin = f"{_faint('model')} {model}" + "".join(
        f" &nbsp; {_faint('weights')} {name}" for name in weights
    )
    failed = _failures_by_reason(store)
    path = html.escape(shown_path(store.root))
    following = html.escape(
        f'X, y = store.xy("{store.layers[-1]}")\nstore.show(10)  # images\n'
        "store.failures  # what failed, and why\n"
        "featx.write_report(store)  # one HTML page"
    )
    return (
        '<div style="max-width:46rem;font-variant-numeric:tabular-nums">'
        f"<div><b>FeatureStore</b> {path} {_faint(html.escape(', '.join(_states(store))))}</div>"
        f'<table style="border-collapse:collapse;margin:.5em 0"><tr style="{_RULE}">{heads}</tr>'
        f"{rows}</table><div>{origin}</div>"
        + (f"<div>{_faint('failed')} {html.escape(printable(failed))}</div>" if failed else "")
        + f'<details><summary>next</summary><pre style="margin:.3em 0">{following}</pre></details>'
        "</div>"
    )


def _states(store: FeatureStore) -> list[str]:
    """Return what is known about the rows, such as '486 rows', '8 failed', 'complete'."""
    parts = [counted(len(store), "row")]
    try:
        status = store.status
    except StoreError:
        return [*parts, "status cannot be read"]
    num_ok, num_absent = int(with_features(status).sum()), int((status == Status.ABSENT).sum())
    parts.append(f"{num_ok} ok")
    if num_failed := len(status) - num_ok - num_absent:
        parts.append(f"{num_failed} failed")
    if store.classes:
        parts.append(counted(len(store.classes), "class", "classes"))
    there = f"{store.num_rows_present} of {len(store)} rows are there"
    return [*parts, "complete" if store.complete else there]


def _failures_by_reason(store: FeatureStore) -> str:
    """Return the number of failed rows for each reason, the most frequent first; '' if none."""
    try:
        values, counts = np.unique(store.status, return_counts=True)
    except StoreError:
        return ""
    known = {int(status): status.label for status in Status if status.value not in (0, 255)}
    by_reason = Counter(
        {known[value]: count for value, count in zip(values, counts, strict=True) if value in known}
    )
    return ", ".join(f"{count} {label}" for label, count in by_reason.most_common())


def _reduction(store: FeatureStore, layer: str) -> str:
    """Return the name of the reduction, and the capture if that is no output; '' for neither."""
    attrs = store[layer].attrs
    names = (str(attrs.get("capture", "")), str(attrs.get("reduce", "")))
    return " ".join(name for name in names if name not in ("", "output", "none"))


def _model(store: FeatureStore) -> list[str]:
    """Return the names of the model and of its weights, as far as the store has them."""
    values = [str(store.attrs.get(name, "")) for name in ("model", "weights")]
    return [name for name in values if name] or ["unknown model"]


def _faint(text: str) -> str:
    return f'<span style="opacity:.7">{text}</span>'
