"""Descriptions of an open store: the text of `repr`, and a table for notebooks.

Both read columns of the listing only, never images or features, and both also describe a store
whose columns are damaged.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.base import printable, shown_path, size_text
from featx.errors import counted
from featx.store.contents import Contents
from featx.types import Status, with_features

MAX_LAYERS = 12
"""Number of layers that a description lists."""

_CELL = "padding:.2em 1.2em .2em 0;text-align"
_RULE = "border-bottom:1px solid rgba(128,128,128,.6)"

Statuses = npt.NDArray[np.uint8] | None
"""(N,) `featx.types.Status` of each row; None if they cannot be read."""


def describe_text(root: Path, contents: Contents, status: Statuses) -> str:
    """Return a few lines of at most about 80 columns: rows, layers, model and weights."""
    cells = _layer_cells(contents)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"<FeatureStore {shown_path(root)}: {', '.join(_states(contents, status))}>"]
    for name, shape, dtype, reduced, _ in cells:
        lines.append(f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<8}  {reduced}".rstrip())
    if len(contents.layers) > MAX_LAYERS:
        lines.append(f"  ... {len(contents.layers) - MAX_LAYERS} more")
    return "\n".join([*lines, f"  {', '.join(_model(contents))}"])


def describe_html(root: Path, contents: Contents, status: Statuses) -> str:
    """Return the same as a table, with the size of each layer and the reasons of failures.

    It has inline styles only, no script and no fixed colours, so it is readable in light and dark
    notebooks, also where style elements are removed.
    """
    rows = "".join(
        f'<tr><td style="{_CELL}:left"><code>{html.escape(name)}</code></td>'
        f'<td style="{_CELL}:right">{shape}</td>'
        f'<td style="{_CELL}:left">{dtype}</td>'
        f'<td style="{_CELL}:left">{html.escape(reduced or "none")}</td>'
        f'<td style="text-align:right">{size}</td></tr>'
        for name, shape, dtype, reduced, size in _layer_cells(contents)
    )
    if len(contents.layers) > MAX_LAYERS:
        rows += f"<tr><td>... {len(contents.layers) - MAX_LAYERS} more</td></tr>"
    sides = {"layer": "left", "shape": "right", "dtype": "left"}
    sides |= {"reduction": "left", "size": "right"}
    heads = "".join(f'<th style="{_CELL}:{side}">{name}</th>' for name, side in sides.items())
    model, *weights = map(html.escape, _model(contents))
    origin = f"{_faint('model')} {model}" + "".join(
        f" &nbsp; {_faint('weights')} {name}" for name in weights
    )
    failed = _failures_by_reason(status)
    path, states = shown_path(root), ", ".join(_states(contents, status))
    following = html.escape(
        f'X, y = store.xy("{[*contents.layers][-1]}")\nstore.show(10)  # images\n'
        "store.failures  # what failed, and why\n"
        "featx.write_report(store)  # one HTML page"
    )
    return (
        '<div style="max-width:46rem;font-variant-numeric:tabular-nums">'
        f"<div><b>FeatureStore</b> {html.escape(path)} {_faint(html.escape(states))}</div>"
        f'<table style="border-collapse:collapse;margin:.5em 0"><tr style="{_RULE}">{heads}</tr>'
        f"{rows}</table><div>{origin}</div>"
        + (f"<div>{_faint('failed')} {html.escape(printable(failed))}</div>" if failed else "")
        + f'<details><summary>next</summary><pre style="margin:.3em 0">{following}</pre></details>'
        "</div>"
    )


def _layer_cells(contents: Contents) -> list[tuple[str, ...]]:
    """Name, shape, dtype, reduction and size of the first layers.

    The reduction is '' if there is none, and has the capture in front if that is no output.
    """
    cells: list[tuple[str, ...]] = []
    for name, info in [*contents.layers.items()][:MAX_LAYERS]:
        shape = (contents.num_rows, *info.row_shape)
        made = (str(info.attrs.get("capture", "")), str(info.attrs.get("reduce", "")))
        reduced = " ".join(word for word in made if word not in ("", "output", "none"))
        size = size_text(math.prod(shape) * info.dtype.itemsize)
        cells.append((name, str(shape), str(info.dtype), reduced, size))
    return cells


def _states(contents: Contents, status: Statuses) -> list[str]:
    """Return what is known about the rows, such as '486 rows', '8 failed', 'complete'."""
    parts = [counted(contents.num_rows, "row")]
    if status is None:
        return [*parts, "status cannot be read"]
    num_ok, num_absent = int(with_features(status).sum()), int((status == Status.ABSENT).sum())
    parts.append(f"{num_ok} ok")
    if num_failed := len(status) - num_ok - num_absent:
        parts.append(f"{num_failed} failed")
    if contents.classes:
        parts.append(counted(len(contents.classes), "class", "classes"))
    there = f"{contents.num_rows_present} of {contents.num_rows} rows are there"
    return [*parts, "complete" if contents.complete else there]


def _failures_by_reason(status: Statuses) -> str:
    """Return the number of failed rows for each reason, the most frequent first; '' if none."""
    values, counts = np.unique([] if status is None else status, return_counts=True)
    known = {int(status): status.label for status in Status if status.value not in (0, 255)}
    by_reason = Counter(
        {known[value]: count for value, count in zip(values, counts, strict=True) if value in known}
    )
    return ", ".join(f"{count} {label}" for label, count in by_reason.most_common())


def _model(contents: Contents) -> list[str]:
    """Return the names of the model and of its weights, as far as the store has them."""
    values = [str(contents.attrs.get(name, "")) for name in ("model", "weights")]
    return [name for name in values if name] or ["unknown model"]


def _faint(text: str) -> str:
    return f'<span style="opacity:.7">{text}</span>'
