"""Model libraries: finds the library of a model and builds the backbone."""

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
"""Models whose weights come in a Python package; see `featx.models.packaged`."""


def resolve_library(config: ModelConfig) -> str:
    """Name of the library to which a model belongs.

    It imports neither library, so a mistyped name is reported at once.

    Args:
        config: model name and library, which may be 'auto'.

    Returns:
        'packaged', 'torchvision', 'timm' or 'custom'.

    Raises:
        ModelError: no library has the model; the message lists the nearest names.
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
        "For your own module: model=custom model.factory=package.module:factory."
    )


def build_backbone(config: ModelConfig, seed: int) -> Backbone:
    """Build a backbone on the CPU, load its weights, freeze it and put it in eval mode.

    model.init=reset replaces the values of the weights by those of an untrained model.
    Preprocessing, names and architecture stay those of the given weights.

    Args:
        config: model, weights and arguments.
        seed: seed of random weights.

    Raises:
        ModelError: the model cannot be built.
        WeightsError: the weights cannot be found, read or loaded.
        MissingExtraError: a package is not installed.
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
    """Names of the models that a library registers, read from its source files.

    Importing torchvision or timm takes seconds. Their registries are decorators above functions
    (`@register_model`), which are found in milliseconds. A test compares the result with the
    registry.

    Args:
        library: 'torchvision' or 'timm'.

    Returns:
        The names; empty if the library is not installed.
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
