"""job=layers: every layer and operation that can be captured, in execution order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from featx.config import Config
from featx.models import build_backbone
from featx.progress import say, size_text, table
from featx.traces import Operation, Trace, element_name


def run(config: Config, config_yaml: str) -> int:
    """Print the table, or JSON with job.json=true; returns the exit code."""
    from featx.devices import choose_device
    from featx.engine import Engine

    device = choose_device(config.device)
    backbone = build_backbone(config.model, config.seed)
    with Engine(backbone, device, config.dtype) as engine:
        traced = engine.trace()
    rows = layer_rows(traced, np.dtype(config.dtype).itemsize)
    if config.job.json:
        say(json.dumps(rows, indent=2))
        return 0
    say(f"{backbone.name}, input (B, 3, {', '.join(map(str, backbone.preprocess.crop))})")
    say(table(_HEADER, [_cells(row) for row in rows], left=2))
    never = sorted(set(traced.names.values()) - set(traced.by_module) - {""})
    if never:
        say(f"never called, so not to be captured: {', '.join(never)}")
    return 0


_HEADER = ("layer", "type", "output shape", "calls", "parameters", "MFLOPs", "bytes per row")


def layer_rows(traced: Trace, item_bytes: int) -> list[dict[str, Any]]:
    """One entry for each tensor that a layer gives: what to write in `layers`, and its cost.

    Args:
        traced: one forward pass.
        item_bytes: of one stored number.
    """
    rows = []
    operations = [each for each in traced.operations if not (each.module and each.is_returned)]
    for i, call in enumerate(traced.calls):
        rows += [
            row
            for each in operations
            if each.num_calls_before == i
            for row in operation_rows(each, traced.batch_size, item_bytes)
        ]
        if not call.module:
            continue
        calls = len(traced.by_module[call.module])
        stem = f"{call.module}@{call.number}" if calls > 1 else call.module
        single = len(call.outputs) == 1
        for path, shape in call.outputs.items():
            rows.append(
                {
                    "name": stem if single else stem + element_name(path),
                    "type": call.type_name,
                    "shape": list(shape[1:]),
                    "calls": calls,
                    "parameters": call.num_parameters,
                    "mflops": round(call.mflops, 3),
                    "bytes_per_row": _row_bytes(shape, item_bytes),
                    "batch_in_front": shape[:1] == (traced.batch_size,),
                }
            )
    return rows


def operation_rows(each: Operation, batch_size: int, item_bytes: int) -> list[dict[str, Any]]:
    """The same of an operation that no module owns; its cost is not known."""
    single = len(each.outputs) == 1
    return [
        {
            "name": each.name if single else each.name + element_name(path),
            "type": each.function,
            "shape": list(shape[1:]),
            "calls": 1,
            "parameters": 0,
            "mflops": None,
            "bytes_per_row": _row_bytes(shape, item_bytes),
            "batch_in_front": shape[:1] == (batch_size,),
        }
        for path, shape in each.outputs.items()
    ]


def _row_bytes(shape: tuple[int, ...], item_bytes: int) -> int:
    return int(np.prod(shape[1:], dtype=np.int64)) * item_bytes


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(map(str, row["shape"])) or "scalar"
    return (
        row["name"],
        row["type"],
        shape if row["batch_in_front"] else f"{shape} (no batch in front)",
        str(row["calls"]),
        f"{row['parameters']:,}",
        "" if row["mflops"] is None else f"{row['mflops']:,.1f}",
        size_text(row["bytes_per_row"]),
    )
