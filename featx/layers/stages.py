"""The preset `stages`: the last block at each size of the feature map, or the repeated blocks.

Both are found from one recorded forward pass and then checked. What fails a check is refused, with
the lists of modules that may be meant.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from featx.errors import LayerError
from featx.layers.row_layout import is_known_map, map_layouts
from featx.layers.tracer import Call, Trace


def find_stages(trace: Trace, classifier: str | None = None) -> list[str]:
    """Names of the last block at each size of the feature map, or of the repeated blocks.

    The module that holds the classifier, such as the head of a segmentation model, is none, nor are
    those that are called after it.

    Raises:
        LayerError: the model has neither, or they are not certain.
    """
    of_sizes, lists = _stages_of_sizes(trace, classifier or ""), _lists_of_blocks(trace)
    if len(of_sizes) > 1 and _are_whole(of_sizes, trace) and _hold_tokens(of_sizes, lists, trace):
        return of_sizes
    blocks = _only_blocks(lists, trace)
    if blocks and _are_whole(blocks, trace):
        return blocks
    if len(of_sizes) < 2 and not lists:
        raise LayerError(
            "the preset stages found no feature maps and no transformer blocks in this model. "
            "Name layers: job=layers lists them."
        )
    candidates: dict[tuple[str, str], int] = {}
    for (_, kind), names in lists.items():
        glob = re.sub(r"\d+(?=\.)" if len(names) == 1 else r"\d+(?=\.|$)", "*", names[0])
        candidates[glob, kind] = candidates.get((glob, kind), 0) + len(names)
    shown = [f"{glob!r} ({count} {kind})" for (glob, kind), count in candidates.items()]
    shown = shown or [", ".join(of_sizes)]
    raise LayerError(
        "the preset stages is not certain in this model: no list of modules of one class makes up "
        f"its depth. Candidates: {'; '.join(shown)}. Name layers: job=layers lists them, also the "
        "sums between modules."
    )


def _stages_of_sizes(trace: Trace, classifier: str) -> list[str]:
    """Names of the last block at each size of the feature map.

    A module whose sub-modules have three or more map sizes holds several stages and is searched.
    One with two sizes begins a stage and belongs to the smaller size.
    """
    stages: dict[tuple[int, int], Call] = {}
    for call in _units("", trace):
        if call.module == classifier or _is_inside(classifier, call.module):
            break
        size = _map_size(call, trace)
        if size is None or size == (1, 1) or "Pool" in call.type_name:
            continue
        if size not in stages or not call.is_leaf or stages[size].is_leaf:
            stages[size] = call
    return [call.module for call in stages.values()]


def _lists_of_blocks(trace: Trace) -> dict[tuple[str, str], list[str]]:
    """(parent, class) -> names of its numbered modules of this class.

    Each is no leaf and gives one tensor, with a row per image and positions. Lists inside the
    blocks of a list that repeats its class are left out.
    """
    lists: dict[tuple[str, str], list[str]] = {}
    for name, calls in trace.by_module.items():
        shapes = list(calls[0].outputs.values())
        is_block = len(shapes) == 1 and shapes[0][:1] == (trace.batch_size,) and len(shapes[0]) > 2
        if is_block and not calls[0].is_leaf and _list_name(name):
            key = name.rpartition(".")[0], calls[0].type_name
            lists.setdefault(key, []).append(name)
    repeated = [name for names in lists.values() if len(names) > 1 for name in names]
    return {
        key: names
        for key, names in lists.items()
        if not any(_is_inside(names[0], block) for block in repeated)
    }


def _only_blocks(lists: Mapping[tuple[str, str], list[str]], trace: Trace) -> list[str]:
    """The blocks of the only list that repeats its class, or the last of each list of a list."""
    repeated = [names for names in lists.values() if len(names) > 1] or list(lists.values())
    if len(repeated) == 1:
        blocks = repeated[0]
        around = [name for name in _parents(blocks[0]) if name in trace.by_module]
        size = _num_weighted(blocks[:1], trace)
        is_rest_small = all(
            _num_weighted([name], trace) - _num_weighted(blocks, trace) < size
            for name in around
            if _list_name(name)
        )
        order = list(trace.by_module)
        span = order[order.index(blocks[0]) : order.index(blocks[-1])]
        others = (name for names in lists.values() if names is not blocks for name in names)
        is_only = not any(name in span for name in others)
        return blocks if is_rest_small and is_only else []
    parents = [parent for parent, _ in lists]
    last = [names[-1] for names in lists.values()]
    shapes = {next(iter(trace.by_module[name][0].outputs.values())) for name in last}
    is_list_of_lists = (
        len({kind for _, kind in lists}) == 1
        and len({_list_name(parent) for parent in parents} - {""}) == 1
        and not any(parent in trace.by_module for parent in parents)
        and len(shapes) == len(last)
    )
    return last if is_list_of_lists else []


def _num_weighted(blocks: Sequence[str], trace: Trace) -> int:
    """Number of calls of layers with parameters inside some modules."""
    calls = [call for call in trace.calls if call.is_leaf and call.num_parameters]
    return sum(_is_inside(call.module, block) for call in calls for block in blocks)


def _are_whole(stages: Sequence[str], trace: Trace) -> bool:
    """Return whether stages are no insides of blocks, and few layers come after the last one.

    Nor do their maps grow, as those of the decoder of a U-Net do. A stage is inside of a block if a
    module around it is one of a list of which another module of the same class holds no stage.
    """
    if any(_is_inside(one, other) for one in stages for other in stages):
        return False
    for stage in stages:
        for block in _parents(stage):
            for other in _list_of(block, trace):
                if not any(_is_inside(each, other) or each == other for each in stages):
                    return False
    found = [(i, call) for i, call in enumerate(trace.calls) if call.module in stages]
    sizes = [size for _, call in found if (size := _map_size(call, trace))]
    if any(after > before for before, after in itertools.pairwise(sizes)):
        return False
    last = max(i for i, _ in found)
    weighted = [i for i, call in enumerate(trace.calls) if call.is_leaf and call.num_parameters]
    return 2 * sum(i > last for i in weighted) < len(weighted)


def _hold_tokens(
    stages: Sequence[str], lists: Mapping[tuple[str, str], list[str]], trace: Trace
) -> bool:
    """Return whether all repeated blocks of tokens, whose rows show no size, are inside stages.

    Otherwise the map before or after them would stand for them.
    """
    return not any(
        len(next(iter(trace.by_module[names[0]][0].outputs.values()))) == 3
        and not any(_is_inside(names[0], stage) for stage in stages)
        for names in lists.values()
        if len(names) > 1
    )


def _list_of(block: str, trace: Trace) -> Iterator[str]:
    """Names of the other modules of the list that a module is in, of its class if it is known."""
    name = _list_name(block)
    kinds = {call.type_name for call in trace.by_module.get(block, ())}
    for other in trace.names:
        if other != block and name and _list_name(other) == name:
            others = {call.type_name for call in trace.by_module.get(other, ())}
            if not kinds or not others or kinds == others:
                yield other


def _list_name(module: str) -> str:
    """Name of a module without the number at its end, '' if it has none."""
    return module.rstrip("0123456789") if module[-1:].isdigit() else ""


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
            if _is_inside(other.module, call.module)
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
    *_, height, width = next(iter(trace.calls[-1].inputs.values()))
    _, a, b, c = shapes[0]
    first, last = map_layouts((a, b, c), (height, width))
    if last or is_known_map((a, b, c), (height, width), trace):
        return b, c
    return (a, b) if first else None


def _is_inside(module: str, other: str) -> bool:
    return module.startswith(f"{other}.")


def _parents(name: str) -> Iterator[str]:
    """The dotted names above a name, nearest first."""
    while "." in name:
        name = name.rsplit(".", 1)[0]
        yield name
