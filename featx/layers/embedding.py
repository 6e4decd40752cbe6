"""Evidence for the presets `embedding` and `stages`, from forward passes instead of layer names.

Some libraries define the embedding of their models (timm: `forward_head(..., pre_logits=True)`). It
is computed, and the tensors of a plain forward pass that equal it are found. For other models, the
last linear layer counts as the classifier only if the output of the model depends on the image
through that layer alone.

Stages that timm names but that are no modules with one tensor are found in the same way, as the
tensors that equal `forward_intermediates`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from featx.base import ElementPath, ModuleHooks, elements
from featx.errors import LayerError
from featx.layers.call_hooks import OpenCall, every_call
from featx.layers.layer_names import CapturePoint, element_name
from featx.layers.operations import OperationRecorder, hide_operations
from featx.layers.selection import last_linear
from featx.layers.tracer import Trace
from featx.models import LibraryEmbedding

_ROUNDING = 1e-6
"""Largest accepted difference to the library's embedding, relative to its largest magnitude.

Both come from the same kernels, so nearly all are equal in every bit. A BatchNorm with its initial
statistics changes values by 5e-6 and must not be taken for the identity.
"""


def with_evidence(
    trace: Trace, module: nn.Module, x: torch.Tensor, library: LibraryEmbedding | None
) -> Trace:
    """Add to a trace what the preset `embedding` needs beyond names and shapes.

    Args:
        trace: trace of `module`.
        module: model in eval mode.
        x: (B, 3, H, W) noise, B at least 2. The last image is replaced by a smooth one, as
            photographs are smooth.
        library: the embedding as defined by the model's library, or None.

    Returns:
        The trace with `library_embedding` or `undecided`.

    Raises:
        LayerError: the library's embedding is no vector, is equal for different images, or is no
            tensor of the forward pass.
    """
    # The last image is 4 x 4 averages, interpolated, with variance 1.
    height, width = x.shape[2:]
    coarse = F.adaptive_avg_pool2d(x[-1:], 4)
    smooth = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    x = torch.cat([x[:-1], smooth / smooth.std()])
    with torch.no_grad():
        if library is None:
            candidate = last_linear(trace)
            undecided = candidate is not None and not _decides(module, candidate, x)
            return replace(trace, undecided=candidate if undecided else None)
        expected = _library_embedding(library, x)
        match = _best_match(module, x, expected)
        if match is None:
            # The embedding is no tensor of the plain pass, such as the mean of two tokens.
            library.expose()
            match = _best_match(module, x, expected)
    if match is None:
        raise LayerError(
            "the preset embedding: the library's own embedding of this model is not a tensor of "
            "its forward pass. Name a layer: job=layers lists them."
        )
    several = not match.operation and len(trace.by_module.get(match.module, ())) > 1
    number = match.number if several else None
    point = CapturePoint(
        "embedding", match.module, match.capture, number, match.path, match.operation
    )
    return replace(trace, library_embedding=(point, "none" if match.is_vector else "flatten"))


def is_exposed(trace: Trace) -> bool:
    """Return whether the library's embedding is the output of a module added after the trace."""
    embedding = trace.library_embedding
    return embedding is not None and embedding[0].module not in trace.names


def _library_embedding(library: LibraryEmbedding, x: torch.Tensor) -> torch.Tensor:
    """(B, D) embedding as the library computes it."""
    embedding = library.compute(x.clone())
    if not isinstance(embedding, torch.Tensor) or embedding.dim() != 2 or len(embedding) != len(x):
        what = f"a {type(embedding).__name__}"
        if isinstance(embedding, torch.Tensor):
            what = f"rows of shape {tuple(embedding.shape[1:])}"
        raise LayerError(
            "the preset embedding is a vector, and the library's own embedding of this model is "
            f"{what}. Name a layer with a reduction: job=layers lists them."
        )
    if not torch.isfinite(embedding).all() or torch.equal(embedding[0], embedding[-1]):
        raise LayerError(
            "the preset embedding: the library's own embedding of this model is the same for "
            "different images, or not finite, so no layer can be compared with it. Check the "
            "weights, or name a layer: job=layers lists them."
        )
    return embedding


