"""All options of the command in one dataclass, with the checks that cross its groups.

`Config` is a plain object that needs neither Hydra nor torch. OmegaConf is imported by the
functions that turn YAML or overrides into a `Config`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le, Predicate

from featx.base import family
from featx.config import (
    AttributeConfig,
    CkaConfig,
    ConformanceConfig,
    DataConfig,
    DuplicatesConfig,
    ExecutorConfig,
    ExportConfig,
    JobConfig,
    LogConfig,
    ModelConfig,
    ModelsConfig,
    NeighborsConfig,
    ProbeConfig,
    ReduceConfig,
    ReportConfig,
    StatsConfig,
    StatusConfig,
    VerifyConfig,
    ZeroshotConfig,
)
from featx.config.checks import Count, NaturalNumber, OneOrMore, names_tuple, options
from featx.config.reduce import reduction_options
from featx.errors import ConfigError, StoreError
from featx.storage import folder_of, is_url, parse_path

_LISTED_STORE = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|\Z)""")
"""An element of a list of stores; a path with a comma stands in quotes."""

PRESETS = ("embedding", "output", "stages", "leaves", "all")
"""Names of sets of layers that `layers` takes instead of names."""

Capture = Literal["output", "input", "grad_output", "grad_input", "attention"]
CAPTURES: tuple[str, ...] = get_args(Capture)
"""Tensors of a layer that can be captured."""

GRADIENTS = ("grad_output", "grad_input")
"""The captures that need a backward pass."""

MAX_PROJECTOR_IMAGES = 1 << 14
"""Largest number of images in TensorBoard's projector: sprites of 64 pixels on a sheet of 8192
pixels, which browsers can show."""

SCALARS = ("label", "predicted", "loss", "entropy", "logsumexp")
"""Numbers whose gradient can be taken, besides the logit of a class by its index."""

MAX_SEED = 2**32 - 1
"""Largest seed that all libraries accept."""


_Dtype = Literal["float16", "float32", "bfloat16"]
_Auto = Literal["auto"]
_Target = Annotated[
    Literal["label", "predicted", "loss", "entropy", "logsumexp"] | NaturalNumber,
    f"one of {', '.join(SCALARS)}, or the index of a class",
]
_MaxFailures = Annotated[
    NaturalNumber | Annotated[float, Ge(0), Le(1)],
    "a share with a point, such as 0.01 (at most 1.0, which is all), or a whole number of images",
]
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_Device = Annotated[str, Predicate(_DEVICE.fullmatch), "auto, cpu, cuda, cuda:N or mps"]
_Tensorboard = Annotated[
    bool | Annotated[int, Ge(1), Le(MAX_PROJECTOR_IMAGES)],
    f"true, false, or how many images the projector shows, 1 to {MAX_PROJECTOR_IMAGES}",
]


