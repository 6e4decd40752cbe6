"""Keywords of the functions that run a job from Python. Made by scripts/reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict


class ExtractOptions(TypedDict, total=False):
    """Keywords of `featx.extract`: the options that job=extract reads."""

    model: str | Mapping[str, Any]
    layers: str | Sequence[str] | Mapping[str, Any]
    capture: str | Sequence[str] | Mapping[str, Any]
    target: str | int
    reduce: str | Mapping[str, Any]
    data: object
    out: str | PathLike[str]
    precision: str
    dtype: str
    batch_size: int | str
    device: str
    compile: bool | str
    fold_batchnorm: bool
    decode: str
    conformance: Mapping[str, Any]
    part_rows: int | str
    part_mib: int | str
    codec: str
    max_failures: float | int
    retry_failed: bool
    refresh: bool
    nonfinite: str
    executor: str | Mapping[str, Any]
    pack: bool | str
    tensorboard: bool | int
    profile: bool
    grow: bool
    overwrite: bool
    seed: int


class StatsOptions(TypedDict, total=False):
    """Keywords of `featx.stats`: the options that job=stats reads."""

    model: str | Mapping[str, Any]
    layers: str | Sequence[str] | Mapping[str, Any]
    capture: str | Sequence[str] | Mapping[str, Any]
    target: str | int
    reduce: str | Mapping[str, Any]
    data: object
    out: str | PathLike[str]
    precision: str
    batch_size: int | str
    device: str
    compile: bool | str
    fold_batchnorm: bool
    decode: str
    conformance: Mapping[str, Any]
    part_rows: int | str
    max_failures: float | int
    refresh: bool
    nonfinite: str
    executor: str | Mapping[str, Any]
    profile: bool
    overwrite: bool
    seed: int
    stats: Mapping[str, Any]


class ExportOptions(TypedDict, total=False):
    """Keywords of `featx.export_store`: the options that job=export reads."""

    layers: str | Sequence[str] | Mapping[str, Any]
    out: str | PathLike[str]
    overwrite: bool
    store: str | PathLike[str] | None
    export: Mapping[str, Any]


class ReportOptions(TypedDict, total=False):
    """Keywords of `featx.write_report`: the options that job=report reads."""

    layers: str | Sequence[str] | Mapping[str, Any]
    data: object
    out: str | PathLike[str]
    device: str
    seed: int
    store: str | PathLike[str] | None
    report: Mapping[str, Any]
