"""Weights of torchvision: the members of its enums, their files and their downloads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.errors import ModelError, WeightsError

if TYPE_CHECKING:
    import torch


def default_entry(enum: Any) -> Any:
    """The default weights of an enum.

    Raises:
        ModelError: the model has no weights and so no preprocessing.
    """
    if len(enum) == 0:
        raise ModelError("this model has no weights in torchvision, and so no preprocessing.")
    return enum.DEFAULT


def weights_entry(enum: Any, name: str, weights: str | None) -> Any:
    """The enum member that `model.weights` names, or None for random weights.

    Raises:
        WeightsError: there is no such member; the message lists them.
    """
    if weights is None:
        return None
    if weights == "default":
        return default_entry(enum)
    tag = weights.rsplit(".", 1)[-1]
    if tag not in enum.__members__:
        raise WeightsError(
            f"model.weights={weights}: torchvision has no such weights for {name}; it has "
            f"{', '.join(enum.__members__)}. A path (.safetensors, .pth) and null are valid too."
        )
    return enum[tag]


def entry_of_file(enum: Any, file: str) -> Any:
    """The enum member to whose download a local file belongs, or None.

    The file is recognised by its name, which contains a hash. It then gets the preprocessing of its
    own weights, which may differ from that of DEFAULT, and a builder that knows them: googlenet and
    inception_v3 rescale their input for torchvision's weights only.
    """
    name = Path(file).name
    return next((entry for entry in enum if Path(urlparse(entry.url).path).name == name), None)


def readable_entry(entry: Any, name: str, file: str | None, sha256: str | None) -> Any:
    """A copy of an enum member that loads tensors only, from a local file or by `fetch_weights`.

    torchvision's loader unpickles arbitrary objects (weights_only=False) and reports a missing
    network as URLError only. This can be removed when torchvision loads tensors only.

    Args:
        entry: enum member of the weights.
        name: name of the model, for messages.
        file: path of a local file, or None to download.
        sha256: digest that the local file must have, or None.
    """
    from featx.models.checkpoint import read_weights

    def get_state_dict(*args: Any, **keywords: Any) -> Mapping[str, torch.Tensor]:
        return read_weights(Path(file), sha256) if file else fetch_weights(entry.url, name)

    # Builders accept members of the enum only, and the member itself belongs to the whole process.
    copy = object.__new__(type(entry))
    copy.__dict__.update(entry.__dict__, get_state_dict=get_state_dict)
    return copy


def fetch_weights(url: str, name: str) -> Mapping[str, torch.Tensor]:
    """Read the state dict of a torchvision URL from PyTorch's cache, or download it.

    Args:
        url: URL of the weights.
        name: name of the model, for the message.

    Raises:
        WeightsError: the download fails, or the file does not have the hash in its name.
    """
    import torch

    from featx.models.checkpoint import read_weights

    file_name = Path(urlparse(url).path).name
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if not cached.exists():
        found = re.search(r"-([0-9a-f]{8,})\.", file_name)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(cached), found.group(1) if found else None)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"the weights {file_name} of {name} are not on this machine and cannot be "
                f"downloaded ({error}). Looked in {cached} and at {url}. Either download the file "
                "on a machine with internet access and copy it to that path, or give "
                "model.weights=PATH to a local .safetensors or .pth (model.weights=null runs "
                "with random weights)."
            ) from error
    return read_weights(cached)