@options("")
class Config:
    """All options of one run, under the names that the command uses."""

    job: JobConfig = field(default_factory=JobConfig)
    """Job of the command; the table of jobs lists them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model: any name of torchvision or timm, efficientnet_lite0 (packaged, works offline), or a
    library, such as custom, or timm with model.name."""
    layers: str | list[str] | dict[str, Any] | None = None
    """Layers of a run: a preset (embedding, output, stages, leaves, all), a list of names, globs or
    presets, or a mapping of these to reductions (null: that of `reduce`); null takes embedding. A
    name is that of a module, or that of an operation as torch.fx names it (layer1.0.add). For jobs
    that read a store: names or globs of its layers; null takes all. job=neighbors, duplicates,
    outliers, mislabelled and predict take one, by default that of the probe. job=attribute takes
    one module for gradcam and guided_gradcam; null takes the last stage, and the stage before it of
    a transformer with a class token, whose patch tokens still have an effect."""
    capture: OneOrMore[Capture] = "output"
    """Tensor of a layer to capture: output, input, grad_output or grad_input (gradients of
    `target`), attention (weights of an attention module), or a list of them."""
    target: _Target = "predicted"
    """Number whose gradient is taken, or that job=attribute explains: the logit of the class label
    or predicted, that of a class by its index, or loss, entropy or logsumexp."""
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    """Reduction of each tensor to the stored row."""
    data: DataConfig = field(default_factory=DataConfig)
    """Source of the images; the path of a folder stands for data=folder with data.root."""
    out: str = "runs/<data>/<model>"
    """Store, a folder or s3://bucket/folder, in which job=stats writes stats.h5; the same command
    with the same folder resumes it. By default it has the name of the folder or file of the images
    and that of the model, for job=predict that of the head's file. For other jobs that write files,
    such as export and neighbors, their folder, by default one in the store; for job=report a folder
    or a file name that ends in .html."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the model: fp32, bf16, fp16, or auto, which takes the fastest that keeps a
    cosine of 0.999 to fp32 in every row, and fp32 if none is 1.1 times as fast."""
    dtype: _Dtype = "float16"
    """Data type of the stored features, whatever they were computed in: float16, bfloat16 or
    float32."""
    batch_size: _Auto | Count = "auto"
    """Number of images per forward pass; auto suits the device."""
    device: _Device = "auto"
    """Device: cpu, cuda, cuda:1, mps, or auto, which takes the first accelerator."""
    compile: _Auto | bool = "auto"
    """Use torch.compile; auto does so if the run is long enough to save more time than it costs."""
    fold_batchnorm: bool = True
    """Fold BatchNorm into the convolution before it, if values change by rounding only and the
    device is not CUDA, where it would be slower; false computes every layer as it is."""
    decode: Literal["fast", "reference"] = "fast"
    """Decoder of images: fast; or reference, which uses Pillow and the transform of the weights
    exactly."""
    conformance: ConformanceConfig = field(default_factory=ConformanceConfig)
    """Comparison of some images with the model library's own transform and forward pass, before a
    run starts."""
    part_rows: _Auto | Count = "auto"
    """Number of rows per part, a power of two; auto takes as many as fit into 256 MiB and a minute
    of work at the measured speed. A resume keeps that of its store."""
    codec: str = "none"
    """Compression of the stored chunks."""
    max_failures: _MaxFailures = 0.01
    """Images that may fail, as a share (a number with a point; 1.0 is all) or a whole number. If
    more fail, the exit code is 3; if more than a minute of work is left, the run stops at once with
    exit code 1."""
    retry_failed: bool = False
    """Try the images that failed once more, and fill the rows of those that can be read now."""
    refresh: _Auto | bool = False
    """Compute only the rows again whose image has changed since; with job=stats the parts that
    contain them. true reads every image to find them, auto those with another size or time, so that
    it can stay in a command that is repeated; false refuses changed images."""
    nonfinite: Literal["error", "record"] = "error"
    """Treatment of a feature that is NaN, infinite or too large: error stops the run, record marks
    the row as failed."""
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    """local: this machine, in this process or in workers; ray: actors of a Ray cluster; slurm: a
    job array. ray comes with an extra: pip install "featx[ray]"."""
    pack: _Auto | bool = "auto"
    """Pack the parts into one features.h5 at the end; auto does so if the store is on a disk that
    has room, and has at most 256 GiB; false keeps the parts."""
    tensorboard: _Tensorboard = False
    """Write OUT/tensorboard: activations and timings of the run, the graph of the model, and a
    projector with 1000 images; a number sets the number of images."""
    profile: bool = False
    """Write OUT/trace.json.gz for ui.perfetto.dev: eight batches in all threads, recorded by
    torch.profiler."""
    grow: bool = False
    """Append images that are new in the data set after the rows of the store, which stay as they
    are."""
    overwrite: bool = False
    """Delete the store in `out` and start again; with job=stats the statistics there, with
    job=export the export."""
    seed: Annotated[int, Ge(0), Le(MAX_SEED)] = 0
    """Seed of random weights, of the rows that verify.reextract_rows, cka.rows and report.rows
    choose, and of a probe's splits; a whole number from 0 to 4294967295."""
    store: str | None = None
    """Folder or features.h5 of the store that a job reads, on a disk or as s3://bucket/folder. null
    takes `out`, for jobs that do not write to a folder of their own; the others need a value. In a
    list, [runs/a,runs/b], job=cka and distance compare two stores, job=compare and report several,
    and job=probe its best layer with that of another probed store, on the test rows of both. A path
    with a comma stands in quotes there, 'store=["a,b",c]'. job=compare, and job=report behind the
    first store, also take patterns, runs/*."""
    stats: StatsConfig = field(default_factory=StatsConfig)
    """Statistics that job=stats computes of each layer, and a reference to compare them with."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """Work of job=verify in addition to comparing every chunk with its checksum."""
    attribute: AttributeConfig = field(default_factory=AttributeConfig)
    """Heat maps that job=attribute computes and draws."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """Fit and test of the classifiers of job=probe on the features of a store."""
    neighbors: NeighborsConfig = field(default_factory=NeighborsConfig)
    """Nearest neighbours that job=neighbors finds, and how near rows are for job=outliers and
    job=duplicates."""
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    """Near-duplicates that job=duplicates finds."""
    cka: CkaConfig = field(default_factory=CkaConfig)
    """Layers and rows that job=cka compares."""
    zeroshot: ZeroshotConfig = field(default_factory=ZeroshotConfig)
    """Classifier of class names that job=zeroshot makes of the text tower of a CLIP model."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """Files that job=export writes."""
    report: ReportConfig = field(default_factory=ReportConfig)
    """Contents of the page of job=report."""
    models: ModelsConfig = field(default_factory=ModelsConfig)
    """Models that job=models looks for."""
    status: StatusConfig = field(default_factory=StatusConfig)
    """View of a run in job=status."""
    log: LogConfig = field(default_factory=LogConfig)
    """Messages of the command during a run."""

    def __post_init__(self) -> None:
        family("codec").get(self.codec)
        for key in ("tensorboard", "profile"):
            if self.is_distributed and getattr(self, key) is not False:
                raise ConfigError(
                    f"{key} sees the batches of one process only; leave executor and its options "
                    "out with it."
                )

        # Paths that may, or must not, lie in an object store.
        for key in ("out", "store"):
            if (path := getattr(self, key)) is not None and is_url(path):
                parse_path(path)
        folder = self.executor.shared_folder
        if folder is not None and is_url(folder):
            raise ConfigError(
                f"executor.folder={folder}: the tasks share a folder on a disk that all machines "
                "see."
            )

        if self.part_rows != "auto":
            if self.part_rows & (self.part_rows - 1):
                raise ConfigError(
                    f"part_rows={self.part_rows}: expected a power of two, such as "
                    f"{1 << self.part_rows.bit_length()}."
                )
            # With windows batch_size is a number of windows, and a batch of rows is one image.
            batch_rows = self.batch_size if self.model.window.size is None else 1
            if batch_rows != "auto" and batch_rows > self.part_rows:
                raise ConfigError(
                    f"batch_size={self.batch_size} is larger than part_rows={self.part_rows}; "
                    "a batch never crosses a part, so raise part_rows or lower batch_size."
                )

        # Changes of an existing store.
        changes = {"retry_failed": "mends", "refresh": "mends", "grow": "adds to"}
        for option, verb in changes.items():
            if (value := getattr(self, option)) and self.overwrite:
                raise ConfigError(
                    f"{option}={str(value).lower()} {verb} a store and overwrite=true deletes it; "
                    "give one."
                )
        layer_requests(self)  # which refuses wrong names of layers and reductions

    def store_path(self) -> Path:
        """Return the store that a job reads, the first one of a list: `store`, or `out` if that is
        null.
        """
        path = parse_path(listed_stores(self.store or self.out)[0]).absolute()
        if self.store is None and self.has_default_out and not path.exists():
            raise StoreError(
                f"job={self.job.name} reads a store: say which with store=DIR, its folder or "
                f"features.h5. None is given, and {path} (the default of out) is not there."
            )
        return path

    @property
    def default_out(self) -> str:
        """What `out` is if it is not given."""
        return f"runs/{self.data.folder_name}/{self.model.name}"

    @property
    def has_default_out(self) -> bool:
        """Whether `out` is not given. Without `store` it is its default if it is given as such."""
        return self.out == Config.out or (self.store is None and self.out == self.default_out)

    def output_folder(self, root: Path, name: str) -> Path:
        """Return `out` of a job that reads a store, by default the folder `name` in that of the
        store, whose folder or file is `root`.
        """
        if self.has_default_out:
            if is_url(root):
                raise ConfigError(
                    f"job={self.job.name} writes to a disk, and {root} lies in an object store: "
                    "say where with out=DIR."
                )
            return folder_of(root) / name
        return Path(self.out).expanduser().absolute()

    @property
    def is_distributed(self) -> bool:
        """Whether worker processes compute, not this one."""
        return self.executor.workers is not None or self.executor.name != "local"

    def cpus_of_worker(self, num_cpus: int) -> int:
        """Return the number of CPUs of each process that computes; `num_cpus` are here."""
        if self.executor.name != "local":
            return self.executor.num_cpus
        return max(1, num_cpus // (self.executor.workers or 1))

    @property
    def takes_gradients(self) -> bool:
        """Whether the gradient of any layer is requested."""
        kinds = [name.partition(":")[2] for name, _ in layer_requests(self)]
        return any(kind in GRADIENTS for kind in kinds)

    def allowed_failures(self, num_rows: int) -> int:
        """Return how many of num_rows images may fail before the exit code is 3."""
        if isinstance(self.max_failures, float):
            return int(self.max_failures * num_rows + 1e-9)  # 0.29 of 100 are 29
        return int(self.max_failures)


def listed_stores(text: str) -> list[str]:
    """Return the stores of a list in brackets, such as '[runs/a,runs/b]', or the only one."""
    is_path = os.path.exists(text)  # noqa: PTH110 - False if it is longer than a path can be
    if is_path or not (text.startswith("[") and text.endswith("]")):
        return [text]
    parts = ["".join(groups) for groups in _LISTED_STORE.findall(text[1:-1])]
    return [part for part in parts if part] or [text]


def store_list(paths: Iterable[str]) -> str:
    """Return the list in brackets from which `listed_stores` reads some paths."""
    listed = []
    for path in paths:
        if "," in path or path != path.strip().strip("'\""):
            path = f"'{path}'" if '"' in path else f'"{path}"'
        listed.append(path)
    return f"[{','.join(listed)}]"


def layer_requests(config: Config) -> list[tuple[str, ReduceConfig]]:
    """Return the options `layers`, in its three forms, and `capture` as one list of (name, glob or
    preset; reduction). A tensor that is not an output has its kind after the name, as in
    'layer4:input'.
    """
    layers = "embedding" if config.layers is None else config.layers
    if isinstance(layers, str):
        layers = [layers]
    if isinstance(layers, Mapping):
        pairs = [
            (str(name), config.reduce if value is None else reduction_options(value))
            for name, value in layers.items()
        ]
    else:
        pairs = [(name, config.reduce) for name in layers]
    if not pairs:
        raise ConfigError(f"layers is empty: name a layer or a preset ({', '.join(PRESETS)}).")
    kinds = names_tuple(config.capture)
    return [
        (f"{name}:{kind}" if kind != "output" and ":" not in name else name, reduce)
        for name, reduce in pairs
        for kind in (kinds if ":" not in name else ("output",))
    ]


def with_statistics_at(config: Config, path: str | None) -> Config:
    """Return a config whose pca and whiten read their statistics from `path`, unless it is None."""
    if path is None:
        return config
    layers = config.layers
    if isinstance(layers, Mapping):
        layers = {
            name: value and reduction_options(value).with_statistics_path(path)
            for name, value in layers.items()
        }
    return replace(config, layers=layers, reduce=config.reduce.with_statistics_path(path))


def in_this_process(config: Config) -> Config:
    """Return a saved config that computes features in this process and writes nothing else."""
    return replace(
        config,
        overwrite=False,
        grow=False,
        retry_failed=False,
        refresh=False,
        tensorboard=False,
        profile=False,
        executor=ExecutorConfig(),
    )
