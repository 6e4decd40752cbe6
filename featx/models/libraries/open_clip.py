"""model=open_clip: the image towers of CLIP models, with their tags, files and folders.

Architecture, activation and preprocessing of a CLIP model belong to its weights. A file alone does
not tell them: 58 of the 196 tags of open_clip 3.3 have other preprocessing than the default, and 27
have QuickGELU where the architecture's name says GELU. Hence a file needs a tag that it is like.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from featx.base import import_extra
from featx.config import CheckpointConfig, ModelConfig, TransformConfig, check_weights_like, options
from featx.errors import ConfigError, ModelError, WeightsError, first_line, nearest, one_line
from featx.models.catalogue import hint_elsewhere
from featx.models.hugging_face import is_cached, read_json, resolve_hub
from featx.models.libraries.registry import LIBRARIES, ModelLibrary
from featx.models.timm_metadata import timm_stages

if TYPE_CHECKING:
    import torch

    from featx.images import Preprocess
    from featx.models.base import Backbone, LibraryEmbedding

LOCAL = "local-dir:"
"""Prefix that marks the name of a folder for open_clip."""

_CONFIG = "open_clip_config.json"
_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


@options("model")
class OpenClipOptions(ModelConfig):
    """Options of model=open_clip."""

    name: str = ""
    library: str = "open_clip"
    weights_like: str | None = None
    """Tag of the library whose preprocessing and activation belong to a file in model.weights."""
    normalize: bool = False
    """Whether the embedding is divided by its length, as by encode_image(normalize=True)."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    """Preprocessing of the images, by default that of the weights."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Choice and conversion of the tensors of a file in model.weights."""

    needs = "model.name=NAME, such as ViT-B-32, or model.name=FOLDER with open_clip_config.json"


class OpenClip(ModelLibrary[OpenClipOptions]):
    """Image towers of CLIP models."""

    def build(self, config: OpenClipOptions, seed: int) -> Backbone:
        """Build the image tower of a CLIP model."""
        from featx.models.base import Backbone, config_sha256
        from featx.models.preprocessing import change_preprocess

        source = source_of(config)
        module, checkpoint = _load_tower(source, config, seed)
        prefix, has_class_token, stages = _tokens_and_stages(module)
        return Backbone(
            module=module,
            name=f"open_clip/{source.name}",
            weights=source.describe(seed),
            preprocess=change_preprocess(preprocess_of(source, module), config.transform),
            num_prefix_tokens=prefix,
            has_class_token=has_class_token,
            embedding=embedding_of(module, config.normalize),
            stages=stages,
            reentrant=True,
            checkpoint=checkpoint,
            packages=("open_clip_torch",),
            provenance={
                "embedding": f"encode_image(normalize={config.normalize})",
                "quick_gelu": int(source.uses_quick_gelu),
                "config_sha256": config_sha256(source.model),
            },
        )

    def untrained(self, config: OpenClipOptions, seed: int) -> torch.nn.Module:
        """The architecture with open_clip's initialisation."""
        return random_tower(source_of(config), seed)

    def own_names(self) -> list[str]:
        """Return the names of the architectures."""
        names: list[str] = import_open_clip().list_models()
        return names


def import_open_clip() -> ModuleType:
    """Import open_clip, an optional package."""
    return import_extra("open_clip", "model=open_clip", "the extra clip", "clip")


# Where a model comes from: a tag, a file or a folder


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


def source_of(config: OpenClipOptions) -> ClipSource:
    """Return what the options of a model name."""
    open_clip = import_open_clip()
    if config.name.startswith(LOCAL) or Path(config.name).expanduser().is_dir():
        source = _source_of_folder(config)
    else:
        source = _source_of_name(open_clip, config)
    has_file = source.file is not None and config.weights != "default"
    config.checkpoint.check_effect(has_file=has_file, is_converted=False)
    check_weights_like(config.weights_like, has_file=source.like is not None)
    return source


