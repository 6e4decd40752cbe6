"""The names of layers as users write them, taken apart without a look at what the model does.

layer4              the module's output
relu@2              its second call, where a module is called several times
stages@1            a module that is named like a preset; stages alone is the preset
encoder[0]  blk.h   one element of a tuple or a dict
layer*              a glob: * within one part of a dotted name, ** across parts
layer4:input        what goes into the layer, instead of what comes out; also behind a glob
layer4:grad_output  the gradient of the target where it comes out, :grad_input where it goes in
blocks.3.attn:attention  the weights of an attention module, (N, heads, T, T)
layer1.0.add        an operation that no module owns, named as torch.fx names it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from featx.base.nested_tensors import Path
from featx.config import CAPTURES, PRESETS
from featx.errors import LayerError, nearest
from featx.layers.trace import CapturePoint


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


def with_capture(name: str, capture: str) -> str:
    """The dataset's name: what is not an output has its kind appended."""
    return name if capture == "output" else f"{name}:{capture}"


def parse_tap(
    request: str, names: Mapping[str, str], known_names: Sequence[str] | None = None
) -> CapturePoint:
    """The tap of one exact name, with its @call and its way into a nested output.

    Args:
        request: as the user wrote it.
        names: every module name of the model -> its first name.
        known_names: what a message may propose, the modules where not given.

    Raises:
        LayerError: the model has no such module.
    """
    known_names = list(names) if known_names is None else known_names
    name, capture = split_capture(request)
    module, rest = _split(name, names)
    found = re.fullmatch(r"(?:@(\d+))?((?:\[\d+\]|\.\w+)*)", rest)
    if not module or found is None:
        raise no_layer(name, known_names)
    path = tuple(
        int(step[1:-1]) if step.startswith("[") else step[1:]
        for step in re.findall(r"\[\d+\]|\.\w+", found.group(2))
    )
    call = int(found.group(1)) if found.group(1) else None
    return CapturePoint(with_capture(name, capture), module, capture, call, path)


def parse_operation(request: str) -> tuple[str, str, Path] | None:
    """'blk.chunk[1]:grad_output' -> ('blk.chunk', 'grad_output', (1,)), or None for another form.

    Raises:
        LayerError: there is no such kind of capture.
    """
    name, capture = split_capture(request)
    found = re.fullmatch(r"([\w.-]+?)((?:\[\d+\])*)", name)
    if found is None:
        return None
    path = tuple(int(step) for step in re.findall(r"\d+", found.group(2)))
    return found.group(1), capture, path


def check_operation_capture(request: str, capture: str) -> None:
    """Raise a LayerError where an operation has no such kind of capture."""
    if capture not in ("output", "grad_output"):
        raise LayerError(
            f"{request!r}: that is an operation, no module; it has an output and a grad_output, "
            f"and no {capture}. Name the layer or the operation before it."
        )


def no_layer(request: str, names: Sequence[str]) -> LayerError:
    """What to raise where a model has no such name; the nearest of `names` are told."""
    return LayerError(
        f"there is no layer {request!r} in this model."
        f"{nearest(request, [name for name in names if name])} "
        f"The presets are {', '.join(PRESETS)}; job=layers lists every layer."
    )


def _split(request: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The longest module name the request begins with, and the rest."""
    for end in range(len(request), 0, -1):
        if request[:end] in names and (end == len(request) or request[end] in "@[."):
            return request[:end], request[end:]
    return "", request
