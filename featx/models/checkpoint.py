"""Checkpoint files: reads their tensors, finds those of a module, and loads all or none.

A checkpoint may hold more than the model: averaged weights, a teacher and a student, a decoder, a
loss. The tensors of the model are those whose names are its own behind one prefix, such as
'state_dict/module.', in which '/' stands for nesting.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.base import log_message
from featx.errors import WeightsError, counted

WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".th", ".bin")
"""File extensions by which `model.weights` is recognised as a file."""

_TRAINING_ONLY = ("mask_token", "decoder_")
"""Beginnings of the names of parameters beside a model that only its training reads."""

_COUNTER = "num_batches_tracked"
"""Counter of BatchNorm, which eval mode never reads. Files written before PyTorch 0.4.1 lack it,
and in files converted to float16 it may be infinite."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose values are the weights themselves. Other dtypes, such as int8 or float8, need a
scale that a state dict does not name in a way that featx knows."""


def is_weights_file(weights: str) -> bool:
    """Whether `model.weights` is a path and not a tag of a library."""
    return weights.endswith(WEIGHT_FILES) or "/" in weights


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors in a .safetensors or PyTorch file, unpickling tensors only.

    Args:
        path: path of the file; ~ is expanded.

    Returns:
        name -> tensor; names of nested mappings are joined by '/', as in 'state_dict/fc.weight'.

    Raises:
        WeightsError: the file does not exist, is damaged, or contains other objects than tensors.
    """
    path = path.expanduser()
    if not path.is_file():
        raise WeightsError(
            f"model.weights={path}: no such file (looked in {Path.cwd()}). Give a path to a "
            f"{' or '.join(WEIGHT_FILES[:2])} file, a tag of the library, or null for random."
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            # torch's message advises weights_only=False, which runs code of the file.
            reason = "it is no file of torch.save, or it has objects other than tensors"
        raise WeightsError(
            f"model.weights={path} cannot be read: {reason}. Expected a file of tensors only: "
            "save it with torch.save(model.state_dict(), path) or as safetensors."
        ) from error
    if not isinstance(state, Mapping):
        raise WeightsError(f"model.weights={path} holds a {type(state).__name__}, no state dict.")
    return dict(_flat(state, ""))


def _flat(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a mapping and of the mappings in it, with their joined names."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")


def load_weights(
    module: nn.Module, state: Mapping[str, torch.Tensor], origin: str, prefix: str | None = None
) -> None:
    """Load the tensors of a checkpoint into a module, which they must fill as a whole.

    Tensors of the checkpoint that are no part of the module are left out, with a message.

    Args:
        module: the module.
        state: name -> tensor, from `read_weights`.
        origin: file or package of the weights, for the message.
        prefix: what stands before the names of the module, such as 'teacher/backbone.'; None finds
            it.

    Raises:
        WeightsError: tensors of the module are missing, or have other shapes; tensors of its own
            parts are left over; several prefixes have different values; or values are quantised,
            are of another kind than those of the module, or NaN.
    """
    own = module.state_dict()
    needed = [name for name in own if not name.endswith(_COUNTER)]
    chosen = _prefix(own, needed, state, origin) if prefix is None else prefix
    if prefix is not None and not any(name.startswith(prefix) for name in state):
        begin = ", ".join(list(dict.fromkeys(map(_first_part, state)))[:5])
        raise WeightsError(
            f"model.checkpoint.prefix={prefix}: no tensor of {origin} has a name that begins so. "
            f"Its names begin with {begin or 'nothing: it is empty'}."
        )
    inner = {name.removeprefix(chosen): x for name, x in state.items() if name.startswith(chosen)}
    missing = [name for name in needed if name not in inner]
    left = [name for name in inner if name not in own]
    extra = sorted(name for name in left if _is_of_module(name, own))
    shapes = [
        f"{name} {tuple(inner[name].shape)} instead of {tuple(own[name].shape)}"
        for name in needed
        if name in inner and inner[name].shape != own[name].shape
    ]
    if missing or extra or shapes:
        where = f" (names behind {chosen!r})" if chosen else ""
        raise WeightsError(
            f"the weights {origin}{where} do not fit this model: {counted(len(missing), 'key')} "
            f"missing ({', '.join(sorted(missing)[:3])}), {len(extra)} unexpected "
            f"({', '.join(extra[:3])}), {len(shapes)} of another shape ({'; '.join(shapes[:3])}). "
            "Give weights of this model, or choose the model that they belong to. A model of timm "
            "gets a head of N classes by model.args={num_classes: N}, and none by 0."
        )
    found = {name: inner[name] for name in own if name in inner}
    _check_values(own, found, origin)
    module.load_state_dict(found, strict=False)
    used = {chosen + name for name in found}
    _tell_dropped([name for name in state if name not in used], chosen, origin)


def _prefix(
    own: Mapping[str, torch.Tensor],
    needed: list[str],
    state: Mapping[str, torch.Tensor],
    origin: str,
) -> str:
    """Return what stands before the names of a module in a checkpoint.

    Args:
        own: state dict of the module.
        needed: its names that the checkpoint must have.
        state: tensors of the checkpoint.
        origin: file of the weights, for the message.

    Returns:
        The prefix behind which all names are; if there is none, that behind which most are.

    Raises:
        WeightsError: several have all names, and different values. Averaged weights (EMA) and the
            teachers and students of self-supervised training have the same names and other values,
            and only the user knows which are meant.
    """
    # Every complete prefix stands before each needed name, so three names find all of them.
    anchors = {needed[0], needed[len(needed) // 2], needed[-1]} if needed else set()
    candidates = {""} | {
        name.removesuffix(anchor)
        for anchor in anchors
        for name in state
        if name.endswith(anchor) and name.removesuffix(anchor)[-1:] in ("", ".", "/")
    }
    held = {p: sum(p + name in state for name in needed) for p in sorted(candidates)}
    complete = [p for p in held if held[p] == len(needed)]
    fitting = [p for p in complete if all(state[p + n].shape == own[n].shape for n in needed)]
    complete = fitting or complete
    if not complete:
        return max(held, key=lambda p: held[p])
    first = complete[0]
    rivals = [p for p in complete[1:] if _differs(state, first, p, needed)]
    if rivals:
        each = ", ".join(repr(p) for p in (first, *rivals))
        raise WeightsError(
            f"{origin} holds {1 + len(rivals)} state dicts of this model with different values, "
            f"behind the prefixes {each}. Name the one that you mean, such as "
            f"model.checkpoint.prefix={rivals[0]}."
        )
    return first


def _differs(state: Mapping[str, torch.Tensor], one: str, other: str, names: list[str]) -> bool:
    """Whether the tensors of some names have other values behind another prefix."""
    pairs = ((state[one + name], state[other + name]) for name in names)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def _is_of_module(name: str, own: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor that the module lacks belongs to a part that the module has.

    Five blocks do not fit a model of three. A parameter beside the parts, such as registers,
    changes what the others mean; a part that the module lacks as a whole, such as a head, does not.
    """
    part, dot, _ = name.partition(".")
    if name.endswith(_COUNTER) or part.startswith(_TRAINING_ONLY):
        return False
    if not dot or part.isdigit():
        return "/" not in part
    return any(key.startswith(f"{part}.") for key in own)


def _first_part(name: str) -> str:
    """Return the name of the mapping or module to which a tensor belongs, or its own."""
    return name.replace("/", ".").partition(".")[0]


def _tell_dropped(names: list[str], prefix: str, origin: str) -> None:
    """Write one line about the tensors of a checkpoint that are no part of the model.

    Args:
        names: their names in the checkpoint; counters of BatchNorm are passed over.
        prefix: prefix of the tensors that were loaded.
        origin: file of the weights.
    """
    nest = prefix[: prefix.rfind("/") + 1]
    left = [name.removeprefix(nest) for name in names if not name.endswith(_COUNTER)]
    if left:
        parts = Counter(map(_first_part, left))
        each = ", ".join(f"{part} ({number})" for part, number in parts.most_common(8))
        log_message(
            f"{origin}: {counted(len(left), 'tensor')} left out, as no part of the model: "
            f"{each}{', ...' if len(parts) > 8 else ''}"
        )


def _check_values(
    own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], origin: str
) -> None:
    """Check that tensors of a state dict hold weights, not quantised values or NaN.

    `load_state_dict` would convert any number to the dtype of the module without a warning.

    Raises:
        WeightsError: they do not.
    """
    shared = {name: value for name, value in state.items() if name in own}
    other = [
        f"{name} is {str(value.dtype).removeprefix('torch.')} instead of "
        f"{str(own[name].dtype).removeprefix('torch.')}"
        for name, value in shared.items()
        if not name.endswith(_COUNTER) and not _keeps_values(value, own[name].dtype)
    ]
    if other:
        raise WeightsError(
            f"the weights {origin} are quantised or of another kind than those of the model: "
            f"{counted(len(other), 'tensor')} ({'; '.join(other[:3])}). Give a file with weights "
            "in float32, float16 or bfloat16."
        )
    damaged = [
        name
        for name, value in shared.items()
        if value.is_floating_point() and bool(torch.isnan(value).any())
    ]
    if damaged:
        raise WeightsError(
            f"the weights {origin} are damaged: NaN in {counted(len(damaged), 'tensor')} "
            f"({', '.join(damaged[:3])}). Give an undamaged file, such as an earlier checkpoint of "
            "the training."
        )


def _keeps_values(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor means the same in the dtype of the module, rounding of floats aside."""
    if dtype in _FLOATS:
        return value.dtype in _FLOATS
    if value.dtype in _FLOATS:  # a checkpoint that was converted to float16 as a whole
        return torch.equal(value.to(dtype).to(value.dtype), value)
    return value.dtype == dtype or not (value.is_complex() or dtype.is_complex)
