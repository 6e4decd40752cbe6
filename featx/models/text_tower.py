"""Vectors of texts by the text tower of a model, and linear heads of class names made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featx.base import quiet_logs
from featx.errors import (
    ConfigError,
    FeatxError,
    MissingExtraError,
    ModelError,
    WeightsError,
    first_line,
)
from featx.models.base import config_sha256, state_sha256
from featx.models.checkpoint import load_weights, read_weights
from featx.models.libraries.open_clip import (
    LOCAL,
    OpenClipOptions,
    create_of_tag,
    import_open_clip,
    source_of,
)
from featx.models.transformers.folder import (
    VOCABULARIES,
    find_folder,
    read_config,
    read_state,
    refuse_code,
)
from featx.models.transformers.loading import Blueprint, import_transformers, load_model, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from featx.config import ModelConfig

TEMPLATE_SETS = ("openai", "simple")
"""Names of lists of templates that open_clip has."""

_TWO_TOWERS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
"""model_type of config.json -> class that holds both towers."""


@dataclass(frozen=True)
class TextClassifier:
    """Linear classifier of image embeddings of length 1.

    Attributes:
        weight: (C, D) float32; the mean vector of each class, of length 1, times the scale of the
            model.
        bias: (C,) float32; the bias of models trained with a sigmoid, otherwise 0.
        templates: number of texts of each class.
        weights_sha256: SHA-256 of the image tower that belongs to it.
        config_sha256: SHA-256 of the config of the model, as in the fingerprint of a run.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    templates: int
    weights_sha256: str
    config_sha256: str


@dataclass(frozen=True)
class TextVectors:
    """Vectors of texts in the space in which a model compares them with images by their cosine.

    Attributes:
        vectors: (q, P) float32.
        projection: (D, P) float32 that takes the embedding of an image into this space; None if the
            embedding is in it.
        weights_sha256: SHA-256 of the image tower that belongs to them.
        config_sha256: SHA-256 of the config of the model, as in the fingerprint of a run.
    """

    vectors: npt.NDArray[np.float32]
    projection: npt.NDArray[np.float32] | None
    weights_sha256: str
    config_sha256: str


def text_vectors(config: ModelConfig, texts: Sequence[str], device: torch.device) -> TextVectors:
    """Compute the vectors of texts, in the directions that the model's own library gives them.

    Args:
        config: options of a model with a text tower, with its weights: one of open_clip, or a
            folder of CLIP or SigLIP of transformers.

    Raises:
        ConfigError: the model has no text tower or random weights, or a text is too long.
        WeightsError: its weights or the files of its tokenizer cannot be loaded.
    """
    if config.library != "transformers":
        classifier = text_classifier(config, texts, ["{}"], device)
        identity = classifier.weights_sha256, classifier.config_sha256
        return TextVectors(classifier.weight.numpy(), None, *identity)
    _refuse_random_weights(config)
    folder = find_folder(config.name)
    values = read_config(folder)
    model, tokenizer = _load_two_towers(config.name, folder, values)
    weights_sha256 = state_sha256(model.vision_model)
    # CLIP projects the vector that `embedding` is; that of SigLIP is compared as it is.
    head = getattr(model, "visual_projection", None)
    projection = None if head is None else head.weight.detach().T.contiguous().numpy()
    vectors = _text_features(model, tokenizer, texts, device).numpy()
    if not np.isfinite(vectors).all():
        raise WeightsError(f"the text tower of {config.name} gives values that are not finite.")
    return TextVectors(vectors, projection, weights_sha256, config_sha256(values))


