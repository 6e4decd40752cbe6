"""Layer names, globs and presets -> taps: what exactly is taken from one model.

Everything is decided on a Trace, the record of one forward pass; nothing here runs a model.

    layer4              the module's output
    relu@2              its second call, where a module is called several times
    encoder[0]  blk.h   one element of a tuple or a dict
    layer*              a glob: * within one part of a dotted name, ** across parts
    layer4:input        what goes into the layer, instead of what comes out; also behind a glob
    layer4:grad_output  the gradient of the target where it comes out, :grad_input where it goes in
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from featx.config import CAPTURES, GRADIENTS, PRESETS, ReduceConfig
from featx.errors import ConfigError, LayerError, nearest

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Tap:
    """One tensor of the forward pass.

    Attributes:
        name: of the dataset.
        module: dotted name.
        capture: 'output' or 'input' of the module, or 'grad_output', 'grad_input': gradients there;
            of job=attribute a description of the method.
        call: which call of the forward, from 1; None where there is one only.
        path: the way into a nested output, () for a tensor or the only tensor in it.
        dtype: of the dataset, where the key `dtype` does not say.
    """

    name: str
    module: str
    capture: str = "output"
    call: int | None = None
    path: Path = ()
    dtype: str | None = None

    @property
    def is_gradient(self) -> bool:
        """Whether it is taken in the backward pass."""
        return self.capture in GRADIENTS


@dataclass(frozen=True)
class Call:
    """One call of one module in the trace.

    Attributes:
        module: its dotted name.
        number: 1 for the first call of this module.
        type_name: the module's class.
        is_leaf: it has no sub-modules.
        is_linear: nn.Linear, or a 1 x 1 convolution.
        num_parameters: of the module and all below it.
        outputs, inputs: way into the value -> shape, batch included.
        mflops: millions of floating-point operations per image, two for a multiply-add.
    """

    module: str
    number: int
    type_name: str
    is_leaf: bool
    is_linear: bool
    num_parameters: int
    outputs: Mapping[Path, tuple[int, ...]]
    inputs: Mapping[Path, tuple[int, ...]]
    mflops: float = 0.0

    def tensors(self, capture: str) -> Mapping[Path, tuple[int, ...]]:
        """What a kind of capture finds there: way into the value -> shape."""
        return self.outputs if capture in ("output", "grad_output") else self.inputs


@dataclass(frozen=True)
class Trace:
    """One forward pass: every module call, in the order in which the calls ended.

    Attributes:
        calls: the root module last.
        names: every name of every module, shared ones under each name, -> its first name.
        batch_size: of the pass.
    """

    calls: Sequence[Call]
    names: Mapping[str, str]
    batch_size: int
    by_module: dict[str, list[Call]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.calls:
            self.by_module.setdefault(call.module, []).append(call)


@dataclass
class Selection:
    """What `select` found: taps with their reductions, and what presets and globs left out."""

    chosen: list[tuple[Tap, ReduceConfig]]
    left_out: list[str]


def element_name(path: Path) -> str:
    """('hidden', 0) -> '.hidden[0]'."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def select(
    requests: Sequence[tuple[str, ReduceConfig]],
    trace: Trace,
    classifier: str | Sequence[str] | None,
    stages: Sequence[str] | None,
) -> Selection:
    """The taps for a list of names, globs and presets, in the order of the requests.

    Raises:
        LayerError: a name does not exist, does not fire, fires several times, or is ambiguous.
        ConfigError: one layer is asked for with two reductions.
    """
    selection = Selection([], [])
    seen: dict[str, ReduceConfig] = {}
    for request, reduce in requests:
        for tap in _taps(request, trace, classifier, stages, selection.left_out):
            if tap.name not in seen:
                seen[tap.name] = reduce
                selection.chosen.append((tap, _embedding_reduce(tap, reduce, trace)))
            elif seen[tap.name] != reduce:
                raise ConfigError(
                    f"layers asks for {tap.name} with reduce={seen[tap.name].name} and with "
                    f"reduce={reduce.name}; one store holds a layer once."
                )
    return selection


def _taps(
    request: str,
    trace: Trace,
    classifier: str | Sequence[str] | None,
    stages: Sequence[str] | None,
    left_out: list[str],
) -> Iterator[Tap]:
    name, capture = split_capture(request)
    if name in PRESETS and name not in trace.names:
        if name == "embedding":
            if capture != "output":
                raise LayerError(
                    f"{request!r}: the preset embedding is a vector of its own, the input of the "
                    f"classifier; capture={capture} needs the name of a layer."
                )
            yield embedding_tap(trace, classifier)
        elif name == "stages":
            found = list(stages) if stages is not None else find_stages(trace)
            yield from (named_tap(_with_capture(stage, capture), trace) for stage in found)
        else:
            yield from _every_tap(trace, name == "leaves", capture, left_out)
    elif any(sign in name for sign in "*?"):
        yield from _globbed(name, capture, trace, left_out)
    else:
        yield named_tap(request, trace)


