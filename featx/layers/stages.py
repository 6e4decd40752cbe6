"""The preset `stages`: the last block at each size of the feature map, found from the shapes."""

from __future__ import annotations

from collections.abc import Iterator

from featx.errors import LayerError
from featx.layers.trace import Call, Trace


def find_stages(trace: Trace) -> list[str]:
    """The last block at each size of the feature map, or the blocks of a transformer.

    A module whose inside spans three or more map sizes holds several stages and is looked into; one
    that spans two begins a stage and belongs to the smaller.

    Raises:
        LayerError: neither is there.
    """
    stages: dict[tuple[int, int], Call] = {}
    for call in _units("", trace):
        size = _map_size(call, trace)
        if size is None or size == (1, 1) or "Pool" in call.type_name:
            continue
        if size not in stages or not call.is_leaf or stages[size].is_leaf:
            stages[size] = call
    if len(stages) > 1:
        return [call.module for call in stages.values()]
    blocks: dict[str, list[str]] = {}
    for call in trace.calls:
        shapes = list(call.outputs.values())
        if len(shapes) == 1 and len(shapes[0]) == 3 and "." in call.module and not call.is_leaf:
            blocks.setdefault(call.module.rsplit(".", 1)[0], []).append(call.module)
    if blocks:
        return max(blocks.values(), key=len)
    raise LayerError(
        "the preset stages found no feature maps and no transformer blocks in this model. "
        "Name layers: job=layers lists them."
    )


def _units(parent: str, trace: Trace) -> Iterator[Call]:
    """The modules below `parent` that are (a part of) one stage, in order; each called once."""
    prefix = f"{parent}." if parent else ""
    below = [call for call in trace.calls if call.module.startswith(prefix) and call.module]
    tops = [
        call
        for call in below
        if not any(
            other in trace.by_module for other in _parents(call.module) if other.startswith(prefix)
        )
    ]
    for call in tops:
        inside = {
            size
            for other in trace.calls
            if other.module.startswith(f"{call.module}.")
            and (size := _map_size(other, trace)) not in (None, (1, 1))
        }
        if not call.is_leaf and (len(inside) > 2 or _map_size(call, trace) is None):
            yield from _units(call.module, trace)
        elif len(trace.by_module[call.module]) == 1:
            yield call


def _map_size(call: Call, trace: Trace) -> tuple[int, int] | None:
    """(height, width) of a map of the input's proportions, channels first or last, else None."""
    shapes = list(call.outputs.values())
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][0] != trace.batch_size:
        return None
    *_, input_height, input_width = next(iter(trace.calls[-1].inputs.values()))
    _, a, b, c = shapes[0]
    for height, width in ((b, c), (a, b)):
        if height * input_width == width * input_height:
            return height, width
    return None


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rsplit(".", 1)[0]
        yield name
