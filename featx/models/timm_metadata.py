"""Stages and names of classes that timm knows, for its own models and those of other libraries."""

from __future__ import annotations


def timm_stages(module: object) -> tuple[str, ...] | None:
    """Names of the stages in the feature_info of a timm model, or None if it has none.

    Some of the names are no modules. The preset `stages` is refused for these, because modules that
    look like stages may be parts of one.
    """
    info = getattr(module, "feature_info", None)
    rows = getattr(info, "info", info) or []
    names = tuple(row["module"] for row in rows if isinstance(row, dict) and row.get("module"))
    return names or None


def imagenet_classes(subset: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and WordNet identifiers of the classes of ImageNet, both empty for None.

    `subset` is timm's name of a part of ImageNet, such as imagenet-1k.
    """
    from timm.data.imagenet_info import ImageNetInfo

    if subset is None:
        return (), ()
    info = ImageNetInfo(subset)
    numbers = range(info.num_classes())  # type: ignore[no-untyped-call]
    return (
        tuple(info.index_to_description(i) for i in numbers),
        tuple(info.index_to_label_name(i) for i in numbers),
    )


def timm_classes(module: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and identifiers of the logits of a timm model; empty unless those of ImageNet."""
    from timm.data.imagenet_info import infer_imagenet_subset

    return imagenet_classes(infer_imagenet_subset(module))
