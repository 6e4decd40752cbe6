"""featx: features of pretrained vision backbones, on disk, with every row accounted for.

Importing featx loads neither torch nor hydra; each public name loads what it needs on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from featx.base.exports import declare_families, declare_functions
from featx.base.version import __version__
from featx.errors import FeatxError, nearest

if TYPE_CHECKING:
    from featx.analysis.embedding import embed, embedder
    from featx.analysis.prediction import predict, predictor
    from featx.analysis.statistics.reader import Statistics, frechet_distance, open_stats
    from featx.jobs.export import export_store
    from featx.jobs.extract import extract
    from featx.jobs.report import write_report
    from featx.jobs.stats import stats
    from featx.layers.call_log import watch
    from featx.layers.capture import capture
    from featx.layers.edits import edit
    from featx.models.golden import write_golden
    from featx.store.reader import FeatureStore, open

__all__ = [
    "FeatureStore",
    "FeatxError",
    "Statistics",
    "__version__",
    "capture",
    "edit",
    "embed",
    "embedder",
    "export_store",
    "extract",
    "frechet_distance",
    "open",
    "open_stats",
    "predict",
    "predictor",
    "stats",
    "watch",
    "write_golden",
    "write_report",
]

_HOME = {
    "FeatureStore": "featx.store.reader",
    "open": "featx.store.reader",
    "capture": "featx.layers.capture",
    "edit": "featx.layers.edits",
    "watch": "featx.layers.call_log",
    "extract": "featx.jobs.extract",
    "embed": "featx.analysis.embedding",
    "embedder": "featx.analysis.embedding",
    "predict": "featx.analysis.prediction",
    "predictor": "featx.analysis.prediction",
    "stats": "featx.jobs.stats",
    "export_store": "featx.jobs.export",
    "write_golden": "featx.models.golden",
    "write_report": "featx.jobs.report",
    "open_stats": "featx.analysis.statistics.reader",
    "Statistics": "featx.analysis.statistics.reader",
    "frechet_distance": "featx.analysis.statistics.reader",
}


declare_families(
    {
        "codec": "featx.store.codecs:CODECS",
        "data": "featx.sources.registry:SOURCES",
        "executor": "featx.pipeline.executors:EXECUTORS",
        "export.format": "featx.export.base:FORMATS",
        "model.library": "featx.models.libraries:LIBRARIES",
        "reduce": "featx.layers.reductions:REDUCTIONS",
    }
)
declare_functions({"FeatureStore.show": "featx.export.image_grid:image_grid"})
# Declared here because this is the only module above all packages that every process imports.


def __getattr__(name: str) -> Any:
    if name in ("gradients", "similarity"):
        return importlib.import_module(f"featx.{name}")
    if name not in _HOME:
        from pathlib import Path  # which takes longer to import than featx

        is_job = Path(__file__).with_name("jobs").joinpath(f"{name}.py").exists()
        hint = f" For the job: python -m featx job={name}." if is_job else nearest(name, __all__)
        raise AttributeError(f"module 'featx' has no attribute {name!r}.{hint}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped while featx.{name} was imported; nothing ran.") from None


def __dir__() -> list[str]:
    return sorted(__all__)
