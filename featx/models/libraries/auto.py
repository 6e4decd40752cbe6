"""model.library=auto: the first library that knows the name of the model."""

from __future__ import annotations

from featx.config import AUTO_LIBRARY
from featx.models.libraries.registry import LIBRARIES, ModelLibrary

LIBRARIES.register(
    ModelLibrary(
        AUTO_LIBRARY,
        "The first of packaged, torchvision, timm and added libraries that knows the name.",
    )
)
