"""Meaning of `embedding`, `cls`, `patch_avg` and `stages` in the families of transformers.

A family is a `model_type` of config.json. Most families have their own way from tokens or maps to
one vector, which the shapes of tensors do not show: the embedding of a ViT is its class token, that
of a SigLIP the output of a pooling head, that of an I-JEPA a mean. tests/models/
transformers_survey.py compares this table with plain calls of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featx.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from featx.models.base import LibraryEmbedding

POOLER = "pooler_output"
FIRST_TOKEN = "last_hidden_state[:, 0]"
MEAN_OF_TOKENS = "mean of last_hidden_state over its tokens"
MEAN_OF_MAP = "mean of last_hidden_state over its positions"

_EMBEDDINGS: dict[str, Callable[[Mapping[str, torch.Tensor]], torch.Tensor]] = {
    POOLER: lambda output: output["pooler_output"].flatten(1),
    FIRST_TOKEN: lambda output: output["last_hidden_state"][:, 0],
    MEAN_OF_TOKENS: lambda output: output["last_hidden_state"].mean(1),
    MEAN_OF_MAP: lambda output: output["last_hidden_state"].mean((-2, -1)),
}
"""Words for the fingerprint -> function from the output of the model to (B, D)."""


@dataclass(frozen=True)
class Family:
    """Meaning of the layer presets in the models of one `model_type`.

    Attributes:
        embedding: a key of `_EMBEDDINGS`.
        prefix: number of tokens before the patch tokens, without register tokens.
        registers: option of config.json with the number of further tokens, which come next.
        has_class_token: whether the first token is one class token.
        stages: module list whose members are the stages; None finds them from shapes.
        blocks: name of the module list inside each stage whose last member gives the map of the
            stage, for stages that downsample after their blocks; '' if the stage is that list;
            None takes the output of the stage.
        model: name of the class that reads `pixel_values`, if it is not the one of AutoModel.
        config: name of the class of its configuration, if it is not the one of the folder.
        takes_any_size: whether the model takes images of another size than config.json states.
        is_reentrant: whether a forward pass keeps nothing in the module.
    """

    embedding: str
    prefix: int = 0
    registers: str | None = None
    has_class_token: bool = True
    stages: str | None = None
    blocks: str | None = None
    model: str | None = None
    config: str | None = None
    takes_any_size: bool = False
    is_reentrant: bool = True

    def num_prefix_tokens(self, config: object) -> int:
        """Return the number of class and register tokens."""
        return self.prefix + (int(getattr(config, self.registers)) if self.registers else 0)

    def stage_names(self, module: nn.Module) -> tuple[str, ...] | None:
        """Return the names of the stages, or None to find them from shapes."""
        if self.stages is None:
            return None
        names = [f"{self.stages}.{name}" for name in _members(module, self.stages)]
        if self.blocks is not None:
            lists = [f"{name}.{self.blocks}".rstrip(".") for name in names]
            names = [f"{name}.{_members(module, name)[-1]}" for name in lists]
        return tuple(names)


def _members(module: nn.Module, name: str) -> list[str]:
    return [child for child, _ in module.get_submodule(name).named_children()]


_VIT = Family(FIRST_TOKEN, prefix=1, stages="layers")
_CLIP = Family(POOLER, prefix=1, stages="encoder.layers", model="CLIPVisionModel")
_CHINESE_CLIP = Family(POOLER, prefix=1, stages="encoder.layers", model="ChineseCLIPVisionModel")
_SIGLIP = Family(POOLER, stages="encoder.layers", model="SiglipVisionModel")
_CONVNEXT = Family(POOLER, stages="encoder.stages", takes_any_size=True)

FAMILIES = {
    "aimv2_vision_model": Family(POOLER, stages="encoder.layers"),
    "beit": Family(POOLER, prefix=1, stages="layers"),
    "blip_vision_model": Family(POOLER, prefix=1, stages="encoder.layers", model="BlipVisionModel"),
    "chinese_clip": _CHINESE_CLIP,
    "chinese_clip_vision_model": _CHINESE_CLIP,
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    "data2vec-vision": Family(POOLER, prefix=1, stages="encoder.layer"),
    "deit": Family(FIRST_TOKEN, prefix=2, stages="layers"),
    "dinov2": Family(FIRST_TOKEN, prefix=1, stages="encoder.layer", takes_any_size=True),
    "dinov2_with_registers": Family(
        FIRST_TOKEN,
        prefix=1,
        registers="num_register_tokens",
        stages="encoder.layer",
        takes_any_size=True,
    ),
    # Its first token is the mean of the others, not a class token.
    "dinov3_convnext": Family(
        POOLER, prefix=1, has_class_token=False, stages="model.stages", takes_any_size=True
    ),
    "dinov3_vit": Family(
        FIRST_TOKEN,
        prefix=1,
        registers="num_register_tokens",
        stages="model.layer",
        takes_any_size=True,
    ),
    "dpt": Family(POOLER, prefix=1, stages="encoder.layer"),
    "focalnet": Family(POOLER, stages="encoder.stages", blocks="layers"),
    "hiera": Family(POOLER, stages="encoder.stages"),
    "ijepa": Family(MEAN_OF_TOKENS, stages="layers"),
    "levit": Family(POOLER, stages="encoder.stages", is_reentrant=False),
    "mlcd_vision_model": Family(POOLER, prefix=1, stages="encoder.layers"),
    "mobilenet_v1": Family(POOLER, takes_any_size=True),
    "mobilenet_v2": Family(POOLER, takes_any_size=True),
    "mobilevit": Family(POOLER, stages="encoder.layer", takes_any_size=True),
    "mobilevitv2": Family(POOLER, stages="encoder.layer", takes_any_size=True),
    "pixio": Family(POOLER, registers="n_cls_tokens", has_class_token=False, stages="layers"),
    "poolformer": Family(MEAN_OF_MAP, stages="encoder.block", blocks="", takes_any_size=True),
    # Only the last stage has the class token.
    "pvt": Family(FIRST_TOKEN, prefix=1, stages="encoder.block", blocks=""),
    "pvt_v2": Family(MEAN_OF_MAP, stages="encoder.layers"),
    "regnet": Family(POOLER, stages="encoder.stages", takes_any_size=True),
    "resnet": Family(POOLER, stages="encoder.stages", takes_any_size=True),
    "segformer": Family(MEAN_OF_MAP, stages="stages", takes_any_size=True),
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "swiftformer": Family(MEAN_OF_MAP, takes_any_size=True),
    # A pass of Swin writes the sizes of its windows into its blocks.
    "swin": Family(POOLER, stages="encoder.layers", blocks="blocks", is_reentrant=False),
    "swinv2": Family(POOLER, stages="encoder.layers", blocks="blocks"),
    "vit": _VIT,
    # ViTMAEModel drops three quarters of the tokens, at random also in eval mode. The same weights
    # are those of a ViT.
    "vit_mae": Family(FIRST_TOKEN, prefix=1, stages="layers", model="ViTModel", config="ViTConfig"),
    "vit_msn": _VIT,
    "vitdet": Family(MEAN_OF_MAP, stages="encoder.layer"),
}
"""model_type of config.json -> what the layer presets mean."""

REFUSED = {
    "imagegpt": "it reads indices of colours",
    "siglip2": "its images are lists of patches of any size (NaFlex). The SigLIP 2 models for "
    "images of one size have the model_type siglip",
    "siglip2_vision_model": "its images are lists of patches of any size (NaFlex)",
    "timesformer": "it reads videos",
    "timm_wrapper": "it is a model of timm: model=timm model.name=NAME "
    "model.weights=FOLDER/model.safetensors, with the name that config.json has as architecture",
    "videomae": "it reads videos",
    "vivit": "it reads videos",
    "vjepa2": "it reads videos",
    "yolos": "it is a detector; its last 100 tokens are boxes",
}
"""model_type -> why featx does not open it."""


def family_of(model_type: str) -> Family:
    """Return what the layer presets mean in a family.

    A family that is not in the table is one whose model returns `pooler_output`; nothing is known
    about its tokens.
    """
    if model_type in REFUSED:
        raise ModelError(
            f"model=transformers cannot open the model_type {model_type}: {REFUSED[model_type]}. "
            "Code of your own can: model=custom model.factory=package.module:factory."
        )
    return FAMILIES.get(model_type, Family(POOLER, has_class_token=False, is_reentrant=False))


def embedding_of(module: nn.Module, family: Family) -> LibraryEmbedding:
    """Return the embedding of a family for a model of it."""
    from featx.models.base import LibraryEmbedding, expose_embedding

    vector = _EMBEDDINGS[family.embedding]

    def compute(x: torch.Tensor) -> torch.Tensor:
        output = module(x)
        if family.embedding == POOLER and output.get("pooler_output") is None:
            raise ModelError(
                f"the preset embedding: a {type(module).__name__} has no pooler_output here, and "
                "featx has no other embedding for it. Name a layer: job=layers lists them."
            )
        return vector(output)

    return LibraryEmbedding(compute, lambda: expose_embedding(module, vector))
