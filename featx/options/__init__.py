"""The options of each part of a run, as dataclass fields with their checks.

`Config` in config.py holds one of each. Defaults stand here and there and nowhere else.
"""

from __future__ import annotations

from featx.options.backbone import INTERPOLATIONS, LIBRARIES, ModelConfig, TransformConfig
from featx.options.checks import MAY_BE_EMPTY, NAMES, check_choice
from featx.options.executors import EXECUTORS, ExecutorConfig
from featx.options.heat_maps import (
    BASELINES,
    BY_CAPTUM,
    MAX_PICTURES,
    METHODS,
    OF_A_LAYER,
    AttributeConfig,
)
from featx.options.images import DATA_KINDS, PACKAGED_DATA, DataConfig
from featx.options.jobs import (
    JOBS,
    VIEWS_OF_LAYERS,
    BenchConfig,
    JobConfig,
    LogConfig,
    StatsConfig,
    VerifyConfig,
)
from featx.options.layers import (
    CAPTURES,
    GRADIENTS,
    PRESETS,
    PROJECTIONS,
    REDUCTIONS,
    SCALARS,
    ReduceConfig,
)
from featx.options.of_stores import (
    CODECS,
    EXPORTS,
    IN_SHARDS,
    METRICS,
    PROBES,
    SPLITS,
    ExportConfig,
    ProbeConfig,
    ReportConfig,
    SimilarConfig,
)

__all__ = [
    "BASELINES",
    "BY_CAPTUM",
    "CAPTURES",
    "CODECS",
    "DATA_KINDS",
    "EXECUTORS",
    "EXPORTS",
    "GRADIENTS",
    "INTERPOLATIONS",
    "IN_SHARDS",
    "JOBS",
    "LIBRARIES",
    "MAX_PICTURES",
    "MAY_BE_EMPTY",
    "METHODS",
    "METRICS",
    "NAMES",
    "OF_A_LAYER",
    "PACKAGED_DATA",
    "PRESETS",
    "PROBES",
    "PROJECTIONS",
    "REDUCTIONS",
    "SCALARS",
    "SPLITS",
    "VIEWS_OF_LAYERS",
    "AttributeConfig",
    "BenchConfig",
    "DataConfig",
    "ExecutorConfig",
    "ExportConfig",
    "JobConfig",
    "LogConfig",
    "ModelConfig",
    "ProbeConfig",
    "ReduceConfig",
    "ReportConfig",
    "SimilarConfig",
    "StatsConfig",
    "TransformConfig",
    "VerifyConfig",
    "check_choice",
]
