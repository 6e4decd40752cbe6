"""Syntax of layer names in the option `layers`, and the capture point that a name means.

Names are parsed without knowledge of the model's output.

layer4                   the output of the module; '' is the model itself
relu@2                   its second call, for a module that is called several times
stages@1                 a module that is named like a preset; `stages` alone is the preset
encoder[0]  blk.h        one element of a tuple or a dict
layer*                   a glob: * within one part of a dotted name, ** across parts
layer4:input             the input of the layer instead of its output; also after a glob
layer4:grad_output       the gradient of the target at the output, :grad_input at the input
blocks.3.attn:attention  the weights of an attention module, (N, heads, T, S)
layer1.0.add             an operation in a module's forward, named as in torch.fx
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from featx.base import ElementPath, check_is_module, family, refuse_scripted
from featx.config import CAPTURES, GRADIENTS, PRESETS
from featx.errors import LayerError, nearest
from featx.layers.operations import is_function_name

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Class name of a wrapper -> name of the module in it."""


def element_name(path: ElementPath) -> str:
    """Name of an element of a nested value: ('hidden', 0) -> '.hidden[0]'."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


@dataclass(frozen=True)
class CapturePoint:
    """One tensor of a forward pass.

    Attributes:
        name: name of the dataset.
        module: dotted name of the module; for an operation, of the module whose forward calls it.
        capture: kind of capture: 'output' or 'input' of the module, 'grad_output' or 'grad_input'
            for gradients there, 'attention' for the weights of an attention module; for
            job=attribute a description of the method.
        call: number of the call of the module, from 1; None if there is only one.
        path: path into a nested output, () for a tensor or the only tensor in it.
        operation: full name of the operation, '' for a module.
        dtype: dtype of the dataset if it differs from the option `dtype`, otherwise None.
    """

    name: str
    module: str
    capture: str = "output"
    call: int | None = None
    path: ElementPath = ()
    operation: str = ""
    dtype: str | None = None

    @property
    def layer(self) -> str:
        """Dotted name of the module or the operation."""
        return self.operation or self.module

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is a gradient, computed in the backward pass."""
        return self.capture in GRADIENTS


def pick_path(
    request: str, elements: Mapping[ElementPath, tuple[int, ...]], path: ElementPath
) -> ElementPath:
    """Path to the one tensor that is meant; () means the only tensor there is."""
    if path in elements:
        return path
    for element in elements:  # keys may have dots
        if element_name(element) == element_name(path):
            return element
    if path == () and len(elements) == 1:
        return next(iter(elements))
    listed = ", ".join(f"{element_name(p)} {s}" for p, s in elements.items())
    name, colon, capture = request.partition(":")
    plain = name.removesuffix(element_name(path)) or "the model"
    gives = "takes" if capture in ("input", "grad_input") else "gives"
    first = element_name(next(iter(elements), ()))
    example = name.removesuffix(element_name(path)) + first + colon + capture
    if list(elements) == [()]:
        raise LayerError(f"{request}: {plain} gives one tensor {elements[()]}, without elements.")
    raise LayerError(
        f"{plain} {gives} {len(elements)} tensors ({listed or 'none'}); "
        + (f"name one of them, such as {example!r}." if elements else "choose another layer.")
    )


def split_capture(request: str) -> tuple[str, str]:
    """Split a request: 'layer4:input' -> ('layer4', 'input'), 'layer4' -> ('layer4', 'output')."""
    name, colon, capture = request.partition(":")
    if colon and capture not in CAPTURES:
        kind, bracket, index = capture.partition("[")
        if bracket and kind in CAPTURES:
            right = f"{name}{bracket}{index}:{kind}"
            raise LayerError(f"{request!r}: an element stands before the colon: {right!r}.")
        reduction = capture.strip() if capture.strip() in family("reduce") else "avg"
        raise LayerError(
            f"{request!r}: expected one of {', '.join(CAPTURES)} after the colon."
            f"{nearest(capture, CAPTURES)} A reduction, in the option `layers` only, is written "
            f"in braces: 'layers={{{name}: {reduction}}}'."
        )
    return name, capture or "output"


def with_capture(name: str, capture: str) -> str:
    """Name of a dataset: the name of the layer, with the kind of capture unless it is 'output'."""
    return name if capture == "output" else f"{name}:{capture}"


def parse_capture_point(
    request: str, names: Mapping[str, str], known_names: Sequence[str] | None = None
) -> CapturePoint:
    """Parse one exact name of a module, with its call number and its path into a nested output.

    `known_names` are those of layers that a run can store; None in the user's own loop.
    """
    name, capture = split_capture(request)
    module, rest = split_name(name, names)
    match = re.fullmatch(r"(?:@(\d+))?((?:\[\d+\]|\.[^.@[\]]+)*)", rest)
    if match is None:
        raise no_layer(name, known_names) if known_names is not None else _no_module(name, names)
    path = tuple(
        int(step[1:-1]) if step.startswith("[") else step[1:]
        for step in re.findall(r"\[\d+\]|\.[^.[]+", match.group(2))
    )
    call = int(match.group(1)) if match.group(1) else None
    return CapturePoint(with_capture(name, capture), module, capture, call, path)


