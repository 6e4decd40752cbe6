"""Keywords of the functions that run a job from Python. Made by scripts/reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from featx.config import (
    Capture,
    ConformanceConfig,
    ExecutorConfig,
    ExportConfig,
    ModelConfig,
    ProbeConfig,
    ReduceConfig,
    ReportConfig,
    StatsConfig,
)


class RunOptions(TypedDict, total=False):
    """Keywords of `featx.extract` and `featx.stats`."""

    model: ModelConfig | str | Callable[..., object] | Mapping[str, Any]
    layers: str | Sequence[str] | Mapping[str, Any] | None
    capture: Capture | Sequence[Capture]
    target: Literal["label", "predicted", "loss", "entropy", "logsumexp"] | int
    reduce: ReduceConfig | str | Mapping[str, Any]
    data: object
    out: str | PathLike[str]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    batch_size: Literal["auto"] | int
    device: str
    compile: Literal["auto"] | bool
    fold_batchnorm: bool
    decode: Literal["fast", "reference"]
    conformance: ConformanceConfig | Mapping[str, Any]
    part_rows: Literal["auto"] | int
    max_failures: int | float
    refresh: Literal["auto"] | bool
    nonfinite: Literal["error", "record"]
    executor: ExecutorConfig | str | Mapping[str, Any]
    profile: bool
    overwrite: bool
    seed: int


class ExtractOptions(RunOptions, total=False):
    """Keywords of `featx.extract`: the options that job=extract reads."""

    dtype: Literal["float16", "float32", "bfloat16"]
    codec: str
    retry_failed: bool
    pack: Literal["auto"] | bool
    tensorboard: bool | int
    grow: bool


class StatsOptions(RunOptions, total=False):
    """Keywords of `featx.stats`: the options that job=stats reads."""

    store: str | PathLike[str] | None
    stats: StatsConfig | Mapping[str, Any]


class ExportOptions(TypedDict, total=False):
    """Keywords of `featx.export_store`: the options that job=export reads."""

    layers: str | Sequence[str] | Mapping[str, Any] | None
    out: str | PathLike[str]
    overwrite: bool
    store: str | PathLike[str] | None
    export: ExportConfig | Mapping[str, Any]


class ReportOptions(TypedDict, total=False):
    """Keywords of `featx.write_report`: the options that job=report reads."""

    layers: str | Sequence[str] | Mapping[str, Any] | None
    data: object
    out: str | PathLike[str]
    device: str
    seed: int
    store: str | PathLike[str] | None
    report: ReportConfig | Mapping[str, Any]


class ProbeOptions(TypedDict, total=False):
    """Keywords of `featx.probe`: the options that job=probe reads."""

    layers: str | Sequence[str] | Mapping[str, Any] | None
    out: str | PathLike[str]
    device: str
    seed: int
    store: str | PathLike[str] | None
    probe: ProbeConfig | Mapping[str, Any]
