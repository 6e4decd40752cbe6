"""Backbones of timm's models: preprocessing, embedding, stages and names of classes."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from featx.errors import ModelError

if TYPE_CHECKING:
    import torch

    from featx.images import Preprocess
    from featx.models.base import Backbone, LibraryEmbedding


def wrap(
    module: torch.nn.Module,
    name: str,
    weights: str,
    size: tuple[int, int] | None = None,
    is_rgb: bool = True,
) -> Backbone:
    """Make a backbone of a timm model, with its preprocessing, embedding and stages.

    Args:
        module: model of timm.
        name: library and model.
        weights: description of the weights.
        size: as for `preprocess_of`.
        is_rgb: as for `preprocess_of`.
    """
    from featx.models.base import Backbone

    return Backbone(
        module=module,
        name=name,
        weights=weights,
        preprocess=preprocess_of(module, size, is_rgb),
        num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
        has_class_token=any(
            name.rpartition(".")[2] == "cls_token" for name, _ in module.named_parameters()
        ),
        embedding=embedding_of(module),
        stages=timm_stages(module),
        reentrant=True,
    )


def preprocess_of(
    module: torch.nn.Module, size: tuple[int, int] | None = None, is_rgb: bool = True
) -> Preprocess:
    """timm's evaluation transform for the weights of a module.

    Args:
        module: model of timm.
        size: (height, width) of the images in pixels, with the share of the centre that the weights
            ask for; None takes the size of the weights.
        is_rgb: whether the images are RGB of 8 bits; otherwise options state the channels.

    Raises:
        ModelError: the images are RGB, and the model does not take three channels.
    """
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    from featx.images import Preprocess

    asked = {} if size is None else {"input_size": (3, *size)}
    data: dict[str, Any] = resolve_model_data_config(module, asked)  # type: ignore[no-untyped-call]
    channels, height, width = data["input_size"]
    if is_rgb and channels != 3:
        raise ModelError(
            f"this model takes {channels} channels, and images are RGB of 8 bits, unless "
            "model.transform.scale, mean and std say otherwise."
        )
    # timm resizes in four ways, and the fast path follows two of them. Borders, and sizes that are
    # not square but keep the proportions of the image, are left to timm.
    scaled = math.floor(height / data["crop_pct"]), math.floor(width / data["crop_pct"])
    resize: int | tuple[int, int] | None = None
    if data["crop_mode"] == "squash":
        resize = scaled
    elif data["crop_mode"] == "center" and scaled[0] == scaled[1]:
        resize = scaled[0]
    return Preprocess(
        reference=create_transform(**data, is_training=False),
        crop=(height, width),
        resize=resize,
        interpolation=data["interpolation"],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
    )


def embedding_of(module: Any) -> LibraryEmbedding:
    """timm's own embedding: the pre-logits, or the output of a model without a classifier."""
    from featx.models.base import LibraryEmbedding

    # The encoder of MobileNetV5 lacks the argument that all other models of timm have. It is looked
    # for now, because the class that `_expose_pre_logits` makes has another signature.
    head = getattr(module, "forward_head", None)
    has_argument = head is not None and "pre_logits" in inspect.signature(head).parameters

    def compute(x: torch.Tensor) -> Any:
        if not has_argument:
            return module(x)
        try:
            return module.forward_head(module.forward_features(x), pre_logits=True)
        except NotImplementedError:  # an encoder without a classifier
            return module(x)

    return LibraryEmbedding(compute, lambda: _expose_pre_logits(module))


def _expose_pre_logits(module: Any) -> None:
    """Add a module `pre_logits` to a model; each forward pass calls it with the pre-logits.

    The class of the model becomes a subclass, instead of a method of the object being replaced, so
    that deep copies of the model work.
    """
    import torch

    base: Any = type(module)

    class WithPreLogits(base):  # type: ignore[misc]
        def forward_head(self, x: Any, *args: Any, **keywords: Any) -> Any:
            logits = super().forward_head(x, *args, **keywords)
            if not keywords.get("pre_logits"):
                self.pre_logits(super().forward_head(x, pre_logits=True))
            return logits

    WithPreLogits.__name__, WithPreLogits.__qualname__ = base.__name__, base.__qualname__
    module.add_module("pre_logits", torch.nn.Identity())
    module.__class__ = WithPreLogits


def timm_stages(module: Any) -> tuple[str, ...] | None:
    """Names of the stages in the feature_info of a timm model, or None if it has none.

    Some of the names are no modules. The preset `stages` is refused for these, because modules that
    look like stages may be parts of one.
    """
    info = getattr(module, "feature_info", None)
    rows = getattr(info, "info", info) or []
    names = tuple(row["module"] for row in rows if isinstance(row, dict) and row.get("module"))
    return names or None


def timm_classes(module: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and identifiers of the logits of a timm model that was trained on ImageNet.

    Both are empty for other models.
    """
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(module)
    if subset is None:
        return (), ()
    info = ImageNetInfo(subset)
    numbers = range(info.num_classes())  # type: ignore[no-untyped-call]
    return (
        tuple(info.index_to_description(i) for i in numbers),
        tuple(info.index_to_label_name(i) for i in numbers),
    )