def split_capture(request: str) -> tuple[str, str]:
    """'layer4:input' -> ('layer4', 'input'), 'layer4' -> ('layer4', 'output').

    Raises:
        LayerError: there is no such kind of capture.
    """
    name, colon, capture = request.partition(":")
    if colon and capture not in CAPTURES:
        raise LayerError(
            f"{request!r}: behind the colon stands what to capture, one of {', '.join(CAPTURES)}."
        )
    return name, capture or "output"


def _with_capture(name: str, capture: str) -> str:
    """The dataset's name: what is not an output has its kind appended."""
    return name if capture == "output" else f"{name}:{capture}"


def parse_tap(request: str, names: Mapping[str, str]) -> Tap:
    """The tap of one exact name, with its @call and its way into a nested output.

    Args:
        request: as the user wrote it.
        names: every module name of the model -> its first name.

    Raises:
        LayerError: the model has no such module.
    """
    name, capture = split_capture(request)
    module, rest = _split(name, names)
    found = re.fullmatch(r"(?:@(\d+))?((?:\[\d+\]|\.\w+)*)", rest)
    if not module or found is None:
        raise _no_layer(name, names)
    path = tuple(
        int(step[1:-1]) if step.startswith("[") else step[1:]
        for step in re.findall(r"\[\d+\]|\.\w+", found.group(2))
    )
    call = int(found.group(1)) if found.group(1) else None
    return Tap(_with_capture(name, capture), module, capture, call, path)


def named_tap(request: str, trace: Trace) -> Tap:
    """`parse_tap`, checked against what the trace saw.

    Raises:
        LayerError: see `select`.
    """
    tap = parse_tap(request, trace.names)
    module, number = tap.module, tap.call
    calls = trace.by_module.get(trace.names[module], [])
    if not calls:
        raise LayerError(
            f"the layer {module!r} exists but is not called in the forward pass, so nothing can be "
            "captured there (nn.MultiheadAttention uses its out_proj without calling it, for one). "
            "Choose the module around it; job=layers lists what is called."
        )
    if number is None and len(calls) > 1:
        choices = ", ".join(f"{module}@{call.number} {_shapes(call)}" for call in calls)
        raise LayerError(
            f"the layer {module!r} is called {len(calls)} times in one forward pass; name one of "
            f"its calls: {choices}."
        )
    if number is not None and not 1 <= number <= len(calls):
        raise LayerError(f"{request!r}: {module} is called {len(calls)} times, counted from 1.")
    call = calls[(number or 1) - 1]
    tensors = call.tensors(tap.capture)
    if tap.path and list(call.outputs) == [()] and "output" in tap.capture:
        raise _no_layer(request, trace.names)  # layer4.7, where layer4 is one tensor: a typo
    _check_element(request, tensors, tap.path, trace.batch_size)
    return tap


def _no_layer(request: str, names: Mapping[str, str]) -> LayerError:
    return LayerError(
        f"there is no layer {request!r} in this model."
        f"{nearest(request, [name for name in names if name])} "
        f"The presets are {', '.join(PRESETS)}; job=layers lists every layer."
    )


def pick_path(request: str, elements: Mapping[Path, tuple[int, ...]], path: Path) -> Path:
    """The way to the one tensor meant; () means the only one there is.

    Args:
        request: for the message.
        elements: the ways into a nested value -> shape.
        path: what was asked for.

    Raises:
        LayerError: it is not there, or () and there are several; the message lists them.
    """
    if path in elements:
        return path
    if path == () and len(elements) == 1:
        return next(iter(elements))
    listed = ", ".join(f"{element_name(p)} {s}" for p, s in elements.items())
    name, colon, capture = request.partition(":")
    plain = name.removesuffix(element_name(path))
    gives = "takes" if colon else "gives"
    example = plain + element_name(next(iter(elements), ())) + colon + capture
    if list(elements) == [()]:
        raise LayerError(f"{request}: {plain} gives one tensor {elements[()]}, without elements.")
    raise LayerError(
        f"{plain} {gives} {len(elements)} tensors ({listed or 'none'}); "
        + (f"name one of them, such as {example!r}." if elements else "choose another layer.")
    )


