"""Pretrained weights of timm: what exists, what can be downloaded, and that it fills a model."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.errors import WeightsError, first_line, one_line
from featx.models.hugging_face import is_cached, resolve_hub
from featx.models.json_files import read_json

if TYPE_CHECKING:
    from torch import nn

LOCAL = "local-dir:"
"""Beginning of the name of a model whose config and weights are in a folder."""

_COUNTER = "num_batches_tracked"
"""Counter of BatchNorm, which eval mode never reads."""


def check_tag(timm: Any, name: str) -> None:
    """Check that timm has a pretrained tag.

    Raises:
        WeightsError: it has not; the message lists the tags.
    """
    if ":" in name or "." not in name:
        return
    base, tag = name.split(".", 1)
    tags = [n.split(".", 1)[1] for n in timm.list_pretrained(f"{base}.*")]
    if tag not in tags:
        known = ", ".join(tags) or "none"
        raise WeightsError(f"timm has no weights {tag!r} for {base}; it has: {known}.")


def check_folder(name: str) -> None:
    """Check that the folder of a model local-dir:FOLDER holds its config as timm writes it.

    Raises:
        WeightsError: it does not, or transformers has written it, whose folders of models of timm
            have other names of tensors.
    """
    folder = Path(name.removeprefix(LOCAL))
    file = folder / "config.json"
    if not file.is_file():
        raise WeightsError(
            f"model.name={name}: there is no {file}. Expected a folder with config.json and "
            "model.safetensors, as timm.models.save_for_hf writes it."
        )
    config = read_json(file)
    if config.get("model_type") == "timm_wrapper":
        raise WeightsError(
            f"{folder} was written by transformers around a model of timm. Give the model and the "
            f"file: model.name={config.get('architecture', 'NAME')} "
            f"model.weights={folder / 'model.safetensors'}."
        )


@contextlib.contextmanager
def folder_errors(name: str) -> Iterator[None]:
    """Turn errors of loading the weights of local-dir:FOLDER into a WeightsError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        reason = one_line(error)
        raise WeightsError(
            f"model.name={name}: the weights of this folder do not load: {reason}. Expected the "
            "tensors of the architecture in config.json, as timm.models.save_for_hf writes them."
        ) from error


def pretrained_cfg(timm: Any, name: str) -> Any:
    """timm's config of the pretrained weights; None for a model of the hub.

    Raises:
        WeightsError: timm has no weights for the model.
    """
    if ":" in name:
        return None
    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not (cfg.has_weights or cfg.hf_hub_id or cfg.url):
        raise WeightsError(
            f"timm has no pretrained weights for {name}. Give model.weights=PATH to a local "
            ".safetensors or .pth, or model.weights=null for random weights."
        )
    return cfg


@contextlib.contextmanager
def download_errors(name: str, cfg: Any) -> Iterator[None]:
    """Turn errors of a download into a WeightsError that says what to do.

    If the name of the hub cannot be resolved, the error is raised at once.
    """
    import torch
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE

    repository = name.split(":", 1)[1] if cfg is None else cfg.hf_hub_id
    url = None if cfg is None else cfg.url
    # The file that is requested first: for hf-hub: names the architecture, otherwise the weights.
    files = ("config.json",) if cfg is None else ("model.safetensors", "pytorch_model.bin")
    checkpoints = Path(torch.hub.get_dir()) / "checkpoints"
    has_file = url and (checkpoints / Path(urlparse(url).path).name).exists()

    def missing_weights(reason: object) -> WeightsError:
        weights, folder, advice = str(url), str(checkpoints), f"download {url}"
        if repository:
            weights, folder = f"{repository}/{files[0]}", HF_HUB_CACHE
            advice = f"run `hf download {repository}`"
        return WeightsError(
            f"the weights {weights} of {name} are not on this machine and cannot be downloaded "
            f"({reason}). Looked in {folder} and at {ENDPOINT if repository else url}. Either "
            f"{advice} on a machine with internet access and copy the result into that folder, or "
            "give model.weights=PATH to a local .safetensors or .pth (model.weights=null runs "
            "with random weights)."
        )

    try:
        if repository and not (has_file or is_cached(repository, files)):
            resolve_hub()
        yield
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"the weights of {name} in {HF_HUB_CACHE if repository else checkpoints} cannot be "
            f"read: {first_line(error)} Expected a file of tensors only."
        ) from error
    except (OSError, RuntimeError) as error:
        raise missing_weights(first_line(error)) from error


@contextlib.contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Turn the error of torch about tensors that do not fit a model into a WeightsError."""
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        raise WeightsError(
            f"the weights of {name} do not fit the model that model.args and model.input_size ask "
            f"for: {one_line(error)}"
        ) from error


def check_whole(
    name: str,
    module: nn.Module,
    create_random: Callable[[], nn.Module],
    create_default: Callable[[], nn.Module],
) -> None:
    """Check that weights leave no parameter of a model at its initial value.

    timm loads without `strict` if model.args change the head or the pooling, and reports parameters
    that the weights lack (such as fc_norm of global_pool=avg) to its log only. So values are
    compared: what equals the initial value was loaded only if the model without these arguments has
    the same value under the same name.

    Args:
        name: name of the model, for messages.
        module: model with its weights.
        create_random: creates the same model with the initial values that `module` had.
        create_default: creates the model with its weights, without model.args.

    Raises:
        WeightsError: parameters or buffers are not in the weights.
    """
    loaded, initial = _digests(module), _digests(create_random())
    same = [key for key in loaded if loaded[key] == initial.get(key) and not key.endswith(_COUNTER)]
    if not same:
        return
    default = _digests(create_default())
    if absent := [key for key in same if loaded[key] != default.get(key)]:
        raise WeightsError(
            f"the weights of {name} lack {', '.join(absent[:5])}{', ...' if absent[5:] else ''} of "
            "the model that model.args ask for, which would stay random. Leave the argument out "
            "that adds these parameters; model.args.num_classes=0 builds a model without its head."
        )


def _digests(module: nn.Module) -> dict[str, bytes]:
    """Digest of each tensor of a state dict; two models need not be in memory at once."""
    import torch

    return {
        key: hashlib.blake2b(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).digest()
        for key, tensor in module.state_dict().items()
    }
