"""Tensors of a checkpoint found for a module, with its names or those of the code that trained it.

A checkpoint may hold more than the model: averaged weights, a teacher and a student, a decoder, a
loss. The tensors of the model are those whose names are its own behind one prefix, such as
"state_dict/module.", in which "/" stands for nesting.

timm keeps a conversion of names, `checkpoint_filter_fn`, for most of its families. It is written
for the files that the authors of timm have converted: it leaves tensors out without a message, and
interpolates those of another size. So its result is traced: autograd tells which tensors of the
file each result was made of, and by which operations."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featx.base import is_own_process
from featx.config import CheckpointConfig
from featx.errors import WeightsError, counted

COUNTER = "num_batches_tracked"
"""Counter of BatchNorm, which eval mode never reads. Files written before PyTorch 0.4.1 lack it,
and in files converted to float16 it may be infinite."""

TRAINING_ONLY = ("mask_token", "decoder_")
"""Beginnings of the names of parameters that only the training of a model reads."""

CONSTANTS = (
    "relative_position_index",
    "relative_coords_table",
    "attn_mask",
    "bias_mask",
    "periods",
)
"""Endings of the names of buffers that the code of a model computes from its size."""


_NESTS = 8
"""Largest number of prefixes behind which a conversion is tried."""


@dataclass(frozen=True)
class CheckpointMatch:
    """Tensors of a checkpoint under the names of a module.

    Attributes:
        tensors: name in the module -> tensor; also names that the module lacks, such as those of a
            head of other classes.
        sources: name in the module -> names in the file of what the tensor was made of.
        file_names: names of all tensors in the file.
        prefix: what stands before the names in the file.
        heads: names of the classifiers of the module, which the checkpoint may lack.
        conversion: name of the function that converted the names, or ''.
        computed: names in the module whose values the conversion has interpolated.
        lost: names in the file of tensors behind the prefix, not zero, that the conversion leaves
            out although it takes others of the same part.
    """

    tensors: Mapping[str, torch.Tensor]
    sources: Mapping[str, Collection[str]]
    file_names: Collection[str]
    prefix: str
    heads: Collection[str] = ()
    conversion: str = ""
    computed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def first_part(name: str) -> str:
    """Return the name of the mapping or module to which a tensor belongs, or its own."""
    return name.replace("/", ".").partition(".")[0]


@dataclass(frozen=True)
class Misfits:
    """Differences between a module and the tensors found for it; false if there are none.

    Attributes:
        missing: names of the module that are not in the checkpoint.
        extra: names in the checkpoint of parts of the module that it lacks.
        shapes: tensors of another shape, in words.
    """

    missing: list[str]
    extra: list[str]
    shapes: list[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes)

    def summary(self) -> str:
        """Return the numbers of the differences in words."""
        return (
            f"{counted(len(self.missing), 'key')} missing, {len(self.extra)} unexpected, "
            f"{len(self.shapes)} of another shape"
        )

    def as_error(self, origin: str, prefix: str, converted: str = "") -> WeightsError:
        """Return the error about a file; `converted` is what a conversion came to, a sentence."""
        where = f" (names behind {prefix!r})" if prefix else ""
        return WeightsError(
            f"the weights {origin}{where} do not fit this model: "
            f"{counted(len(self.missing), 'key')} missing ({', '.join(sorted(self.missing)[:3])}), "
            f"{len(self.extra)} unexpected ({', '.join(self.extra[:3])}), {len(self.shapes)} of "
            f"another shape ({'; '.join(self.shapes[:3])}). {converted}Give weights of this model, "
            "or choose the model that they belong to. A model of timm gets a head of N classes by "
            "'model.args={num_classes: N}', and none by 0."
        )


def match_checkpoint(
    module: nn.Module,
    state: Mapping[str, torch.Tensor],
    origin: str,
    options: CheckpointConfig,
    heads: Collection[str] = (),
    conversion: Conversion | None = None,
) -> CheckpointMatch:
    """Find the tensors of a module in a checkpoint.

    The file may lack its `heads`, or have them for other classes. The conversion is tried only if
    the names of the file are not those of the model.
    """
    module_state = module.state_dict()
    prefix = options.prefix
    if prefix is not None and not any(name.startswith(prefix) for name in state):
        begin = ", ".join(list(dict.fromkeys(map(first_part, state)))[:5])
        raise WeightsError(
            f"model.checkpoint.prefix={prefix}: no tensor of {origin} has a name that begins so. "
            f"Its names begin with {begin or 'nothing: it is empty'}."
        )
    needed = _needed_names(module_state, heads)
    prefixes = _plain_prefixes(needed, state) if prefix is None else [prefix]
    match = _only_match(
        module_state, needed, [_behind(found, state, heads) for found in prefixes], origin
    )
    problem = misfits(module_state, match)
    if not problem:
        return match
    if conversion is None or options.convert == "none":
        raise problem.as_error(origin, match.prefix)
    nests = _nests(needed, state) if prefix is None else [prefix]
    attempts = [conversion.apply(_behind(nest, state, heads)) for nest in nests]
    converted = [attempt for attempt in attempts if attempt is not None]
    if not converted:
        raise problem.as_error(origin, match.prefix)
    best = _only_match(module_state, needed, converted, origin)
    remaining = misfits(module_state, best)
    if not remaining and not (reasons := _refusals(best, needed, options.convert == "resample")):
        return best
    outcome = "; ".join(reasons) if not remaining else remaining.summary()
    conversion_text = (
        "" if outcome == problem.summary() else f"Converted by {conversion.name}: {outcome}. "
    )
    raise problem.as_error(origin, match.prefix, conversion_text)


def misfits(
    module_state: Mapping[str, torch.Tensor], match: CheckpointMatch, with_heads: bool = False
) -> Misfits:
    """Compare a module with the tensors found for it, and its heads too if they must be there."""
    heads, tensors = match.heads, match.tensors
    needed = _needed_names(module_state, () if with_heads else heads)
    backbone = {name for name in module_state if not _is_below(name, heads)}
    extra = [
        name
        for name in tensors
        if name not in module_state and not _is_below(name, heads) and _is_of_module(name, backbone)
    ]
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(module_state[name].shape)}"
        for name in needed
        if name in tensors and tensors[name].shape != module_state[name].shape
    ]
    return Misfits([name for name in needed if name not in tensors], sorted(extra), shapes)


def num_classes(match: CheckpointMatch) -> int:
    """Number of classes of the classifiers in a checkpoint; 0 if it lacks them."""
    if any(name.startswith(f"{match.prefix}pre_logits.") for name in match.file_names):
        return 0  # the classifier reads a layer that models of today lack
    weights = [match.tensors.get(f"{head}.weight") for head in match.heads]
    sizes = {0 if x is None or x.ndim < 2 else len(x) for x in weights}
    return sizes.pop() if len(sizes) == 1 else 0


def has_heads(module_state: Mapping[str, torch.Tensor], match: CheckpointMatch) -> bool:
    """Return whether a checkpoint has all tensors of the heads of a module, in their shapes."""
    names = [
        name for name in module_state if _is_below(name, match.heads) and not name.endswith(COUNTER)
    ]
    return bool(names) and all(
        name in match.tensors and match.tensors[name].shape == module_state[name].shape
        for name in names
    )


def _needed_names(module_state: Mapping[str, torch.Tensor], heads: Collection[str]) -> list[str]:
    return [
        name for name in module_state if not name.endswith(COUNTER) and not _is_below(name, heads)
    ]


def _of_heads(match: CheckpointMatch) -> list[str]:
    return [name for name in match.tensors if _is_below(name, match.heads)]


def _is_below(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _behind(
    prefix: str, state: Mapping[str, torch.Tensor], heads: Collection[str]
) -> CheckpointMatch:
    inner = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
    sources = {name: (prefix + name,) for name in inner}
    return CheckpointMatch(inner, sources, list(state), prefix, heads)


def _plain_prefixes(needed: Sequence[str], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the prefixes behind which needed names stand."""
    # Every complete prefix stands before each needed name, so three names find all of them.
    anchors = {needed[0], needed[len(needed) // 2], needed[-1]} if needed else set()
    candidates = {""} | {
        name.removesuffix(anchor)
        for anchor in anchors
        for name in state
        if name.endswith(anchor) and name.removesuffix(anchor)[-1:] in ("", ".", "/")
    }
    return sorted(candidates)


def _nests(needed: Sequence[str], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return prefixes behind which at least half as many tensors stand as are needed."""
    counts = Counter({"": len(state)})
    for name in state:
        counts.update(name[: i + 1] for i, letter in enumerate(name) if letter in "./")
    return [p for p in sorted(counts, key=len) if 2 * counts[p] >= len(needed)][:_NESTS]


def _only_match(
    module_state: Mapping[str, torch.Tensor],
    needed: Sequence[str],
    matches: Sequence[CheckpointMatch],
    origin: str,
) -> CheckpointMatch:
    """Return the one of several matches that has all needed names; otherwise the one with most.

    Averaged weights (EMA) and the teachers and students of self-supervised training have the same
    names and other values. Only the user knows which are meant, so they are refused.
    """
    complete = sorted(
        (match for match in matches if all(name in match.tensors for name in needed)),
        key=lambda match: (-len(_of_heads(match)), match.prefix),
    )
    complete = [
        match
        for match in complete
        if all(match.tensors[name].shape == module_state[name].shape for name in needed)
    ] or complete
    if not complete:
        return max(matches, key=lambda match: sum(name in match.tensors for name in needed))
    first = complete[0]
    rivals = [
        match
        for match in complete[1:]
        if not all(
            torch.equal(first.tensors[name], match.tensors[name])
            for name in (*needed, *_of_heads(first))
            if name in match.tensors
        )
    ]
    if rivals:
        prefixes = [match.prefix for match in (first, *rivals)]
        raise WeightsError(
            f"{origin} holds {len(prefixes)} state dicts of this model with different values, "
            f"behind the prefixes {', '.join(map(repr, prefixes))}. Name the one that you mean, "
            f"such as model.checkpoint.prefix={prefixes[1]}."
        )
    return first


def _refusals(match: CheckpointMatch, needed: Sequence[str], resample: bool) -> list[str]:
    """Return why converted tensors that fit a model are not accepted."""
    reasons = []
    computed = [name for name in needed if name in match.computed]
    if computed and not resample:
        reasons.append(
            f"{', '.join(computed[:3])} would be resampled, which changes the features; "
            "model.checkpoint.convert=resample allows it, and model.input_size builds the model "
            "for the size of the file"
        )
    made_up = [name for name in needed if not match.sources[name]]
    if made_up:
        reasons.append(f"{', '.join(made_up[:3])} would have values that are not in the file")
    if match.lost:
        names = ", ".join(match.lost[:3])
        reasons.append(f"{names} would be lost, and not all their values are zero")
    return reasons


def _is_of_module(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor that the module lacks belongs to a part that the module has.

    Five blocks do not fit a model of three. A parameter beside the parts, such as registers,
    changes what the others mean; a part that the module lacks as a whole, such as a head, does not.
    """
    part, dot, _ = name.partition(".")
    if name.endswith((COUNTER, *CONSTANTS)) or part.startswith(TRAINING_ONLY):
        return False
    if not dot or part.isdigit():
        return "/" not in part
    return any(key.startswith(f"{part}.") for key in names)


_REASONS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of a conversion that was given the tensors of another model."""

_EXACT = {
    "AccumulateGrad", "Add", "Alias", "AsStrided", "Cat", "Clone", "Copy", "Div", "Expand", "Flip",
    "Index", "IndexSelect", "Mul", "Narrow", "Neg", "Permute", "ReshapeAlias", "Select", "Slice",
    "Split", "SplitWithSizes", "Squeeze", "Stack", "Sub", "T", "ToCopy", "Transpose", "Unbind",
    "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
"""Operations of autograd that move values or change them one by one. All others, such as an
interpolation, mix values of several positions."""


@dataclass(frozen=True)
class Conversion:
    """Function of a library that gives the tensors of a checkpoint the names of a module.

    It takes name -> tensor and the module, and returns name -> tensor; `name` is its import path.
    """

    name: str
    function: Callable[[dict[str, torch.Tensor], nn.Module], Mapping[str, Any]]
    module: nn.Module

    def apply(self, match: CheckpointMatch) -> CheckpointMatch | None:
        """Convert tensors behind a prefix; None if the function cannot take them."""
        leaves = {
            name: x.detach().requires_grad_() if x.is_floating_point() else x
            for name, x in match.tensors.items()
        }
        # Some of the functions print. The stdout of a command belongs to the result of its job;
        # that of a user's process, which other threads use too, stays as it is.
        stdout = sys.stderr if is_own_process() else sys.stdout
        with torch.enable_grad(), contextlib.redirect_stdout(stdout):
            try:
                result = self.function(dict(leaves), self.module)
            except _REASONS:
                return None
        tensors = {name: x for name, x in result.items() if isinstance(x, torch.Tensor)}
        names = {id(leaf): match.prefix + name for name, leaf in leaves.items()}
        traced = {name: _trace(x, names) for name, x in tensors.items()}
        sources = {name: origin for name, (origin, _) in traced.items()}
        used_names = {source for each in sources.values() for source in each}
        return replace(
            match,
            tensors={name: x.detach() for name, x in tensors.items()},
            sources=sources,
            conversion=self.name,
            computed=tuple(name for name, (_, is_exact) in traced.items() if not is_exact),
            lost=tuple(_lost_names(match, used_names)),
        )


def _trace(x: torch.Tensor, names: Mapping[int, str]) -> tuple[frozenset[str], bool]:
    """Return the origin of a converted tensor; `names` has id of a tensor of the file -> name.

    The names in the file are none for values that the function has made up. The second value is
    whether values were moved or changed one by one only.
    """
    if id(x) in names:
        return frozenset([names[id(x)]]), True
    sources, operations = set(), set()
    # The nodes of autograd from which the tensor was computed.
    visited, pending = set(), [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        pending += [following for following, _ in node.next_functions]
        operations.add(re.sub(r"Backward\d*$", "", type(node).__name__))
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            sources.add(names[id(variable)])
    return frozenset(sources), operations <= _EXACT


def _lost_names(match: CheckpointMatch, used_names: Collection[str]) -> Iterator[str]:
    """Yield names in the file of tensors that a conversion leaves out of the parts that it takes.

    Tensors of zeros, of training only, and those that follow from the size of the model are none.
    """
    parts = {first_part(name.removeprefix(match.prefix)) for name in used_names}
    for inner, x in match.tensors.items():
        name = match.prefix + inner
        if name in used_names or first_part(inner) not in parts:
            continue
        if inner.endswith((COUNTER, *CONSTANTS)) or inner.startswith(TRAINING_ONLY):
            continue
        if bool((x != 0).any()):
            yield name


def timm_conversion(module: nn.Module) -> Conversion | None:
    """Return the conversion of timm for the family of a model, or None if it has none."""
    code = sys.modules[type(module).__module__]
    function = getattr(code, "checkpoint_filter_fn", None)
    if function is None:
        return None
    return Conversion(f"{code.__name__}.checkpoint_filter_fn", function, module)
