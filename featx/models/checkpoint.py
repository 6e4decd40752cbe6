"""Checkpoint files: reads their tensors, and loads all tensors of a module or none.

Which tensors of a file are those of a module is found in `featx.models.checkpoint_match`.
"""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from featx.base import log_message
from featx.config import CheckpointConfig
from featx.errors import WeightsError, counted, first_line
from featx.models.checkpoint_match import (
    COUNTER,
    CheckpointMatch,
    first_part,
    has_heads,
    match_checkpoint,
    misfits,
    num_classes,
)

if TYPE_CHECKING:
    from featx.models.checkpoint_match import Conversion

_LISTED = 100
"""Number of tensors that are left out above which a store records how many instead of names."""

_STATISTICS = ("running_mean", "running_var")
"""Endings of the names of the statistics of BatchNorm."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose values are the weights themselves. Other dtypes, such as int8 or float8, need a
scale that a state dict does not name in a way that featx knows."""


def read_weights(path: Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors in a .safetensors or PyTorch file, unpickling tensors only.

    Args:
        path: path of the file; ~ is expanded.
        sha256: hex digest that the file must have, which is checked before anything in the file is
            interpreted; None reads any file.

    Returns:
        name -> tensor; names of nested mappings are joined by '/', as in 'state_dict/fc.weight'.

    Raises:
        WeightsError: the file does not exist, has another digest, is damaged, or contains other
            objects than tensors.
    """
    path = path.expanduser()
    if not path.is_file():
        raise WeightsError(
            f"model.weights={path}: no such file (looked in {Path.cwd()}). Give a path to a "
            f".safetensors or .pth file, a tag of the library, or null for random."
        )
    if sha256 is not None:
        _check_digest(path, sha256)
    if _is_torchscript(path):
        raise WeightsError(
            f"model.weights={path} is a TorchScript program, which is code. Save its tensors: "
            f"torch.save(torch.jit.load({path.name!r}).state_dict(), 'weights.pth')."
        )
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = first_line(error)
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


def _is_torchscript(path: Path) -> bool:
    """Return whether a file was written by torch.jit.save."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _check_digest(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"model.weights={path} cannot be read: {error}.") from error
    if actual != expected:
        raise WeightsError(
            f"model.weights={path} is not the file that model.checkpoint.sha256 names: its SHA-256 "
            f"is {actual}, expected {expected}. Nothing of it was loaded. Copy the file again, or "
            "give the checksum of this one."
        )


def _flat(state: Mapping[object, object], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a mapping and of the mappings in it, with their joined names."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")


def load_weights(
    module: nn.Module, state: Mapping[str, torch.Tensor], origin: str, prefix: str | None = None
) -> dict[str, object]:
    """Load the tensors of a checkpoint into a module, which they must fill as a whole.

    Tensors of the checkpoint that are no part of the module are left out, with a message.

    Args:
        state: name -> tensor, from `read_weights`.
        origin: file or package of the weights, for the message.
        prefix: what stands before the names of the module, such as 'teacher/backbone.'; None finds
            it.

    Returns:
        What the fingerprint says about the loading, as JSON types: `prefix`, `convert`, `resample`
        and `dropped`, each only if it is not trivial.

    Raises:
        WeightsError: tensors of the module are missing, or have other shapes; tensors of its own
            parts are left over; several prefixes have different values; or values are quantised,
            are of another kind than those of the module, or NaN.
    """
    match = match_checkpoint(module, state, origin, CheckpointConfig(prefix=prefix))
    return _load_match(module, match, origin)


def load_with_heads(
    module: nn.Module,
    file: str,
    options: CheckpointConfig,
    heads: Sequence[str],
    with_classes: Callable[[int], nn.Module] | None,
    conversion: Conversion | None = None,
) -> tuple[nn.Module, dict[str, object], tuple[str, ...]]:
    """Load a file into a module whose classifiers may have other classes in the file, or none.

    Returns the module with the classes of the file, what the fingerprint says about the loading,
    and the heads that were left out.
    """
    state = read_weights(Path(file), options.sha256)
    match = match_checkpoint(module, state, file, options, heads, conversion)
    missing: tuple[str, ...] = ()
    classes, module_state = num_classes(match), module.state_dict()
    if with_classes is not None and heads and not (classes and has_heads(module_state, match)):
        had_heads = any(name.startswith(f"{head}.") for name in module_state for head in heads)
        built = with_classes(classes)
        if classes and not has_heads(built.state_dict(), match):
            built, classes = with_classes(0), 0
        if had_heads and not classes:
            missing = tuple(heads)
            log_message(
                f"{file}: no classifier that fits, so the model is built without one: its features "
                "are those of the file, and there are no logits."
            )
        module = built
    return module, _load_match(module, match, file), missing


def _load_match(module: nn.Module, match: CheckpointMatch, origin: str) -> dict[str, object]:
    """Load tensors of a checkpoint that were found for a module, all of them or none.

    The head of the module may have been built for the classes of the checkpoint since.
    """
    module_state = module.state_dict(keep_vars=True)
    if problem := misfits(module_state, match, with_heads=True):
        raise problem.as_error(origin, match.prefix)
    tensors = {name: match.tensors[name] for name in module_state if name in match.tensors}
    _check_values(module_state, tensors, origin)
    _check_shared(module_state, tensors, origin)
    module.load_state_dict(tensors, strict=False)
    used_names = {source for name in tensors for source in match.sources.get(name, ())}
    dropped = [
        name for name in match.file_names if name not in used_names and not name.endswith(COUNTER)
    ]
    if dropped:
        nest = match.prefix[: match.prefix.rfind("/") + 1]
        log_left_out([name.removeprefix(nest) for name in dropped], origin, "the model")
    if match.conversion:
        changed = f", {', '.join(match.computed)} resampled" if match.computed else ""
        log_message(f"{origin}: names converted by {match.conversion}{changed}")
    counts = dict(sorted(Counter(map(first_part, dropped)).items()))
    description = {
        "prefix": match.prefix,
        "convert": match.conversion,
        "resample": sorted(match.computed),
        "dropped": sorted(dropped) if len(dropped) <= _LISTED else counts,
    }
    return {key: value for key, value in description.items() if value}


def log_left_out(names: Collection[str], origin: str, model: str) -> None:
    """Write one line about the tensors of a checkpoint that a model has no use for."""
    parts = Counter(map(first_part, names))
    parts_text = ", ".join(f"{part} ({number})" for part, number in parts.most_common(8))
    log_message(
        f"{origin}: {counted(len(names), 'tensor')} left out, as no part of {model}: "
        f"{parts_text}{', ...' if len(parts) > 8 else ''}"
    )


def _check_values(
    module_state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], origin: str
) -> None:
    """Check that tensors hold weights, not quantised values, NaN or infinity.

    `load_state_dict` would convert any number to the dtype of the module without a warning.
    """
    quantised = [
        f"{name} is {str(value.dtype).removeprefix('torch.')} instead of "
        f"{str(module_state[name].dtype).removeprefix('torch.')}"
        for name, value in tensors.items()
        if not name.endswith(COUNTER) and not _keeps_values(value, module_state[name].dtype)
    ]
    if quantised:
        raise WeightsError(
            f"the weights {origin} are quantised or of another kind than those of the model: "
            f"{counted(len(quantised), 'tensor')} ({'; '.join(quantised[:3])}). Give a file with "
            "weights in float32, float16 or bfloat16."
        )
    check_finite(module_state, tensors, origin)


