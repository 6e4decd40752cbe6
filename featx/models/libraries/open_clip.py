"""model=open_clip: the image towers of CLIP models, with their tags, files and folders."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member
from featx.models.open_clip.options import OpenClipOptions

if TYPE_CHECKING:
    import torch

    from featx.models.base import Backbone


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
        load_tower,
        num_prefix_tokens,
        preprocess_of,
        stages_of,
    )
    from featx.models.open_clip.sources import source_of
    from featx.models.preprocessing import change_preprocess

    source = source_of(config)
    module, checkpoint = load_tower(source, config, seed)
    return Backbone(
        module=module,
        name=f"open_clip/{source.name}",
        weights=source.describe(seed),
        preprocess=change_preprocess(preprocess_of(source, module), config.transform),
        num_prefix_tokens=num_prefix_tokens(module),
        has_class_token=has_class_token(module),
        embedding=embedding_of(module, config.normalize),
        stages=stages_of(module),
        reentrant=True,
        checkpoint=checkpoint,
        packages=("open_clip_torch",),
        provenance={
            "embedding": f"encode_image(normalize={config.normalize})",
            "quick_gelu": int(source.uses_quick_gelu),
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
