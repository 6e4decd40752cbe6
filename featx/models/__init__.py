"""Backbones: a module together with its preprocessing and the identity of its weights.

In: a `ModelConfig` and a seed. Out: a frozen `Backbone` in eval mode, on the CPU.
`model=NAME` needs no YAML: the packaged names come first, then torchvision's, then timm's.
Names for others: `build_backbone`, `resolve_library`, `registered_names`, `base.Backbone`,
`base.LibraryEmbedding`, `batchnorm_folding`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from featx.config import ModelConfig
from featx.errors import ModelError, nearest

if TYPE_CHECKING:
    from featx.models.base import Backbone

PACKAGED = ("efficientnet_lite0",)


def resolve_library(config: ModelConfig) -> str:
    """Which library a model name belongs to; imports neither, so that a typo is told at once.

    Raises:
        ModelError: no library knows the name; the message lists the nearest.
    """
    name = config.name
    if config.library == "custom":
        return "custom"
    known = {
        "packaged": PACKAGED,
        "torchvision": registered_names("torchvision"),
        "timm": registered_names("timm"),
    }
    if config.library == "timm" and ":" in name:
        return "timm"  # hf-hub:owner/model, which only the hub can know
    asked = known if config.library == "auto" else {config.library: known[config.library]}
    for library, names in asked.items():
        if (name.split(".", 1)[0] if library == "timm" else name) in names:
            return library
    everything = sorted({n for names in asked.values() for n in names})
    raise ModelError(
        f"unknown model {name!r} (looked in {', '.join(asked)}).{nearest(name, everything)} "
        "For your own module: model=custom model.target=package.module:factory."
    )


def build_backbone(config: ModelConfig, seed: int) -> Backbone:
    """Build the backbone, load its weights, freeze it, and put it in eval mode (on the CPU).

    With init=reset the weights are replaced by those of weights=null, and all else stays: the
    preprocessing of these very weights, and what a library builds for them only.

    Raises:
        ModelError, WeightsError, MissingExtraError: with what to do.
    """
    library = importlib.import_module(f"featx.models.{resolve_library(config)}")
    backbone: Backbone = library.build(config, seed)
    if config.init == "reset":
        from featx.models.base import reset_weights  # which imports torch

        try:
            reset_weights(backbone, library.untrained(config, seed), seed)
        except BaseException:
            backbone.give_back()
            raise
    return backbone


@cache
def registered_names(library: str) -> frozenset[str]:
    """The names a model library registers, read off its sources.

    Importing torchvision or timm takes seconds; their registries are decorators above functions
    (`@register_model`), which can be read in milliseconds. A test compares this with the registry.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return frozenset()
    names: set[str] = set()
    for path in (Path(spec.origin).parent / "models").rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "register_model" not in text:
            continue
        for decorator, function in re.findall(
            r"^@register_model(\(.*\))?\s*\n(?:@.*\n|[ )].*\n)*def (\w+)\(", text, re.MULTILINE
        ):
            given = re.search(r"name=[\"'](\w+)[\"']", decorator)
            names.add(given.group(1) if given else function)
        if "register_model_deprecations" in text:
            names.update(re.findall(r"^    ['\"](\w+)['\"] ?: ['\"]", text, re.MULTILINE))
    return frozenset(names)
