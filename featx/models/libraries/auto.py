"""model.library=auto: the first library that knows the name of the model."""

from __future__ import annotations

from typing import NoReturn

from featx.config import AUTO_LIBRARY, ModelConfig
from featx.errors import FeatxError
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member


def _build(config: ModelConfig, seed: int) -> NoReturn:
    """Raise a FeatxError: `resolve_library` returns `auto` for no model."""
    raise FeatxError(f"model.library=auto builds no model itself (model.name={config.name}).")


LIBRARIES.register(
    library_member(
        AUTO_LIBRARY,
        "The first of packaged, torchvision, timm and added libraries that knows the name.",
        ModelConfig,
        LibraryFunctions(build=_build, untrained=_build, names=tuple),
    )
)
