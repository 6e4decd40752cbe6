"""featx: features of pretrained vision backbones, on disk, with every row accounted for.

Importing featx loads neither torch nor hydra; each public name loads what it needs on first use.
"""

from __future__ import annotations

from featx.base.exports import declare, lazy_exports
from featx.errors import nearest

_load, __dir__, _names = lazy_exports(__name__, __file__)
# These are modules: `from featx import *` must not set the name torch.
__all__ = [name for name in _names if name not in ("gradients", "similarity", "torch")]


# Declared here because this is the only module above all packages that every process imports.
declare(
    registries={
        "codec": "featx.store.codecs:CODECS",
        "data": "featx.sources.registry:SOURCES",
        "executor": "featx.pipeline.executors:EXECUTORS",
        "export.format": "featx.export.base:FORMATS",
        "model.library": "featx.models.libraries:LIBRARIES",
        "reduce": "featx.layers.reductions:REDUCTIONS",
    },
    functions={"FeatureStore.show": "featx.export.image_grid:image_grid"},
)


def __getattr__(name: str) -> object:
    if name not in _names:
        from pathlib import Path

        is_job = Path(__file__).with_name("jobs").joinpath(f"{name}.py").exists()
        known = [each for each in _names if not is_job or name in each.split("_")]
        hint = nearest(name, known)
        if is_job:
            hint += f" For the job: python -m featx job={name}."
        raise AttributeError(f"module 'featx' has no attribute {name!r}.{hint}")
    try:
        return _load(name)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped while featx.{name} was imported; nothing ran.") from None