def check_finite(
    module_state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], origin: str
) -> None:
    """Check that tensors hold no NaN, and those that a model has learned no infinity either.

    An infinite variance of BatchNorm makes a channel constant, and no feature infinite. Masks of
    attention, which are buffers, may be infinite.
    """
    damaged = []
    for name, value in tensors.items():
        if value.is_floating_point() and value.dtype not in _FLOATS:
            value = value.float()  # torch has no isnan of float8
        is_learned = module_state[name].requires_grad or name.endswith(_STATISTICS)
        if (value.isnan() if not is_learned else ~value.isfinite()).any():
            damaged.append(name)
    if damaged:
        raise WeightsError(
            f"the weights {origin} are damaged: NaN or infinity in "
            f"{counted(len(damaged), 'tensor')} ({', '.join(damaged[:3])}). Give an undamaged "
            "file, such as an earlier checkpoint of the training, or one in float32: float16 has "
            "no number above 65504."
        )


def _check_shared(
    module_state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], origin: str
) -> None:
    """Check that names of one tensor of a module have one value: the last one would win."""
    names: dict[int, str] = {}
    for name, value in tensors.items():
        first = names.setdefault(id(module_state[name]), name)
        if first != name and not torch.equal(value, tensors[first]):
            raise WeightsError(
                f"the weights {origin} do not fit this model: {first} and {name} are one tensor in "
                "the model (tied weights) and have different values in the file. Give weights of "
                "this model, or build the model without tying them."
            )


def _keeps_values(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor means the same in the module's dtype, rounding of floats aside."""
    if dtype in _FLOATS:
        return value.dtype in _FLOATS
    if value.dtype in _FLOATS:  # a checkpoint that was converted to float16 as a whole
        return torch.equal(value.to(dtype).to(value.dtype), value)
    return value.dtype == dtype or not (value.is_complex() or dtype.is_complex)
