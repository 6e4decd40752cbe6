"""Selection of capture points by layer names, globs and presets.

Everything is decided on a Trace, the record of one forward pass; nothing here runs a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from featx.base import ElementPath, glob_to_regex
from featx.config import PRESETS, ReduceConfig
from featx.errors import ConfigError, LayerError, counted, nearest
from featx.layers.layer_names import (
    CapturePoint,
    check_operation_capture,
    element_name,
    no_layer,
    parse_capture_point,
    parse_operation,
    pick_path,
    split_capture,
    split_name,
    with_capture,
    without_wrappers,
)
from featx.layers.stages import find_stages
from featx.layers.tracer import Call, Trace


@dataclass
class Selection:
    """Result of `select`.

    Attributes:
        chosen: capture points with their reductions.
        left_out: what presets and globs have skipped, with the reason.
    """

    chosen: list[tuple[CapturePoint, ReduceConfig]]
    left_out: list[str]


def select(
    requests: Sequence[tuple[str, ReduceConfig]],
    trace: Trace,
    classifier: str | None,
    stages: Sequence[str] | None,
) -> Selection:
    """The capture points for a list of names, globs and presets, in their order.

    Args:
        requests: pairs of a name, glob or preset and the reduction.
        trace: trace of the model.
        classifier: name of the classifier if the library gives it, for the presets.
        stages: names of the stages if the library gives them, for the preset `stages`.

    Raises:
        LayerError: a name does not exist, is not called, is called several times, or is ambiguous.
        ConfigError: a layer is requested with two reductions.
    """
    selection = Selection([], [])
    seen: dict[str, ReduceConfig] = {}
    for request, reduce in requests:
        points = list(_points(request, trace, classifier, stages, selection.left_out))
        if not points:
            raise LayerError(
                f"{request!r} means no tensor of this model with a row per image. Name a layer: "
                "job=layers lists them."
            )
        for point in points:
            if point.name not in seen:
                seen[point.name] = reduce
                is_embedding = point.name == "embedding" and reduce.name == "none"
                own_reduce = _embedding_reduce(point, reduce, trace) if is_embedding else reduce
                selection.chosen.append((point, own_reduce))
            elif seen[point.name] != reduce:
                before, now = (
                    " ".join([each.name, *(f"{key}={x}" for key, x in each.args.items())])
                    for each in (seen[point.name], reduce)
                )
                raise ConfigError(
                    f"layers names {point.name} with reduce={before} and with reduce={now}, but a "
                    "store holds a layer only once."
                )
    return selection


def _points(
    request: str,
    trace: Trace,
    classifier: str | None,
    stages: Sequence[str] | None,
    left_out: list[str],
) -> Iterator[CapturePoint]:
    """The capture points of one request; adds to `left_out`."""
    name, capture = split_capture(request)
    if name in PRESETS:
        if trace.names.get(name) in trace.by_module:
            left_out.append(
                f"the module {name!r} of this model: layers={name} is the preset, the module is "
                f"{name}@1"
            )
        if name == "embedding":
            if capture != "output":
                raise LayerError(
                    f"{request!r}: the preset embedding is the input of the classifier, so "
                    f"capture={capture} does not apply to it. Name a layer."
                )
            yield embedding_point(trace, classifier)
        elif name == "output":
            yield from _output_points(request, trace, left_out)
        elif name == "stages":
            known = trace.library_stages or stages
            stage_names = list(known) if known is not None else find_stages(trace, classifier)
            for stage in stage_names:
                try:
                    yield named_point(with_capture(_module_request(stage, trace), capture), trace)
                except LayerError as error:
                    raise LayerError(
                        f"the preset stages means {', '.join(stage_names)} in this model, and one "
                        f"of these cannot be captured: {error}"
                    ) from error
        else:
            yield from _every_point(trace, name == "leaves", capture, left_out)
    elif any(sign in name for sign in "*?"):
        yield from _glob_points(name, capture, trace, left_out)
    elif name.startswith(("output.", "output[")) and "output" not in trace.names:
        # One tensor of what the model returns, such as 'output.logits'.
        number, outputs = _returned(request, trace)
        point = parse_capture_point(request.removeprefix("output"), {"": ""})
        _check_element(request, outputs, point.path, trace.batch_size)
        yield replace(point, name=request.removesuffix(":output"), call=number)
    else:
        yield named_point(request, trace)


def named_point(request: str, trace: Trace) -> CapturePoint:
    """The capture point of one exact name of a module or operation.

    Args:
        request: name as the user wrote it, with or without the parts that wrappers add.
        trace: trace of the model.

    Raises:
        LayerError: the name does not exist, is not called, is called several times, or is
            ambiguous.
    """
    try:
        return _named_point(request, trace)
    except LayerError:
        name, capture = split_capture(request)
        known = trace.known_names()
        names = {without_wrappers(each): each for each in known} | {each: each for each in known}
        module, rest = split_name(name, names)
        if not module or names[module] == module:
            raise
        point = _named_point(with_capture(names[module] + rest, capture), trace)
        return replace(point, name=with_capture(name, capture))


def _named_point(request: str, trace: Trace) -> CapturePoint:
    operation = _operation_point(request, trace)
    if operation is not None:
        return operation
    layer, capture = split_capture(request)
    base, _, later = layer.rpartition("_")
    num_calls = len(trace.by_module.get(trace.names.get(base, base), ()))
    if request not in trace.names and later.isdecimal() and 0 < int(later) < num_calls:
        raise LayerError(
            f"there is no layer {request!r}: the call that torch.fx names so is "
            f"{with_capture(f'{base}@{int(later) + 1}', capture)}."
        )
    point = parse_capture_point(request, trace.names, trace.known_names())
    module, number = point.module, point.call
    if not module:
        raise no_layer(request, trace.known_names())
    calls = trace.by_module.get(trace.names[module], [])
    if not calls:
        raise LayerError(
            f"the layer {module!r} exists but is not called in the forward pass, so nothing can be "
            "captured there (nn.MultiheadAttention uses its out_proj without calling it, for one). "
            "Choose the module around it; job=layers lists what is called."
        )
    if number is None and len(calls) > 1:
        choices = ", ".join(
            f"{with_capture(f'{module}@{call.number}', capture)} {_shapes(call)}" for call in calls
        )
        raise LayerError(
            f"the layer {module!r} is called {len(calls)} times in one forward pass; name one of "
            f"its calls: {choices}."
        )
    if number is not None and not 1 <= number <= len(calls):
        raise LayerError(
            f"{request!r}: {module} is called {counted(len(calls), 'time')}, counted from 1."
        )
    call = calls[(number or 1) - 1]
    tensors = call.tensors(point.capture)
    if point.path and list(call.outputs) == [()] and "output" in point.capture:
        # layer4.7, where the output of layer4 is a single tensor, is a mistyped module name.
        raise no_layer(layer, trace.known_names())
    if point.capture == "attention" and not tensors:
        raise _no_attention(call, trace)
    _check_element(request, tensors, point.path, trace.batch_size)
    return point


def _operation_point(request: str, trace: Trace) -> CapturePoint | None:
    """The capture point of an operation, or None if the name means a module or its element."""
    parsed = parse_operation(request)
    if parsed is None:
        return None
    name, capture, path = parsed
    operation = trace.by_operation.get(name)
    if operation is None or name in trace.names:
        return None
    key = name.rpartition(".")[2]
    calls = trace.by_module.get(operation.module, [])
    if any(way[:1] == (key,) for call in calls for way in call.outputs):
        return None
    check_operation_capture(request, capture)
    _check_element(request, operation.outputs, path, trace.batch_size)
    named = with_capture(name + element_name(path), capture)
    return CapturePoint(named, operation.module, capture, None, path, name)


def _no_attention(call: Call, trace: Trace) -> LayerError:
    """The error for a module without attention weights; it says where they can be found."""
    softmax = f"{call.module}.softmax"
    modules_below = [
        other.module
        for other in trace.calls
        if other.attention and other.module.startswith(f"{call.module}.")
    ]
    softmax_operation = trace.by_operation.get(softmax)
    if softmax_operation is not None and softmax_operation.outputs[()][0] != trace.batch_size:
        hint = (
            f"Its weights are the output of the operation {softmax!r}, "
            f"{softmax_operation.outputs[()]} for a batch of {trace.batch_size}: these are "
            "windows, which cannot be assigned to images."
        )
    elif softmax_operation is not None:
        hint = f"Its weights are what its softmax gives: name the operation {softmax!r}."
    elif modules_below:
        hint = f"Attention modules below it: {', '.join(modules_below)}."
    else:
        hint = (
            "Attention modules are nn.MultiheadAttention and those of timm; elsewhere name the "
            "softmax operation: job=layers lists operations."
        )
    return LayerError(
        f"{call.module}:attention: featx cannot read the attention weights of a "
        f"{call.type_name}. {hint}"
    )


def embedding_point(trace: Trace, classifier: str | None) -> CapturePoint:
    """The capture point of the vector before the classifier.

    It is the library's own embedding if it defines one, otherwise the input of the classifier.
    """
    if trace.library_embedding is not None:
        return trace.library_embedding[0]
    if classifier is None:
        classifier = last_linear(trace)
        if classifier is None:
            leaves = [call for call in trace.calls if call.is_leaf and call.num_parameters]
            last = leaves[-1].module if leaves else "none"
            raise LayerError(
                f"the preset embedding needs a model that ends in a linear layer; the last layer "
                f"with parameters here is {last}. Name a layer: job=layers lists them."
            )
        if classifier == trace.undecided:
            raise LayerError(
                "the preset embedding is the input of the classifier. The last linear layer of "
                f"this model, {classifier}, is not its classifier: the output of the model does "
                "not depend on the image through that layer only. Name a layer: job=layers lists "
                "them."
            )
    calls = trace.by_module.get(trace.names.get(classifier, classifier), [])
    if len(calls) != 1:
        raise LayerError(
            f"the preset embedding is the input of {classifier}, which is called {len(calls)} "
            "times in one forward pass. Name a layer: job=layers lists them."
        )
    _check_element(f"the input of {classifier}", calls[0].inputs, (), trace.batch_size)
    return CapturePoint("embedding", classifier, "input")


def _output_points(request: str, trace: Trace, left_out: list[str]) -> Iterator[CapturePoint]:
    """The capture points of what the model returns: its logits or each of its tensors.

    Adds to `left_out`.
    """
    number, outputs = _returned(request, trace)
    logits = outputs.keys() & {(), ("logits",)}
    rows = {path for path, shape in outputs.items() if shape[:1] == (trace.batch_size,)}
    chosen = [path for path in outputs if path in ((rows & logits) or rows)]
    if not chosen:
        raise LayerError(
            f"the preset output found no row per image in what the model returns: {outputs}. Name "
            "a layer: job=layers lists them."
        )
    left_out.extend(f"output{element_name(path)}" for path in outputs if path not in chosen)
    for path in chosen:
        name = "output" if len(chosen) == 1 else f"output{element_name(path)}"
        yield CapturePoint(name, "", "output", number, path)


def _returned(
    request: str, trace: Trace
) -> tuple[int | None, Mapping[ElementPath, tuple[int, ...]]]:
    """The number of the call of the model itself, and the tensors that it returned."""
    if split_capture(request)[1] != "output":
        raise LayerError(f"{request!r}: the preset output is what the model returns. Name a layer.")
    calls = trace.by_module[""]  # several of a model that calls itself; the last is the outermost
    return calls[-1].number if len(calls) > 1 else None, calls[-1].outputs


def last_linear(trace: Trace) -> str | None:
    """Name of the last layer with parameters if it is linear or a 1 x 1 convolution, or None."""
    leaves = [call for call in trace.calls if call.is_leaf and call.num_parameters]
    return leaves[-1].module if leaves and leaves[-1].is_linear else None


def _every_point(
    trace: Trace, leaves_only: bool, capture: str, left_out: list[str]
) -> Iterator[CapturePoint]:
    """Capture points of all layers, for the presets `all` and `leaves`; adds to `left_out`."""
    for call in trace.calls:
        if not call.module or (leaves_only and not call.is_leaf and capture != "attention"):
            continue
        if capture == "attention" and not call.attention:
            continue
        stem = trace.call_name(call)
        tensors = call.tensors(capture)
        single = len(tensors) == 1
        if not single and any(stem + element_name(path) in trace.names for path in tensors):
            stem = f"{call.module}@{call.number}"  # an element that is named like a module inside
        if not tensors:
            left_out.append(f"{with_capture(stem, capture)} (no tensor)")
        for path, shape in tensors.items():
            name = with_capture(stem if single else stem + element_name(path), capture)
            if not shape or shape[0] != trace.batch_size:
                left_out.append(f"{name} {shape} (the first dimension is not the batch)")
            else:
                number = None if stem == call.module else call.number
                yield CapturePoint(name, call.module, capture, number, () if single else path)


def _glob_points(
    glob: str, capture: str, trace: Trace, left_out: list[str]
) -> Iterator[CapturePoint]:
    """Capture points of the modules that a glob matches, or of operations if no module matches."""
    pattern = re.compile(glob_to_regex(glob))
    known = trace.known_names()
    names = {name: name for name in known if pattern.fullmatch(name)} or {
        short: name
        for name in known
        if pattern.fullmatch(short := without_wrappers(name)) and short
    }
    modules = {name: trace.names[full] for name, full in names.items() if full in trace.names}
    if names and not modules:
        yield from (named_point(with_capture(name, capture), trace) for name in names)
        return
    called = [name for name, module in modules.items() if module in trace.by_module]
    if not called:
        what = "names only layers that are never called" if names else "matches no layer"
        raise LayerError(
            f"the glob {glob!r} {what} of this model (* stays within one part of a dotted "
            f"name, ** crosses dots).{nearest(glob.replace('*', ''), known)} "
            "job=layers lists every layer."
        )
    left_out.extend(f"{name} (never called)" for name in modules if name not in called)
    order = {call.module: i for i, call in reversed(list(enumerate(trace.calls)))}
    for name in sorted(called, key=lambda name: order[modules[name]]):
        yield named_point(with_capture(_module_request(name, trace), capture), trace)


def _module_request(name: str, trace: Trace) -> str:
    """The name to write for a module: with @1 if a preset has the same name."""
    is_single = len(trace.by_module.get(trace.names.get(name, name), ())) == 1
    return f"{name}@1" if name in PRESETS and is_single else name


def _check_element(
    request: str,
    elements: Mapping[ElementPath, tuple[int, ...]],
    path: ElementPath,
    batch_size: int,
) -> None:
    shape = elements[pick_path(request, elements, path)]
    if not shape or shape[0] != batch_size:
        raise LayerError(
            f"{request} has shape {shape} for a batch of {batch_size}: its first dimension is not "
            "the batch, so it has no row per image. Choose a layer around it."
        )


def _embedding_reduce(point: CapturePoint, reduce: ReduceConfig, trace: Trace) -> ReduceConfig:
    """The reduction that makes the embedding a vector.

    The input of a convolutional classifier is a map, which is averaged.
    """
    if trace.library_embedding is not None:
        return ReduceConfig(trace.library_embedding[1])
    call = trace.by_module[trace.names.get(point.module, point.module)][0]
    shape = next(iter(call.inputs.values()))
    if len(shape) == 2:
        return reduce
    return ReduceConfig("flatten" if set(shape[2:]) == {1} else "avg")


def _shapes(call: Call) -> str:
    return " ".join(str(shape[1:]) for shape in call.outputs.values())