def _load_two_towers(
    name: str, folder: Path, values: Mapping[str, object]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load image and text tower of a folder with some config.json, and its tokenizer.

    Raises ConfigError if the model has no text tower, WeightsError if files cannot be loaded.
    """
    transformers = import_transformers()
    model_type = str(values["model_type"])
    if model_type not in _TWO_TOWERS:
        raise ConfigError(
            f"texts need a model with a text tower: model.name={name} has the model_type "
            f"{model_type}, expected {' or '.join(_TWO_TOWERS)}."
        )
    model = getattr(transformers, _TWO_TOWERS[model_type])
    others = {name: value for name, value in values.items() if name != "model_type"}
    plan = Blueprint(model, model.config_class.from_dict(others), {})
    return load_model(plan, read_state(folder), name).eval(), _folder_tokenizer(folder)


def _text_features(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    device: torch.device,
) -> torch.Tensor:
    """Compute what get_text_features returns for texts, (q, P) float32 on the CPU.

    Raises ConfigError if a text has more tokens than the model reads.
    """
    _check_unicode(texts)
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


def _folder_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder; `read_config` has refused one that names code."""
    from transformers import AutoTokenizer

    # Without them transformers makes a tokenizer that knows no word.
    reason = f"it has none of {', '.join(VOCABULARIES)}."
    if any((folder / name).is_file() for name in VOCABULARIES):
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if tokenizer.pad_token_id is not None:
                return tokenizer
            reason = "it has no pad_token."
        except ImportError as error:  # of SentencePiece, which reads spiece.model
            raise MissingExtraError(
                f"the tokenizer of {folder} needs another package: pip install sentencepiece."
            ) from error
        except Exception as error:  # noqa: BLE001 - of several libraries, about damaged files
            reason = first_line(error)
    raise WeightsError(
        f"the tokenizer of {folder} cannot be loaded: {reason} Copy the files of the tokenizer "
        "into the folder of the model."
    )


def _check_unicode(texts: Sequence[str]) -> None:
    """Raise ConfigError if a text holds bytes that are no UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text {text!r} is not valid Unicode: give it in UTF-8."
            ) from error


def _refuse_random_weights(config: ModelConfig) -> None:
    if config.weights is None or config.init == "reset":
        raise ConfigError("texts need a model with trained weights; these are random.")


def text_classifier(
    config: ModelConfig, names: Sequence[str], templates: Sequence[str] | str, device: torch.device
) -> TextClassifier:
    """Compute the classifier of some class names, as open_clip's build_zero_shot_classifier does.

    Args:
        config: options of a model of open_clip, with its weights.
        names: C names of classes.
        templates: texts with {} in place of the name, or a name in `TEMPLATE_SETS`.
        device: device of the text tower.

    Raises:
        ConfigError: the model is not one of open_clip, has random weights, or a text is too long.
        WeightsError: its weights or the files of its tokenizer cannot be loaded.
    """
    if not isinstance(config, OpenClipOptions):
        raise ConfigError(
            "texts need a model with a text tower: model=open_clip, or for job=neighbors and "
            "job=report a folder of CLIP or SigLIP with model=transformers. This one is "
            f"model.library={config.library} model.name={config.name}."
        )
    _refuse_random_weights(config)
    open_clip = import_open_clip()
    source = source_of(config)
    with quiet_logs():  # open_clip warns of weights that are loaded later
        model = _whole_model(config).eval()
        tokenizer = _tokenizer(config)
        weights_sha256 = state_sha256(model.visual.float())
        model.to(device)
        template_list: Any = templates
        if isinstance(templates, str):
            sets = open_clip.OPENAI_IMAGENET_TEMPLATES, open_clip.SIMPLE_IMAGENET_TEMPLATES
            template_list = dict(zip(TEMPLATE_SETS, sets, strict=True))[templates]
        for name in names:
            _check_lengths(
                tokenizer,
                [each(name) if callable(each) else each.format(name) for each in template_list],
            )
        with torch.no_grad():
            vectors = open_clip.build_zero_shot_classifier(
                model, tokenizer, list(names), list(template_list), device=device
            )
            weight = (vectors.T * model.logit_scale.exp()).float().cpu().contiguous()
            bias = torch.zeros(len(names))
            if getattr(model, "logit_bias", None) is not None:
                bias += model.logit_bias.float().cpu()
    if not torch.isfinite(weight).all():
        raise WeightsError(f"the text tower of {source.name} gives values that are not finite.")
    return TextClassifier(
        weight, bias, len(template_list), weights_sha256, config_sha256(source.model)
    )


def _check_lengths(tokenizer: Any, texts: Sequence[str]) -> None:
    """Raise ConfigError if a tokenizer of open_clip cannot read a text, or cuts it off."""
    _check_unicode(texts)
    limit = tokenizer.context_length
    short, long = (tokenizer([*texts, ""], context_length=n).tolist() for n in (limit, 2 * limit))
    # The longer context adds padding, and the tokens that the shorter one cuts off. Padding may be
    # the same token as the end of a text.
    *added, padding = (Counter(b) - Counter(a) for a, b in zip(short, long, strict=True))
    for text, tokens in zip(texts, added, strict=True):
        if tokens != padding:
            raise ConfigError(
                f"the text {text!r} has more than the {limit} tokens that the model reads: shorten "
                "it."
            )


def _whole_model(config: OpenClipOptions) -> Any:
    """Return image and text tower of a model with their weights."""
    source = source_of(config)
    try:
        if source.tag is not None:
            return create_of_tag(source)
        model = import_open_clip().create_model(
            _place(config), load_weights=False, force_quick_gelu=source.uses_quick_gelu
        )
    except FeatxError:
        raise
    except Exception as error:  # of several libraries: texts of other models come from the hub
        raise ModelError(
            f"open_clip cannot build the text tower of {source.name}: {first_line(error)}"
        ) from error
    if source.file is None:
        raise FeatxError(f"the weights of {source.name} are in no file.")
    prefix = config.checkpoint.prefix
    if prefix is not None:
        prefix = prefix.removesuffix("visual.")
    state = read_weights(source.file, config.checkpoint.sha256)
    load_weights(model, state, str(source.file), prefix)
    return model


def _place(config: OpenClipOptions) -> str:
    """Return what open_clip calls the model: its name, or local-dir: and its folder."""
    folder = Path(config.name.removeprefix(LOCAL)).expanduser()
    is_folder = config.name.startswith(LOCAL) or folder.is_dir()
    return f"{LOCAL}{folder}" if is_folder else config.name


def _tokenizer(config: OpenClipOptions) -> Any:
    place = _place(config)
    if place.startswith(LOCAL):
        refuse_code(Path(place.removeprefix(LOCAL)))
    try:
        return import_open_clip().get_tokenizer(place)
    except Exception as error:  # of several libraries: files of tokenizers come from the hub
        raise WeightsError(
            f"the tokenizer of {config.name} cannot be loaded: {first_line(error)} Put its files "
            "into a folder with open_clip_config.json, and name the folder as model.name."
        ) from error