def _source_of_folder(config: OpenClipOptions) -> ClipSource:
    folder = Path(config.name.removeprefix(LOCAL)).expanduser()
    if not (folder / _CONFIG).is_file():
        raise WeightsError(
            f"model.name={config.name}: there is no {folder / _CONFIG}. Expected a folder with "
            f"{_CONFIG} and {_WEIGHTS[0]}, as push_to_hf_hub of open_clip writes it, or the name "
            "of an architecture, such as ViT-B-32."
        )
    description = read_json(folder / _CONFIG)
    if not isinstance(description.get("model_cfg"), dict):
        raise WeightsError(f"{folder / _CONFIG} has no model_cfg, so it describes no CLIP model.")
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


def _source_of_name(open_clip: ModuleType, config: OpenClipOptions) -> ClipSource:
    """Return the model of a name, with the weights of a tag, of a file, or random."""
    name, weights = config.name.replace("/", "-"), config.weights
    model = open_clip.get_model_config(name)
    if model is None:
        raise ModelError(
            f"open_clip has no model {config.name!r}.{nearest(name, open_clip.list_models())} "
            f"A folder needs {_CONFIG}.{hint_elsewhere(config.name)}"
        )
    if weights is None:
        return ClipSource(name, model, {})
    tags: list[str] = open_clip.list_pretrained_tags_by_model(name)
    tags_text = ", ".join(tags) or "none"
    if weights == "default":
        raise WeightsError(
            f"model.name={name}: name the weights in model.weights. Tags of open_clip: "
            f"{tags_text}. Or give a file, with model.weights_like=TAG."
        )
    file = None if config.weights_file is None else Path(weights).expanduser()
    option = "model.weights" if file is None else "model.weights_like"
    tag = weights if file is None else config.weights_like
    if tag is None and tags:
        raise WeightsError(
            f"model.weights={weights}: a file does not say with which preprocessing and activation "
            f"it was trained. Add model.weights_like=TAG, with the tag of {name} that it is, or "
            f"was fine-tuned from: {tags_text}. Or give a folder with {_CONFIG} as model.name."
        )
    if tag is None:
        return ClipSource(name, model, {}, file=file)
    pretrained = open_clip.get_pretrained_cfg(name, tag)
    if not pretrained:
        raise WeightsError(
            f"{option}={tag}: open_clip has no such tag for {name}; it has {tags_text}."
        )
    model = copy.deepcopy(dict(model))
    if pretrained.get("quick_gelu"):
        model["quick_gelu"] = True
    if file is None:
        return ClipSource(name, model, pretrained, tag=tag)
    return ClipSource(name, model, pretrained, file=file, like=tag)


# The part of a model that reads images


def random_tower(source: ClipSource, seed: int) -> torch.nn.Module:
    """Return the image tower with open_clip's initialisation.

    The text tower is not built: it has as many parameters, and may need files of the hub.
    """
    import_open_clip()
    from open_clip.model import _build_vision_tower

    from featx.models.base import seeded

    try:
        vision = {**source.model["vision_cfg"], "timm_model_pretrained": False}
        with seeded(seed):
            module: torch.nn.Module = _build_vision_tower(
                source.model["embed_dim"], vision, source.uses_quick_gelu
            )
    except Exception as error:  # of many kinds, about the configuration of a folder
        raise ModelError(f"open_clip cannot build {source.name}: {one_line(error)}.") from error
    return module.eval()


