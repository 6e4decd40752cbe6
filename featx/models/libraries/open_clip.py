"""model=open_clip: the image towers of CLIP models, with their tags, files and folders."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import CheckpointConfig, ModelConfig, TransformConfig
from featx.errors import ConfigError
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member

if TYPE_CHECKING:
    import torch

    from featx.models.base import Backbone


@dataclass
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
    """Which tensors of a file in model.weights are those of the model."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(
                "model=open_clip needs model.name=NAME, such as ViT-B-32, or model.name=FOLDER "
                "with open_clip_config.json."
            )
        super().__post_init__()


def build(config: OpenClipOptions, seed: int) -> Backbone:
    """Build the image tower of a CLIP model.

    Args:
        config: name, weights and options.
        seed: seed of random weights.

    Raises:
        ModelError: open_clip has no such model.
        WeightsError: the weights do not exist, or cannot be downloaded, read or loaded.
        ConfigError: options have no effect together.
        MissingExtraError: open_clip is not installed.
    """
    from featx.models.base import Backbone
    from featx.models.open_clip.image_tower import (
        embedding_of,
        has_class_token,
        loaded_tower,
        num_prefix_tokens,
        preprocess_of,
        stages_of,
    )
    from featx.models.open_clip.sources import source_of
    from featx.models.preprocessing import changed_preprocess

    source = source_of(config)
    module, said = loaded_tower(source, config, seed)
    return Backbone(
        module=module,
        name=f"open_clip/{source.name}",
        weights=source.describe(seed),
        preprocess=changed_preprocess(preprocess_of(source, module), config.transform),
        num_prefix_tokens=num_prefix_tokens(module),
        has_class_token=has_class_token(module),
        embedding=embedding_of(module, config.normalize),
        stages=stages_of(module),
        reentrant=True,
        checkpoint=said,
        packages=("open_clip_torch",),
        provenance={
            "embedding": f"encode_image(normalize={config.normalize})",
            "quick_gelu": int(source.quick_gelu),
        },
    )


def untrained(config: OpenClipOptions, seed: int) -> torch.nn.Module:
    """The architecture with open_clip's initialisation."""
    from featx.models.open_clip.image_tower import random_tower
    from featx.models.open_clip.sources import source_of

    return random_tower(source_of(config), seed)


def names() -> tuple[str, ...]:
    """Names of the architectures, which open_clip has as files."""
    spec: Any = importlib.util.find_spec("open_clip")
    if spec is None or spec.origin is None:
        return ()
    return tuple(
        sorted(path.stem for path in Path(spec.origin).parent.glob("model_configs/*.json"))
    )


LIBRARIES.register(
    library_member(
        "open_clip",
        "Image towers of CLIP models of open_clip: a name with a tag or a file, or a folder.",
        OpenClipOptions,
        LibraryFunctions(
            build=build,
            untrained=untrained,
            names=names,
            knows=lambda name: True,  # also folders, and architectures that a program has added
        ),
        extra="clip",
    )
)
