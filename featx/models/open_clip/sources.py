"""Sources of CLIP models: a tag of open_clip, a file, or a folder.

Architecture, activation and preprocessing of a CLIP model belong to its weights. A file alone does
not tell them: 58 of the 196 tags of open_clip 3.3 have other preprocessing than the default, and 27
have QuickGELU where the architecture's name says GELU. Hence a file needs a tag that it is like.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import import_extra
from featx.config import check_weights_like
from featx.errors import ConfigError, ModelError, WeightsError, nearest
from featx.models.hugging_face import read_json
from featx.models.known_names import hint_elsewhere

if TYPE_CHECKING:
    from featx.models.open_clip.options import OpenClipOptions

CONFIG = "open_clip_config.json"
_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_LOCAL = "local-dir:"


@dataclass(frozen=True)
class ClipSource:
    """A CLIP model before it is built.

    Attributes:
        name: architecture, or folder.
        model: configuration of the model, as in open_clip's files.
        preprocess: configuration of the preprocessing; what it lacks is open_clip's default.
        tag: tag whose weights are loaded, or None.
        file: file whose weights are loaded, or None.
        like: tag that the file is like, or None.
    """

    name: str
    model: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    tag: str | None = None
    file: Path | None = None
    like: str | None = None

    @property
    def uses_quick_gelu(self) -> bool:
        """Whether the activation is QuickGELU."""
        return bool(self.model.get("quick_gelu", False))

    def describe(self, seed: int) -> str:
        """Return the description of the weights."""
        from featx.models.base import random_id

        if self.file is not None:
            return f"{self.file}{f' like {self.like}' if self.like else ''}"
        return f"open_clip {self.tag}" if self.tag else random_id(seed)


def import_open_clip() -> Any:
    """Import open_clip.

    Raises:
        MissingExtraError: it is not installed.
    """
    return import_extra("open_clip", "model=open_clip", "the extra clip", "clip")


def source_of(config: OpenClipOptions) -> ClipSource:
    """Return what the options of a model name.

    Raises:
        ModelError: open_clip has no such model, or the folder is of another library.
        WeightsError: there is no such tag or file, or it is not said what a file is like.
        ConfigError: options have no effect together.
    """
    open_clip = import_open_clip()
    if config.name.startswith(_LOCAL) or Path(config.name).expanduser().is_dir():
        source = _source_of_folder(config)
    else:
        source = _source_of_name(open_clip, config)
    has_file = source.file is not None and config.weights != "default"
    config.checkpoint.check_effect(has_file=has_file, is_converted=False)
    check_weights_like(config.weights_like, has_file=source.like is not None)
    return source


def _source_of_folder(config: OpenClipOptions) -> ClipSource:
    """Return the model of a folder with open_clip_config.json."""
    folder = Path(config.name.removeprefix(_LOCAL)).expanduser()
    if not (folder / CONFIG).is_file():
        raise WeightsError(
            f"model.name={config.name}: there is no {folder / CONFIG}. Expected a folder with "
            f"{CONFIG} and {_WEIGHTS[0]}, as push_to_hf_hub of open_clip writes it, or the name of "
            "an architecture, such as ViT-B-32."
        )
    description = read_json(folder / CONFIG)
    if not isinstance(description.get("model_cfg"), dict):
        raise WeightsError(f"{folder / CONFIG} has no model_cfg, so it describes no CLIP model.")
    if config.weights not in (None, "default"):
        raise ConfigError(
            f"model.weights={config.weights}: a folder has its own weights. Leave the option out, "
            "or give null for random weights."
        )
    files = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if config.weights is not None and not files:
        raise WeightsError(f"{folder} has no weights: expected {' or '.join(_WEIGHTS)}.")
    return ClipSource(
        name=folder.name,
        model=description["model_cfg"],
        preprocess=description.get("preprocess_cfg") or {},
        file=files[0] if config.weights is not None else None,
    )


def _source_of_name(open_clip: Any, config: OpenClipOptions) -> ClipSource:
    """Return the model of a name, with the weights of a tag, of a file, or random."""
    name = config.name.replace("/", "-")
    model_config = open_clip.get_model_config(name)
    if model_config is None:
        raise ModelError(
            f"open_clip has no model {config.name!r}.{nearest(name, open_clip.list_models())} "
            f"A folder needs {CONFIG}.{hint_elsewhere(config.name)}"
        )
    tags: list[str] = open_clip.list_pretrained_tags_by_model(name)
    weights = config.weights
    if weights is None:
        return ClipSource(name, model_config, {})
    tags_text = ", ".join(tags) or "none"
    if weights == "default":
        raise WeightsError(
            f"model.name={name}: name the weights in model.weights. Tags of open_clip: "
            f"{tags_text}. Or give a file, with model.weights_like=TAG."
        )
    if config.weights_file is None:
        tag = _checked_tag(open_clip, name, weights, "model.weights", tags_text)
        pretrained_cfg = open_clip.get_pretrained_cfg(name, tag)
        return ClipSource(
            name, _with_activation(model_config, pretrained_cfg), pretrained_cfg, tag=tag
        )
    if config.weights_like is None and tags:
        raise WeightsError(
            f"model.weights={weights}: a file does not say with which preprocessing and activation "
            f"it was trained. Add model.weights_like=TAG, with the tag of {name} that it is, or "
            f"was fine-tuned from: {tags_text}. Or give a folder with {CONFIG} as model.name."
        )
    file = Path(weights).expanduser()
    if config.weights_like is None:
        return ClipSource(name, model_config, {}, file=file)
    like = _checked_tag(open_clip, name, config.weights_like, "model.weights_like", tags_text)
    pretrained_cfg = open_clip.get_pretrained_cfg(name, like)
    return ClipSource(
        name, _with_activation(model_config, pretrained_cfg), pretrained_cfg, file=file, like=like
    )


def _checked_tag(open_clip: Any, name: str, tag: str, option: str, listed: str) -> str:
    """Return a tag that open_clip has for a model.

    Raises:
        WeightsError: it has not.
    """
    if not open_clip.get_pretrained_cfg(name, tag):
        raise WeightsError(
            f"{option}={tag}: open_clip has no such tag for {name}; it has {listed}."
        )
    return tag


def _with_activation(model: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model with the activation that a tag was trained with."""
    changed = copy.deepcopy(dict(model))
    if about.get("quick_gelu"):
        changed["quick_gelu"] = True
    return changed