def _load_tower(
    source: ClipSource, config: OpenClipOptions, seed: int
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the image tower with its weights, and what the fingerprint says about their loading.

    That of a tag is a part of the model that open_clip itself loads, strictly.
    """
    from featx.models.checkpoint import load_weights, read_weights

    if source.tag is not None:
        visual: torch.nn.Module = create_of_tag(source).visual
        return visual.eval(), {}
    module = random_tower(source, seed)
    if source.file is None:
        return module, {}
    origin = str(source.file)
    state = read_weights(source.file, config.checkpoint.sha256)
    return module, load_weights(module, state, origin, config.checkpoint.prefix)


def create_of_tag(source: ClipSource) -> Any:
    """Return both towers of a tag, as open_clip loads them."""
    open_clip = import_open_clip()
    with _download_errors(open_clip.get_pretrained_cfg(source.name, source.tag), source):
        return open_clip.create_model(
            source.name, pretrained=source.tag, force_quick_gelu=source.uses_quick_gelu
        )


@contextlib.contextmanager
def _download_errors(pretrained_cfg: dict[str, object], source: ClipSource) -> Iterator[None]:
    """Turn errors of a download into a WeightsError that says what to do.

    If the name of the server cannot be resolved, the error is raised at once.
    """
    repository = str(pretrained_cfg.get("hf_hub") or "").strip("/")
    parts = repository.split("/")
    repository = "/".join(parts[:2])
    try:
        needs_hub = repository and "file" not in pretrained_cfg
        if needs_hub and not is_cached(repository, parts[2:] or _WEIGHTS):
            resolve_hub()
        yield
    except (OSError, RuntimeError, ValueError) as error:
        advice = f"`hf download {repository}`" if repository else pretrained_cfg.get("url")
        raise WeightsError(
            f"the weights {source.tag} of {source.name} are not on this machine and cannot be "
            f"loaded ({first_line(error)}). Fetch them with {advice} on a machine with internet "
            f"access, and give the file: model.weights=FILE model.weights_like={source.tag}."
        ) from error


def preprocess_of(source: ClipSource, module: torch.nn.Module) -> Preprocess:
    """Return open_clip's evaluation transform, for the size of images that the tower takes."""
    import_open_clip()
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict

    from featx.images import Preprocess

    try:
        values = merge_preprocess_dict(PreprocessCfg(), dict(source.preprocess))
        size = getattr(module, "image_size", values["size"])
        values["size"] = tuple(size) if isinstance(size, list) else size  # JSON has no tuples
        cfg = PreprocessCfg(**values)
        reference = image_transform_v2(cfg, is_train=False)
        _, height, width = cfg.input_size
        mean, std = ((x[0], x[1], x[2]) for x in (cfg.mean, cfg.std))
    except (AssertionError, TypeError, ValueError, LookupError) as error:
        raise WeightsError(
            f"open_clip does not take the preprocessing of {source.name}: {source.preprocess}."
        ) from error
    # open_clip pads for `longest`, and resizes otherwise for images that are not square.
    resize: int | tuple[int, int] | None = None
    if cfg.resize_mode == "squash":
        resize = (height, width)
    elif cfg.resize_mode == "shortest" and height == width:
        resize = height
    return Preprocess(
        reference=reference,
        crop=(height, width),
        resize=resize,
        interpolation="bilinear" if cfg.interpolation == "bilinear" else "bicubic",
        mean=mean,
        std=std,
    )


def embedding_of(module: torch.nn.Module, is_normalised: bool) -> LibraryEmbedding:
    """Return the embedding of an image, as encode_image computes it."""
    import torch.nn.functional as F

    from featx.models.base import LibraryEmbedding, expose_embedding

    def embedding(output: Any) -> torch.Tensor:
        # The towers of CoCa return their tokens as well.
        vector: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return F.normalize(vector, dim=-1) if is_normalised else vector

    return LibraryEmbedding(
        lambda x: embedding(module(x)), lambda: expose_embedding(module, embedding)
    )


def _tokens_and_stages(module: object) -> tuple[int, bool, tuple[str, ...] | None]:
    """Return the number of prefix tokens, whether one is a class token, and the stages of a tower.

    The stages are None if they are to be found from shapes.
    """
    if hasattr(module, "trunk"):  # a model of timm
        names = timm_stages(module.trunk)
        return (
            int(getattr(module.trunk, "num_prefix_tokens", 0)),
            getattr(module.trunk, "cls_token", None) is not None,
            None if names is None else tuple(f"trunk.{name}" for name in names),
        )
    has_class_token = hasattr(module, "class_embedding")
    names = tuple(f"layer{i}" for i in range(1, 5))
    if hasattr(module, "transformer"):
        number = len(module.transformer.resblocks)
        names = tuple(f"transformer.resblocks.{i}" for i in range(number))
    elif not all(hasattr(module, name) for name in names):
        names = None
    return int(has_class_token), has_class_token, names


LIBRARIES.register(
    OpenClip(
        "open_clip",
        "Image towers of CLIP models of open_clip: a name with a tag or a file, or a folder.",
        OpenClipOptions,
        takes_any_name=True,
        extra="clip",
    )
)
