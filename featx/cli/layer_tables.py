"""Tables of the layers and operations of a traced forward pass, and which of them are listed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from featx.base import WIDTH, ElementPath, glob_to_regex, size_text, table
from featx.layers import Call, Trace, element_name, first_nonfinite
from featx.types import Json

if TYPE_CHECKING:
    from featx.layers import Profile, Values

_COMMON = ("layer", "type")
_OF_SHAPES = ("output", "per image", "parameters", "MFLOPs")
_OF_COST = ("ms", "own ms", "output\nbytes", "memory\nadded", "memory\npeak")
_OF_VALUES = ("dtype", "min", "mean", "max", "zeros", "not\nfinite")
_OF_CUDA = ("memory\nadded", "memory\npeak")
_COLUMNS = {
    "shapes": (*_COMMON, *_OF_SHAPES),
    "cost": ("layer", "parameters", "MFLOPs", *_OF_COST),
    "values": ("layer", *_OF_VALUES),
    "all": (*_COMMON, "calls", "input", *_OF_SHAPES, *_OF_COST, *_OF_VALUES),
}

_MOST = 0.8
"""Share of the operations of a model from which a module is replaced by the modules inside it."""

_MUCH = 0.25
"""Share of the operations of the largest module from which a module counts as a stage."""


def table_rows(
    traced: Trace,
    item_bytes: int,
    kinds: tuple[str, ...] = ("output",),
    profiled: Profile | None = None,
    modules: Collection[str] | None = None,
    has_output: bool = False,
) -> list[dict[str, Any]]:
    """Return one row per tensor that can be captured, with its name for `layers` and its cost; what
    was not measured is None. A stored number has `item_bytes`. `modules` are the names of those to
    list, without operations; None lists everything. With `has_output` the last row is the output of
    the model.
    """
    rows = []
    # What a module returns right behind an operation is the module's own output.
    operations = [each for each in traced.operations if not (each.module and each.is_returned)]
    if modules is not None:
        operations = []

    def add_row(name: str, type_name: str, shape: tuple[int, ...], **figures: object) -> None:
        rows.append({
            "name": name,
            "type": type_name,
            "shape": list(shape[1:]),
            "calls": 1,
            "parameters": 0,
            "mflops": None,
            "bytes_per_row": int(np.prod(shape[1:], dtype=np.int64)) * item_bytes,
            "batch_in_front": shape[:1] == (traced.batch_size,),
            "inputs": {},
            **figures,
        })  # fmt: skip

    for i, call in enumerate(traced.calls):
        for each in operations:
            if each.num_calls_before == i:
                values_of = profiled.operations.get(each.name, {}) if profiled else {}
                for path, shape in each.outputs.items():
                    name = each.name + (element_name(path) if len(each.outputs) > 1 else "")
                    # Hooks do not time operations.
                    measured = _measurements(None, call, values_of.get(path))
                    add_row(name, each.function, shape, **measured)
        if not call.module and not has_output:
            continue
        if modules is not None and call.module not in modules:
            continue
        for kind in kinds if call.module else ("output",):
            for path, shape in call.tensors(kind).items():
                add_row(
                    _name(traced, call, kind, path),
                    call.type_name,
                    shape,
                    calls=len(traced.by_module[call.module]),
                    parameters=call.num_parameters,
                    mflops=round(call.mflops, 3),
                    inputs={
                        _name(traced, call, "input", element): list(input_shape[1:])
                        for element, input_shape in call.inputs.items()
                    },
                    **_measurements(profiled, call, _values_of(profiled, call, kind, path)),
                )
    return rows


def _name(traced: Trace, call: Call, kind: str, path: ElementPath) -> str:
    """Return the name for the option `layers` of a tensor of a call."""
    stem = traced.call_name(call) or "output"
    element = "" if len(call.tensors(kind)) == 1 else element_name(path)
    return stem + element + ("" if kind == "output" else f":{kind}")


def _values_of(profiled: Profile | None, call: Call, kind: str, path: ElementPath) -> Values | None:
    """Return the values of one tensor of a call; None if they were not measured."""
    found = profiled.values.get((call.module, call.number)) if profiled else None
    if found is None or kind not in ("output", "input"):  # the values of gradients are not those
        return None
    return (found.outputs if kind == "output" else found.inputs).get(path)


def _measurements(profiled: Profile | None, call: Call, values: Values | None) -> dict[str, object]:
    """Return the measurements of one tensor of a call by their JSON keys; what is not, is None."""
    key = call.module, call.number
    times = profiled.times if profiled else None
    memory = profiled.memory.get(key) if profiled else None
    return {
        "ms": _rounded(times.total.get(key)) if times else None,
        "own_ms": _rounded(times.own.get(key)) if times else None,
        "output_bytes": memory.output if memory else None,
        "added_bytes": memory.added if memory else None,
        "peak_bytes": memory.peak if memory else None,
        "compute_dtype": values.dtype if values else None,
        "min": values.minimum if values else None,
        "mean": values.mean if values else None,
        "max": values.maximum if values else None,
        "zeros": values.zeros if values else None,
        "nonfinite": values.nonfinite if values else None,
    }


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 4)


def layer_table(rows: Sequence[Mapping[str, object]], show: str, on_cuda: bool) -> str:
    """Return the rows of `table_rows` as the table of one view, as in job.show; `on_cuda` says
    whether device memory was measured.
    """
    columns = [name for name in _COLUMNS[show] if name not in _OF_CUDA or on_cuda]
    num_left = sum(name in _COMMON for name in columns)
    cells = [_cells(row) for row in rows]
    width = None if show == "all" else WIDTH
    return table(columns, [[cell[name] for name in columns] for cell in cells], num_left, width)


def _cells(row: Json) -> dict[str, str]:
    """Return the texts of a row by the names of the columns, with a dash for a missing value."""

    def text(key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    def size(key: str) -> str:
        value = row[key]
        return "-" if value is None else "-" * (value < 0) + size_text(abs(value))

    # The first input, and the number of further ones.
    first, *others = [_shape_text(shape) for shape in row["inputs"].values()] or ["-"]
    return {
        "layer": row["name"],
        "type": row["type"],
        "calls": str(row["calls"]),
        "input": f"{first} +{len(others)}" if others else first,
        "output": _shape_text(row["shape"]) + " *" * (not row["batch_in_front"]),
        "parameters": f"{row['parameters']:,}",
        "MFLOPs": _mflops_text(row["mflops"]),
        "per image": size_text(row["bytes_per_row"]),
        "ms": text("ms", ".2f"),
        "own ms": text("own_ms", ".2f"),
        "output\nbytes": size("output_bytes"),
        "memory\nadded": size("added_bytes"),
        "memory\npeak": size("peak_bytes"),
        "dtype": row["compute_dtype"] or "-",
        "min": text("min", ".3g"),
        "mean": text("mean", ".3g"),
        "max": text("max", ".3g"),
        "zeros": text("zeros", ".1%"),
        "not\nfinite": text("nonfinite", ","),
    }


def _shape_text(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _mflops_text(mflops: float | None) -> str:
    if mflops is None:
        return "-"
    return f"{mflops:,.0f}" if mflops >= 10 or mflops == 0 else f"{mflops:.2g}"


def title(name: str, traced: Trace, input_shape: Sequence[int]) -> str:
    """Return the line above a table: name, parameters and operations of the model, and its input.

    `input_shape` is that of an image, (3, H, W).
    """
    model_call = traced.calls[-1]
    return (
        f"{name}: {model_call.num_parameters:,} parameters, {_mflops_text(model_call.mflops)} "
        f"MFLOPs an image, input {_shape_text(list(input_shape))}"
    )


def remarks(show: str, traced: Trace, profiled: Profile) -> list[tuple[str, str]]:
    """Return remarks about the pass below the table, each as (name, text)."""
    lines = []
    if show in ("values", "all") or first_nonfinite(profiled.values) is not None:
        lines.append(("values", _finite_text(traced, profiled)))
    if profiled.times is not None:
        own_ms = sum(profiled.times.own.values())
        lines.append(
            (
                "ms",
                f"median of {profiled.times.runs} warm passes; ms of a layer contain those of the "
                f"layers inside it, own ms do not. Own ms of all add up to {own_ms:.1f}, the pass "
                f"without hooks takes {profiled.times.pass_ms:.1f} ms.",
            )
        )
    if profiled.memory:
        on_cuda = any(memory.peak is not None for memory in profiled.memory.values())
        lines.append(
            (
                "memory",
                "added: what the device holds after a layer and did not before; peak: what it "
                "takes on top while the layer runs, with what is added"
                if on_cuda
                else "output bytes are of the tensors a layer gives, new or its input's own (what "
                "a layer takes while it runs is measured on CUDA only)",
            )
        )
    if any(shape[:1] != (traced.batch_size,) for c in traced.calls for shape in c.outputs.values()):
        lines.append(("*", "the batch is not in front of this tensor, so it cannot be captured"))
    if uncalled := _never_called(traced):
        lines.append(("not called", f"so not to be captured: {', '.join(uncalled)}"))
    return lines


def usage(rows: Sequence[Json], stage: str | None) -> str:
    """Return how the option `layers` names the layer `stage` of a table, or its last one, with a
    reduction if it is a map.
    """
    # `output` names the tensors of the output together, such as output.logits.
    capturable = [
        row
        for row in rows
        if row["batch_in_front"] and not row["name"].startswith(("output.", "output["))
    ]
    if not capturable:
        return ""
    row = next((row for row in capturable if row["name"] == stage), capturable[-1])
    name, shape, num_bytes = row["name"], row["shape"], row["bytes_per_row"]
    text = f"'layers=[{name},embedding]'"
    if len(shape) == 3 and shape[1] * shape[2] > 1:
        mean = size_text(num_bytes // (shape[1] * shape[2]))
        text += f", or 'layers={{{name}: avg}}': {mean} an image instead of {size_text(num_bytes)}"
    return text


def _finite_text(traced: Trace, profiled: Profile) -> str:
    first = first_nonfinite(profiled.values)
    if first is None:
        return "every value of every layer is finite on this image"
    (module, number), is_cause = first
    has_calls = module != "" and len(traced.by_module[module]) > 1
    name = f"{module}@{number}" if has_calls else module or "what the model returns"
    values = profiled.values[module, number]
    count = sum(given.count for given in values.outputs.values())
    return f"first non-finite: {name}, {values.nonfinite:,} of {count:,} values" + (
        "" if is_cause else "; its input is not finite already, and no layer gave that"
    )


def _never_called(traced: Trace) -> list[str]:
    """Return the outermost modules that are not called; names that differ by numbers are merged."""
    uncalled = set(traced.names.values()) - set(traced.by_module) - {""}
    outermost = [name for name in sorted(uncalled) if name.rpartition(".")[0] not in uncalled]
    names_by_glob: dict[str, list[str]] = {}
    for name in outermost:
        names_by_glob.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [
        names[0] if len(names) == 1 else f"{glob} ({len(names)} of them)"
        for glob, names in names_by_glob.items()
    ]


def outline(traced: Trace) -> frozenset[str]:
    """Return the names of the modules at the top level of the model.

    A module that computes nearly everything, such as the `blocks` or `features` of many models,
    tells nothing, so the modules inside it take its place.
    """
    modules_inside = _modules_inside(traced)
    max_mflops = _MOST * traced.calls[-1].mflops

    def open_module(module: str) -> list[str]:
        names = []
        for name in modules_inside.get(module, ()):
            mflops = sum(call.mflops for call in traced.by_module[name])
            names += (
                open_module(name)
                if modules_inside.get(name) and mflops > max_mflops > 0
                else [name]
            )
        return names

    return frozenset(open_module(""))


def last_stage(traced: Trace, modules: Collection[str]) -> str | None:
    """Return the last module that calls others and computes much, or None if there is none."""
    modules_inside = _modules_inside(traced)
    mflops = {name: traced.by_module[name][0].mflops for name in modules if name in modules_inside}
    min_mflops = _MUCH * max(mflops.values(), default=0.0)
    stages = [name for name in traced.by_module if mflops.get(name, 0.0) > min_mflops]
    return stages[-1] if stages else None


def matching_names(request: str, names: Iterable[str]) -> list[str]:
    """Return the names of rows that a name or a glob of the option `layers` means.

    Calls and elements belong to the module: 'relu' and '*' match 'relu@2' and 'relu[0]'. A kind of
    capture stands after a colon, as in 'layer4:input'.
    """
    requested, _, kind = request.partition(":")
    pattern = re.compile(glob_to_regex(requested))
    matches = []
    for name in names:
        stem, _, row_kind = name.partition(":")
        module = re.split(r"[@\[]", stem)[0]
        if row_kind == kind and (
            stem == requested or pattern.fullmatch(stem) or pattern.fullmatch(module)
        ):
            matches.append(name)
    return matches


def _modules_inside(traced: Trace) -> dict[str, list[str]]:
    """Return, for each module, the called modules directly inside it, in execution order.

    A container such as nn.ModuleList is not called itself, and does not count as a level.
    """
    inside: dict[str, list[str]] = {}
    for name in traced.by_module:
        if not name:
            continue
        parent = name.rpartition(".")[0]
        while parent and parent not in traced.by_module:
            parent = parent.rpartition(".")[0]
        inside.setdefault(parent, []).append(name)
    return inside
