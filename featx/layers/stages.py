"""The preset `stages`: the last block at each size of the feature map, found from shapes."""

from __future__ import annotations

from collections.abc import Iterator

from featx.errors import LayerError
from featx.layers.trace import Call, Trace


def find_stages(trace: Trace) -> list[str]:
    """Names of the last block at each size of the feature map, or of the transformer blocks.

    A module whose sub-modules have three or more map sizes holds several stages and is searched.
    One with two sizes begins a stage and belongs to the smaller size.

    Raises:
        LayerError: the model has neither feature maps nor transformer blocks.
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
    """The modules below `parent` that belong to one stage each, in order; each is called once."""
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
    """(height, width) of a map with the proportions of the input, in either layout, or None."""
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
    """The dotted names above a name, nearest first."""
    while "." in name:
        name = name.rsplit(".", 1)[0]
        yield name
