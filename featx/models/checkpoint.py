"""Checkpoint files: reads state dicts and loads them into modules that they fit exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.errors import WeightsError, counted

WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".th", ".bin")
"""File extensions by which `model.weights` is recognised as a file."""

_NESTS = ("state_dict", "model")
"""Names under which training scripts keep the state dict of the model in a checkpoint."""

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
    """Read the state dict in a .safetensors or PyTorch file, unpickling tensors only.

    A checkpoint may hold the state dict under a name such as `state_dict` or `model`. The prefix
    `module.` of all names is removed.

    Args:
        path: path of the file; ~ is expanded.

    Raises:
        WeightsError: the file does not exist, is damaged, contains more than tensors, or holds
            several state dicts of one model with different values.
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
        raise WeightsError(
            f"model.weights={path} cannot be read: {reason}. Expected a file of tensors only: "
            "save it with torch.save(model.state_dict(), path) or as safetensors."
        ) from error
    if not isinstance(state, Mapping):
        raise WeightsError(f"model.weights={path} holds a {type(state).__name__}, no state dict.")
    return _without_prefix(_only_state_dict(path, state))


def _only_state_dict(path: Path, checkpoint: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the state dict of a checkpoint, which may be the checkpoint itself.

    Raises:
        WeightsError: it holds several, and they differ. Averaged weights (EMA) and the teachers and
            students of self-supervised training have the same names and other values, and only the
            user knows which are meant.
    """
    nests = {
        str(name): tensors
        for name, value in checkpoint.items()
        if isinstance(value, Mapping) and (tensors := _tensors(value))
    }
    main = next((name for name in _NESTS if name in nests), None)
    if main is None:
        if _tensors(checkpoint) or len(nests) != 1:
            return _tensors(checkpoint)
        (main,) = nests
    chosen = _without_prefix(nests[main])
    rivals = [name for name in nests if name != main and _differs(chosen, nests[name])]
    if rivals:
        each = ", ".join(
            f"{name} ({counted(len(nests[name]), 'tensor')})" for name in (main, *rivals)
        )
        raise WeightsError(
            f"model.weights={path} holds {1 + len(rivals)} state dicts of one model with different "
            f"values: {each}. Save the one that you mean into a file of its own: "
            f"torch.save(torch.load({str(path)!r})[{rivals[0]!r}], 'weights.pth'), and give "
            "model.weights=weights.pth."
        )
    return nests[main]


def _tensors(state: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the entries of a mapping that are tensors."""
    return {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _without_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove the prefix `module.` that DataParallel puts before every name."""
    if state and all(name.startswith("module.") for name in state):
        return {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _differs(state: Mapping[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether another mapping of a checkpoint holds other values for tensors of a state dict."""
    return any(
        name in state and state[name].shape == value.shape and not torch.equal(state[name], value)
        for name, value in _without_prefix(other).items()
    )


def load_weights(module: nn.Module, state: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load a state dict into a module whose names, shapes and kinds of numbers it must match.

    Args:
        module: the module.
        state: name -> tensor.
        origin: file or package of the weights, for the message.

    Raises:
        WeightsError: names are missing or left over, shapes differ, or values are quantised, are of
            another kind than those of the module, or NaN.
    """
    own = module.state_dict()
    missing = sorted(set(own) - set(state))
    extra = sorted(set(state) - set(own))
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    missing = [name for name in missing if not name.endswith(_COUNTER)]
    if missing or extra or shapes:
        raise WeightsError(
            f"the weights {origin} do not fit this model: {counted(len(missing), 'key')} missing "
            f"({', '.join(missing[:3])}), {len(extra)} unexpected ({', '.join(extra[:3])}), "
            f"{len(shapes)} of another shape ({'; '.join(shapes[:3])}). Give weights of this "
            "model, or choose the model that they belong to."
        )
    _check_values(own, state, origin)
    module.load_state_dict(dict(state), strict=False)


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
