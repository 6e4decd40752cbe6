"""Search the models that can be named, and the backbones that are recommended."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from featx.models.catalogue import CatalogueEntry, read_catalogue
from featx.models.known_models import known_models
from featx.models.known_names import plain
from featx.models.libraries import LIBRARIES
from featx.models.transformers.families import FAMILIES

RECOMMENDED = {
    "efficientnet_lite0": "packaged, works offline; fast on a CPU",
    "resnet18": "small baseline",
    "resnet50": "the usual baseline",
    "convnext_tiny": "a strong convolutional model",
    "vit_b_16": "a ViT trained on ImageNet",
    "vit_small_patch14_dinov2.lvd142m": "DINOv2: general features, small",
    "vit_base_patch14_dinov2.lvd142m": "DINOv2: general features",
    "vit_small_patch16_dinov3.lvd1689m": "DINOv3: dense features, small",
    "vit_base_patch16_clip_quickgelu_224.openai": "CLIP: features that match texts",
    "vit_base_patch16_siglip_224.webli": "SigLIP: features that match texts",
    "mobilenet_v3_large": "small and fast, for CPUs",
    "open_clip model.name=ViT-B-32 model.weights=laion2b_s34b_b79k": "CLIP, for job=zeroshot",
}
"""Value of `model` -> when to use it. docs/backbones.md gives the reasons."""


def listed_models(local: Iterable[CatalogueEntry] = ()) -> list[CatalogueEntry]:
    """Return the models that can be named: those of the catalogue whose library is installed.

    A model that an installed library has and the catalogue lacks is an entry without figures.

    Args:
        local: further models, such as those that lie on this machine.

    Returns:
        Entries by library and name, the default weights of a model first.
    """
    catalogue = read_catalogue()
    listed: list[CatalogueEntry] = []
    for library in LIBRARIES:
        names = set(library.names()) - catalogue.left_out.get(library.name, frozenset())
        known = [e for e in catalogue.entries if e.library == library.name and e.name in names]
        lacking = names - {entry.name for entry in known}
        listed += known
        listed += [CatalogueEntry(library.name, name) for name in sorted(lacking)]
        listed += [entry for entry in local if entry.library == library.name]
    return listed


def search_models(query: str, models: Iterable[CatalogueEntry]) -> list[CatalogueEntry]:
    """Return the models that match a query, the most relevant first.

    Every word of the query has to occur in the name of the model, of its weights or of its library,
    or in a name that other programs have for it. Case and separators do not count. An exact name
    comes first, then recommended models, whole words, beginnings of words, and the rest; default
    weights come before others.

    Args:
        query: words, such as 'dino small'.
        models: models to search.
    """
    recommended = {option: place for place, option in enumerate(RECOMMENDED)}
    words = [word for word in map(plain, query.split()) if word]
    if not words:
        return []
    ranked = []
    for place, entry in enumerate(models):
        others = _other_names().get(entry.option, ())
        name = f"{entry.library} {entry.full_name}"
        texts = [plain(name), *map(plain, others)]
        if not all(any(word in text for text in texts) for word in words):
            continue
        tokens = set(re.split(r"[\W_]+", " ".join((name, *others)).lower()))
        tier = max(_tier(word, tokens) for word in words)
        is_exact = plain(query) in (plain(entry.full_name), plain(entry.name), *texts[1:])
        advised = recommended.get(entry.option, len(recommended))
        rank = (not is_exact, advised, tier, not entry.is_default, place)
        ranked.append((rank, entry))
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def search_families(query: str) -> list[str]:
    """Return the families of transformers that match a query.

    Their models are in folders, and cannot be listed. Every word of the query has to occur in the
    name of the family or in 'transformers'; case and separators do not count.

    Args:
        query: words, such as 'siglip'.
    """
    words = [word for word in map(plain, query.split()) if word]
    texts = {family: plain(f"transformers {family}") for family in FAMILIES}
    return [family for family, text in texts.items() if words and all(w in text for w in words)]


def _tier(word: str, tokens: Collection[str]) -> int:
    """Return 0 if a word is one of the tokens, 1 if one of them begins with it, 2 otherwise."""
    if word in tokens:
        return 0
    return 1 if any(token.startswith(word) for token in tokens) else 2


@cache
def _other_names() -> Mapping[str, tuple[str, ...]]:
    """Return what one types after `model=` -> names that other programs have for the model."""
    names_of_model: dict[str, tuple[str, ...]] = {}
    for model in known_models():
        for _, option in model.options:
            names_of_model[option] = (*names_of_model.get(option, ()), *model.names)
    return names_of_model