def _best_match(module: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> _Match | None:
    """The tensor of a forward pass that equals the expected one, or None.

    Among several, the one nearest to the classifier is taken.
    """
    (matches,) = _matches(module, x, [expected])
    return max(matches, key=lambda match: match.rank) if matches else None


def _matches(
    module: nn.Module, x: torch.Tensor, expected: Sequence[torch.Tensor]
) -> list[list[_Match]]:
    """The tensors of a forward pass that equal each of the expected ones.

    Operations are compared only if inputs and outputs of modules do not match all, because they
    rule out compilation and parallel batches.
    """
    found: list[list[_Match]] = []
    for with_operations in (False, True):
        now = _matches_of_pass(module, x, expected, with_operations)
        found = [old or new for old, new in zip(found or now, now, strict=True)]
        if all(found):
            break
    return found


def with_stages(
    trace: Trace, module: nn.Module, x: torch.Tensor, names: Sequence[str] | None
) -> Trace:
    """Add to a trace the tensors that equal the features of a timm model.

    Nothing is added if every name is a module with one tensor, or if a feature is no tensor of the
    pass.

    Args:
        trace: trace of `module`.
        module: model in eval mode.
        x: (B, 3, H, W) noise.
        names: names of the stages that the library gives, or None.

    Returns:
        The trace with `library_stages`.
    """
    compute = getattr(module, "forward_intermediates", None)
    if names is None or compute is None or all(_is_capturable(name, trace) for name in names):
        return trace
    with torch.no_grad():
        features = [*compute(x.clone(), intermediates_only=True)]
        if len(features) != len(names) or not all(isinstance(f, torch.Tensor) for f in features):
            return trace
        found = _matches(module, x, features)
    stages = [_stage(name, each, trace) for name, each in zip(names, found, strict=True)]
    complete = [stage for stage in stages if stage is not None]
    if len(set(complete)) != len(names):
        return trace
    return replace(trace, library_stages=tuple(complete))


def _is_capturable(name: str, trace: Trace) -> bool:
    """Return whether a name is that of a module that is called once and gives one tensor."""
    calls = trace.by_module.get(trace.names.get(name, name), [])
    return len(calls) == 1 and len(calls[0].outputs) == 1


def _stage(name: str, matches: Sequence[_Match], trace: Trace) -> str | None:
    """The request of the tensor that is a feature of the library, or None.

    Among several, the output of the module of that name is taken, then that of a block inside.
    """

    def rank(match: _Match) -> tuple[bool, bool, bool, bool]:
        calls = trace.by_module.get(match.module)
        is_inside = match.module.startswith(f"{name}.")
        is_block = calls is not None and not calls[0].is_leaf
        return match.module == name, is_inside, match.rank[0], is_block

    outputs = [match for match in matches if match.capture == "output" and match.module]
    if not outputs:
        return None
    best = max(outputs, key=rank)
    several = not best.operation and len(trace.by_module[best.module]) > 1
    number = f"@{best.number}" if several else ""
    return f"{best.operation or best.module}{number}{element_name(best.path)}"


@dataclass(frozen=True)
class _Match:
    """A tensor of the forward pass that equals the embedding."""

    module: str
    capture: str
    number: int
    path: ElementPath
    operation: str
    is_vector: bool
    rank: tuple[bool, bool, bool, int]


def _matches_of_pass(
    module: nn.Module, x: torch.Tensor, expected: Sequence[torch.Tensor], with_operations: bool
) -> list[list[_Match]]:
    """The matches of each expected tensor, (B, D) or (B, C, H, W), in one forward pass."""
    matches: list[list[_Match]] = [[] for _ in expected]
    num_calls: dict[tuple[str, str], int] = {}

    def compare(name: str, capture: str, value: object, operation: str = "") -> None:
        key = (operation or name), capture
        number = num_calls[key] = num_calls.get(key, 0) + 1
        with hide_operations():
            tensors = elements(value)
            for path, tensor in tensors.items():
                for each, found in zip(expected, matches, strict=True):
                    exact = _same(tensor, each)
                    if exact is not None and (name or operation or capture == "output"):
                        vector = tensor.dim() == 2
                        rank = (exact, vector, capture == "input", len(found))
                        way = () if len(tensors) == 1 else path
                        found.append(_Match(name, capture, number, way, operation, vector, rank))

    def begin(call: OpenCall, inputs: list[object]) -> None:
        compare(call.name, "input", inputs)

    def end(call: OpenCall, number: int, output: object) -> None:
        compare(call.name, "output", output)

    def on_operation(name: str, owner: str, function: object, result: object) -> None:
        compare(owner, "output", result, name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(every_call(module, begin, end))
        if with_operations:
            recorder = OperationRecorder(module, on_operation)
            stack.enter_context(recorder.attach())
            stack.enter_context(recorder)
        module(x.clone())
    return matches


def _same(tensor: torch.Tensor, expected: torch.Tensor) -> bool | None:
    """Return whether every bit is equal; None if values differ by more than rounding."""
    if tensor.dim() < 2 or len(tensor) != len(expected) or not tensor.is_floating_point():
        return None
    for view in _views(tensor, expected):
        if torch.equal(view, expected):
            return True
        close = _ROUNDING * float(expected.abs().max())
        if bool(((view - expected).abs() <= close).all()):
            return False
    return None


def _views(tensor: torch.Tensor, expected: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in the layouts that have the shape of another: vectors, or maps and patch tokens."""
    if expected.dim() == 2:
        if tensor.numel() == expected.numel():
            yield tensor.reshape(expected.shape)
        return
    if tensor.shape == expected.shape:
        yield tensor
    channels, *size = expected.shape[1:]
    if tensor.dim() == 4 and tensor.movedim(-1, 1).shape == expected.shape:
        yield tensor.movedim(-1, 1)
    num_patches = math.prod(size)
    if tensor.dim() == 3 and tensor.shape[1] >= num_patches and tensor.shape[2] == channels:
        yield tensor[:, -num_patches:].transpose(1, 2).reshape(expected.shape)


def _decides(module: nn.Module, classifier: str, x: torch.Tensor) -> bool:
    """Return whether the output of the model depends on the image only through one layer.

    The output of that layer is replaced by zeros. The output of the model must then be equal for
    different images. The last linear layer of a transformer block or of a squeeze-and-excitation
    block fails this check.
    """

    def zeros(layer: nn.Module, args: object, kwargs: object, output: Any) -> torch.Tensor:
        return torch.zeros_like(output)

    with ModuleHooks() as hooks:
        hooks.add(module.get_submodule(classifier), after=zeros)
        output = elements(module(x.clone()))
    return bool(output) and all(
        len(tensor) == len(x) and torch.equal(tensor[0], tensor[-1]) for tensor in output.values()
    )
