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
    model_name: str | PathLike[str]
    model_library: str | PathLike[str]
    model_weights: str | PathLike[str] | None
    model_init: Literal["loaded", "reset"]
    model_golden: str | PathLike[str] | None
    model_window_size: int | Sequence[int] | None
    model_window_overlap: float
    model_transform_resize: int | Sequence[int] | None
    model_transform_crop: int | Sequence[int] | None
    model_transform_mean: Sequence[float] | None
    model_transform_std: Sequence[float] | None
    model_transform_interpolation: Literal["nearest", "bilinear", "bicubic"] | None
    model_transform_offset: Literal["round", "floor"] | None
    model_transform_scale: float | Literal["dtype"] | None
    model_transform_channels: int | None
    model_transform_bands: Sequence[int] | None
    model_checkpoint_prefix: str | PathLike[str] | None
    model_checkpoint_convert: Literal["auto", "none", "timm", "resample"]
    model_checkpoint_sha256: str | PathLike[str] | None
    model_factory: str | PathLike[str] | None
    model_args: Mapping[str, Any]
    model_weights_like: str | PathLike[str] | None
    model_normalize: bool
    model_input_size: Sequence[int] | None
    reduce_name: str | PathLike[str]
    reduce_size: int | None
    reduce_rows: int | None
    reduce_columns: int | None
    reduce_pool: int
    reduce_p: float
    reduce_stats: str | PathLike[str] | None
    reduce_k: int | None
    reduce_candidates: Literal["patches", "all"]
    reduce_seed: int
    reduce_epsilon: float
    reduce_zca: bool
    data_name: str | PathLike[str]
    data_root: str | PathLike[str] | None
    data_boxes: str | PathLike[str] | None
    data_views: Any
    data_crops: int | None
    data_crop_scale: Sequence[float] | None
    data_exif: Literal["apply", "ignore"]
    data_background: str | PathLike[str]
    data_white: float | None
    data_damaged: Literal["refuse", "accept"]
    data_max_pixels: int
    data_timeout_s: float | None
    data_workers: int | None
    data_limit: int | None
    data_sample: int | None
    data_follow_links: bool
    data_extensions: Sequence[str] | None
    data_depth: int | None
    data_classes: str | PathLike[str] | None
    data_dataset: str | PathLike[str] | None
    data_label_column: str | PathLike[str] | None
    data_path_column: str | PathLike[str] | None
    data_split: str | PathLike[str] | None
    data_columns: Sequence[str] | None
    data_image_root: str | PathLike[str] | None
    data_quoting: Literal["line", "multiline", "none"]
    data_delimiter: str | PathLike[str] | None
    data_encoding: str | PathLike[str]
    data_every_s: float
    conformance_mode: Literal["off", "warn", "strict"]
    executor_name: str | PathLike[str]
    executor_workers: int | None
    executor_cpus: int | None
    executor_gpus: float | None
    executor_address: str | PathLike[str] | None
    executor_sbatch: Mapping[str, Any]
    executor_time_limit_min: int | None
    executor_folder: str | PathLike[str] | None
    executor_mode: Literal["slurm", "local"] | None


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
    stats_observation: Literal["image", "position"]
    stats_covariance: Literal["full", "diagonal"]
    stats_reference: str | PathLike[str] | None


class ExportOptions(TypedDict, total=False):
    """Keywords of `featx.export_store`: the options that job=export reads."""

    layers: str | Sequence[str] | Mapping[str, Any] | None
    out: str | PathLike[str]
    overwrite: bool
    store: str | PathLike[str] | None
    export: ExportConfig | Mapping[str, Any]
    export_format: str | PathLike[str]
    export_ok_only: bool
    export_incomplete: bool
    export_shard_gib: float | None
    export_index: str | PathLike[str]
    export_magnification: float | Sequence[float | None] | None
    export_encoder: str | PathLike[str] | None


class ReportOptions(TypedDict, total=False):
    """Keywords of `featx.write_report`: the options that job=report reads."""

    layers: str | Sequence[str] | Mapping[str, Any] | None
    data: object
    out: str | PathLike[str]
    device: str
    seed: int
    store: str | PathLike[str] | None
    report: ReportConfig | Mapping[str, Any]
    data_name: str | PathLike[str]
    data_root: str | PathLike[str] | None
    report_rows: int
    report_thumbnails: int
    report_tsne: bool
    report_texts: str | PathLike[str] | Sequence[str] | None


class ProbeOptions(TypedDict, total=False):
    """Keywords of `featx.probe`: the options that job=probe reads."""

    layers: str | Sequence[str] | Mapping[str, Any] | None
    out: str | PathLike[str]
    device: str
    seed: int
    store: str | PathLike[str] | None
    probe: ProbeConfig | Mapping[str, Any]
    probe_method: Any
    probe_test_share: float | None
    probe_folds: int | None
    probe_split: str | PathLike[str] | None
    probe_label_column: str | PathLike[str] | None
    probe_task: Literal["auto", "classification", "regression", "multilabel"]
    probe_label_separator: str | PathLike[str] | None
    probe_masks: str | PathLike[str] | None
    probe_ignore: int | None
    probe_mask_classes: str | PathLike[str] | None
    probe_group_column: str | PathLike[str] | None
    probe_test_store: str | PathLike[str] | None
    probe_seeds: int | None
    probe_bootstrap: int | None
    probe_l2: float | None
    probe_calibration: Literal["none", "temperature"]
    probe_k: int | None
    probe_shots: int | Sequence[int] | None
    probe_memory_gib: float
    probe_epochs: int | None
    probe_learning_rate: float | None
