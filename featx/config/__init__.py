"""The options: one dataclass for each group, with its defaults, checks and documentation.

In: options from YAML, the command line or Python. Out: a checked `run_config.Config`, which holds
one dataclass of each group. A default stands at its field and nowhere else; members of families,
such as sources, have their own options beside them.
Names for others: those exported here, `run_config.Config`, `schema` (a config from keywords or from
Hydra), `saved_config` (the config in a store), `all_options` (with the options of all members),
`member_options` and `layer_requests`.
"""

from __future__ import annotations

from featx.config.attribute import (
    BASELINES,
    BY_CAPTUM,
    MAX_PICTURES,
    METHODS,
    OF_A_LAYER,
    AttributeConfig,
)
from featx.config.checks import MAY_BE_EMPTY, NAMES, check_choice
from featx.config.data import OBJECT_SOURCE, DataConfig
from featx.config.executor import ExecutorConfig
from featx.config.export import ExportConfig
from featx.config.job import (
    VIEWS_OF_LAYERS,
    BenchConfig,
    JobConfig,
    LogConfig,
    StatsConfig,
    VerifyConfig,
)
from featx.config.model import INTERPOLATIONS, LIBRARIES, ModelConfig, TransformConfig
from featx.config.probe import PROBES, SPLITS, ProbeConfig
from featx.config.reduce import (
    CAPTURES,
    GRADIENTS,
    PRESETS,
    PROJECTIONS,
    REDUCTIONS,
    SCALARS,
    ReduceConfig,
)
from featx.config.report import ReportConfig
from featx.config.similarity import METRICS, CkaConfig, DuplicatesConfig, NeighborsConfig

__all__ = [
    "BASELINES",
    "BY_CAPTUM",
    "CAPTURES",
    "GRADIENTS",
    "INTERPOLATIONS",
    "LIBRARIES",
    "MAX_PICTURES",
    "MAY_BE_EMPTY",
    "METHODS",
    "METRICS",
    "NAMES",
    "OBJECT_SOURCE",
    "OF_A_LAYER",
    "PRESETS",
    "PROBES",
    "PROJECTIONS",
    "REDUCTIONS",
    "SCALARS",
    "SPLITS",
    "VIEWS_OF_LAYERS",
    "AttributeConfig",
    "BenchConfig",
    "CkaConfig",
    "DataConfig",
    "DuplicatesConfig",
    "ExecutorConfig",
    "ExportConfig",
    "JobConfig",
    "LogConfig",
    "ModelConfig",
    "NeighborsConfig",
    "ProbeConfig",
    "ReduceConfig",
    "ReportConfig",
    "StatsConfig",
    "TransformConfig",
    "VerifyConfig",
    "check_choice",
]