def embedding_tap(trace: Trace, classifier: str | Sequence[str] | None) -> Tap:
    """The pre-logits vector: what goes into the classifier, or else into the last linear layer.

    Raises:
        LayerError: there is no such layer.
    """
    if classifier is not None and not isinstance(classifier, str):
        raise LayerError(
            f"the preset embedding is the input of the classifier, and this model has "
            f"{len(classifier)}: {', '.join(classifier)}. Name a layer: job=layers lists them."
        )
    if classifier is None:
        leaves = [call for call in trace.calls if call.is_leaf and call.num_parameters]
        if not leaves or not leaves[-1].is_linear:
            last = leaves[-1].module if leaves else "none"
            raise LayerError(
                f"the preset embedding needs a model that ends in a linear layer; the last layer "
                f"with parameters here is {last}. Name a layer: job=layers lists them."
            )
        classifier = leaves[-1].module
    calls = trace.by_module.get(trace.names.get(classifier, classifier), [])
    if len(calls) != 1:
        raise LayerError(
            f"the preset embedding is the input of {classifier}, which is called {len(calls)} "
            "times in one forward pass. Name a layer: job=layers lists them."
        )
    _check_element(f"the input of {classifier}", calls[0].inputs, (), trace.batch_size)
    return Tap("embedding", classifier, "input")


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


def _every_tap(trace: Trace, leaves_only: bool, capture: str, left_out: list[str]) -> Iterator[Tap]:
    for call in trace.calls:
        if not call.module or (leaves_only and not call.is_leaf):
            continue
        several = len(trace.by_module[call.module]) > 1
        stem = f"{call.module}@{call.number}" if several else call.module
        tensors = call.tensors(capture)
        single = len(tensors) == 1
        if not tensors:
            left_out.append(f"{_with_capture(stem, capture)} (no tensor)")
        for path, shape in tensors.items():
            name = _with_capture(stem if single else stem + element_name(path), capture)
            if not shape or shape[0] != trace.batch_size:
                left_out.append(f"{name} {shape} (the batch is not in front)")
            else:
                number = call.number if several else None
                yield Tap(name, call.module, capture, number, () if single else path)


def _globbed(glob: str, capture: str, trace: Trace, left_out: list[str]) -> Iterator[Tap]:
    pattern = re.compile(_glob_to_regex(glob))
    matches = [name for name in trace.names if name and pattern.fullmatch(name)]
    fired = [name for name in matches if trace.names[name] in trace.by_module]
    if not fired:
        what = "names only layers that are never called" if matches else "matches no layer"
        known = [name for name in trace.names if name]
        raise LayerError(
            f"the glob {glob!r} {what} of this model (* stays within one part of a dotted "
            f"name, ** crosses dots).{nearest(glob.replace('*', ''), known)} "
            "job=layers lists every layer."
        )
    left_out.extend(f"{name} (never called)" for name in matches if name not in fired)
    order = {call.module: i for i, call in reversed(list(enumerate(trace.calls)))}
    for name in sorted(fired, key=lambda name: order[trace.names[name]]):
        yield named_tap(_with_capture(name, capture), trace)


def _glob_to_regex(glob: str) -> str:
    parts = {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    pieces = re.split(r"(\*\*|\*|\?)", glob)
    return "".join(parts.get(piece, re.escape(piece)) for piece in pieces)


def _split(request: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The longest module name the request begins with, and the rest."""
    for end in range(len(request), 0, -1):
        if request[:end] in names and (end == len(request) or request[end] in "@[."):
            return request[:end], request[end:]
    return "", request


def _check_element(
    request: str, elements: Mapping[Path, tuple[int, ...]], path: Path, batch_size: int
) -> None:
    shape = elements[pick_path(request, elements, path)]
    if not shape or shape[0] != batch_size:
        raise LayerError(
            f"{request} has shape {shape} for a batch of {batch_size}: the batch is not in front, "
            "so its rows cannot be told apart. Choose a layer around it."
        )


def _embedding_reduce(tap: Tap, reduce: ReduceConfig, trace: Trace) -> ReduceConfig:
    """An embedding is a vector: a map in front of a convolutional classifier is averaged."""
    if tap.name != "embedding" or tap.capture != "input" or reduce.name != "none":
        return reduce
    call = trace.by_module[trace.names.get(tap.module, tap.module)][0]
    shape = next(iter(call.inputs.values()))
    if len(shape) == 2:
        return reduce
    return ReduceConfig("flatten" if set(shape[2:]) == {1} else "avg")


def _shapes(call: Call) -> str:
    return " ".join(str(shape[1:]) for shape in call.outputs.values())


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
