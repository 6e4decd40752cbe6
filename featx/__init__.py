"""featx: features of pretrained vision backbones, on disk, with every row accounted for.

Importing featx loads neither torch nor hydra; each public name loads what it needs on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from featx.errors import FeatxError

if TYPE_CHECKING:
    from featx.jobs.export import export_store
    from featx.jobs.extract import extract
    from featx.jobs.report import write_report
    from featx.jobs.stats import stats
    from featx.prediction import predict
    from featx.statistics.distance import frechet_distance
    from featx.statistics.file import Statistics, open_stats
    from featx.store.reader import FeatureStore, open
    from featx.taps.captured import capture

__version__ = "0.1.0"

__all__ = [
    "FeatureStore",
    "FeatxError",
    "Statistics",
    "__version__",
    "capture",
    "export_store",
    "extract",
    "frechet_distance",
    "open",
    "open_stats",
    "predict",
    "stats",
    "write_report",
]

_HOME = {
    "FeatureStore": "featx.store.reader",
    "open": "featx.store.reader",
    "capture": "featx.taps.captured",
    "extract": "featx.jobs.extract",
    "predict": "featx.prediction",
    "stats": "featx.jobs.stats",
    "export_store": "featx.jobs.export",
    "write_report": "featx.jobs.report",
    "open_stats": "featx.statistics.file",
    "Statistics": "featx.statistics.file",
    "frechet_distance": "featx.statistics.distance",
}


def __getattr__(name: str) -> Any:
    if name == "gradients":
        return importlib.import_module("featx.gradients")
    if name not in _HOME:
        raise AttributeError(f"module 'featx' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
