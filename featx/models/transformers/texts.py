"""Vectors of texts by the text tower and the tokenizer of a folder of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.errors import ConfigError, WeightsError, first_line
from featx.models.transformers.folder import (
    VOCABULARIES,
    find_folder,
    read_config,
    read_state,
)
from featx.models.transformers.loading import Blueprint, import_transformers, load_model, quiet

if TYPE_CHECKING:
    import torch

_TWO_TOWERS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
"""model_type of config.json -> class that holds both towers."""


def load_two_towers(name: str) -> tuple[Any, Any]:
    """Load image and text tower of a folder, and its tokenizer.

    Raises ConfigError if the model has no text tower, WeightsError if files cannot be loaded.
    """
    transformers = import_transformers()
    folder = find_folder(name)
    values = read_config(folder)
    model_type = str(values.pop("model_type"))
    if model_type not in _TWO_TOWERS:
        raise ConfigError(
            f"texts need a model with a text tower: model.name={name} has the model_type "
            f"{model_type}, expected {' or '.join(_TWO_TOWERS)}."
        )
    model = getattr(transformers, _TWO_TOWERS[model_type])
    plan = Blueprint(model, model.config_class.from_dict(values), {})
    return load_model(plan, read_state(folder), name).eval(), _tokenizer(folder)


def text_features(
    model: Any, tokenizer: Any, texts: Sequence[str], device: torch.device
) -> torch.Tensor:
    """Compute what get_text_features returns for texts, (q, P) float32 on the CPU.

    Raises ConfigError if a text has more tokens than the model reads.
    """
    import torch

    sizes = model.config.text_config
    limit = sizes.max_position_embeddings
    for text, ids in zip(texts, tokenizer(list(texts)).input_ids, strict=True):
        if len(ids) > limit:
            raise ConfigError(
                f"the text {text!r} has {len(ids)} tokens, and the model reads {limit}: shorten it."
            )
        if max(ids, default=0) >= sizes.vocab_size:
            raise WeightsError(
                f"the tokenizer is not that of the model, which has {sizes.vocab_size} tokens: it "
                f"has the token {max(ids)} for {text!r}."
            )
    # SigLIP was trained with texts of full length; CLIP does not read what follows the end.
    tokens = tokenizer(list(texts), padding="max_length", max_length=limit, return_tensors="pt")
    with torch.no_grad():
        output = model.to(device).get_text_features(**tokens.to(device))
    features: torch.Tensor = output.pooler_output.float().cpu()
    return features


def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; `read_config` has refused one that names code."""
    from transformers import AutoTokenizer

    # Without them transformers makes a tokenizer that knows no word.
    reason = f"it has none of {', '.join(VOCABULARIES)}."
    if any((folder / name).is_file() for name in VOCABULARIES):
        try:
            with quiet():
                return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - of several libraries, about damaged files
            reason = first_line(error)
    raise WeightsError(
        f"the tokenizer of {folder} cannot be loaded: {reason} Copy the files of the tokenizer "
        "into the folder of the model."
    )