def parse_points(model: nn.Module, layers: Sequence[str]) -> list[CapturePoint]:
    """Parse names of layers of a model for its hooks, without a forward pass.

    `block.mean` may be an element of a dict or the operation mean(); only a forward pass shows
    which, so there are two points of this name. Names do not need the parts that wrappers add.
    """
    check_is_module(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    is_module = isinstance(layers, nn.Module) or not isinstance(layers, Iterable)
    given = [] if is_module else list(layers)  # once: it may be a generator
    if is_module or not all(isinstance(layer, str) for layer in given):
        raise LayerError(
            "layers are given by their names, such as "
            f"{[name for name in modules if name][-1:]}; model.named_modules() lists them."
        )
    names = {without_wrappers(name): name for name in modules} | {name: name for name in modules}
    names[""] = _held_name(names[""], modules)
    first_names = {module: name for name, module in model.named_modules()}
    points = []
    requests = dict.fromkeys(layer.removesuffix(":output") for layer in given)
    for point in (point for layer in requests for point in _parse_point(layer, names)):
        name = names[point.module]
        if point.operation or point.capture == "attention":
            # These belong to the module inside wrappers, and are seen under its first name.
            name = first_names[modules[_held_name(name, modules)]]
        operation = point.operation and _child(name, point.operation)
        points.append(replace(point, module=name, operation=operation))
    refuse_scripted({name: modules[name] for name in ["", *(point.module for point in points)]})
    return points


def without_wrappers(name: str) -> str:
    """Dotted name of a module without the parts that DDP, torch.compile and others add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS.values())


def _held_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Name of the module that is inside a wrapper; that of any other module stays."""
    while True:
        # fully_shard makes a subclass of the class of each module.
        classes = {each.__name__ for each in type(modules[name]).__mro__}
        held = [child for wrapper, child in _WRAPPERS.items() if wrapper in classes]
        if not held:
            return name
        name = _child(name, held[0])


def _child(module: str, name: str) -> str:
    """Dotted name of a module or operation in a module, from another name of it."""
    return f"{module}.{name.rpartition('.')[2]}".removeprefix(".")


def _parse_point(layer: str, names: Mapping[str, str]) -> list[CapturePoint]:
    """The capture points that a name may mean."""
    if "*" in layer and layer not in names:
        raise LayerError(
            f"{layer!r}: a pattern works in the option `layers` only. Name each layer; "
            "model.named_modules() lists them."
        )
    name, capture, path = parse_operation(layer) or ("", "", ())
    module, _, operation_name = name.rpartition(".")
    if (
        not operation_name
        or name in names
        or module not in names
        or not is_function_name(operation_name)
    ):
        return [parse_capture_point(layer, names)]
    operation = CapturePoint(layer, module, capture, None, path, name)
    if not module:
        check_operation_capture(layer, capture)
        return [operation]
    element = parse_capture_point(layer, names)
    return [element, operation] if capture in ("output", "grad_output") else [element]


def parse_operation(request: str) -> tuple[str, str, ElementPath] | None:
    """Parse the name of an operation.

    'blk.chunk[1]:grad_output' becomes ('blk.chunk', 'grad_output', (1,)).
    """
    name, capture = split_capture(request)
    match = re.fullmatch(r"([\w.-]+?)((?:\[\d+\])*)", name)
    if match is None:
        return None
    path = tuple(int(step) for step in re.findall(r"\d+", match.group(2)))
    return match.group(1), capture, path


def check_operation_capture(request: str, capture: str) -> None:
    """Check that an operation can be captured in this way."""
    if capture not in ("output", "grad_output"):
        raise LayerError(
            f"{request!r}: this is an operation, which has an output and a grad_output but no "
            f"{capture}. Name the layer or the operation before it."
        )


def no_layer(request: str, names: Sequence[str]) -> LayerError:
    """The exception for an unknown name, with the nearest of `names`."""
    return LayerError(
        f"there is no layer {request!r} in this model."
        f"{nearest(request, [*(name for name in names if name), *PRESETS])} "
        f"The presets are {', '.join(PRESETS)}; job=layers lists every layer."
    )


def _no_module(request: str, names: Iterable[str]) -> LayerError:
    """The exception for an unknown name in the user's own loop, where there are no presets."""
    advice, near = "", nearest(request, filter(None, names))
    if request in PRESETS:
        advice = " Presets work in the option `layers` only; '' is what the model returns."
    elif request.isidentifier() and not near:
        advice = f" An element of what the model returns has a dot before its name: '.{request}'."
    return LayerError(
        f"there is no layer {request!r} in this model.{near} Names are those of "
        f"model.named_modules().{advice}"
    )


def split_name(request: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The longest module name with which the request begins, and the rest."""
    for end in range(len(request), 0, -1):
        if request[:end] in names and (end == len(request) or request[end] in "@[."):
            return request[:end], request[end:]
    return "", request
