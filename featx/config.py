"""Every key of the command as a dataclass field, with its check.

Defaults stand here and nowhere else. `Config` is a plain object: neither Hydra nor torch is needed
to hold one; OmegaConf is imported where YAML or overrides become a Config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from featx.errors import ConfigError, nearest
from featx.types import ITEM_BYTES

JOBS = ("extract", "plan", "layers", "stats", "attribute", "verify", "pack", "bench")
PROJECTIONS = ("pca", "whiten")
REDUCTIONS = ("none", "flatten", "avg", "max", "gem", "cls", "patch_avg", "grid", *PROJECTIONS)
PRESETS = ("embedding", "stages", "leaves", "all")
CAPTURES = ("output", "input", "grad_output", "grad_input", "attention")
GRADIENTS = ("grad_output", "grad_input")
SCALARS = ("label", "predicted", "loss", "entropy", "logsumexp")
METHODS = (
    "saliency",
    "input_x_gradient",
    "integrated_gradients",
    "gradcam",
    "guided_gradcam",
    "occlusion",
)
OF_A_LAYER = ("gradcam", "guided_gradcam")
BY_CAPTUM = ("integrated_gradients", "occlusion")
BASELINES = ("black", "mean", "blur")
LIBRARIES = ("auto", "packaged", "torchvision", "timm", "custom")
DATA_KINDS = ("folder", "textiles", "sample")
CODECS = ("none", "lzf", "gzip", "zstd", "blosc2")
VIEWS_OF_LAYERS = ("shapes", "cost", "values", "all", "watch")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
MAX_PICTURES = 1 << 14
"""In TensorBoard's projector: sprites of 64 pixels on a sheet of 8192, which browsers can show."""

_OF_REDUCTIONS = {
    "p": ("gem",),
    "size": ("grid",),
    "stats": PROJECTIONS,
    "k": PROJECTIONS,
    "epsilon": ("whiten",),
    "zca": ("whiten",),
}
"""Keys of some reductions only."""

_OF_STORES = ("dtype", "codec", "pack", "grow")
"""Keys without effect where only statistics are kept."""


def shipped(name: str) -> Path:
    """A folder that travels with featx: 'conf' or 'data'.

    In a wheel they lie inside the package; in a checkout and an editable install beside it.
    """
    package = Path(__file__).resolve().parent
    inside = package / "_shipped" / name
    return inside if inside.is_dir() else package.parent / name


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}.")


def _check_auto_or_int(key: str, value: object) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "auto" and not whole:
        raise ConfigError(f"{key}={value}: expected auto or a whole number of at least 1.")


def _check_auto_or_bool(key: str, value: object) -> None:
    if value != "auto" and not isinstance(value, bool):
        raise ConfigError(f"{key}={value}: expected auto, true or false.")


def _check_tensorboard(value: object) -> None:
    if not isinstance(value, int) or (value is not False and not 1 <= value <= MAX_PICTURES):
        raise ConfigError(
            f"tensorboard={value}: expected true, false, or how many pictures the projector shows, "
            f"1 to {MAX_PICTURES}."
        )


@dataclass
class JobConfig:
    """What the command does."""

    name: str = "extract"
    """Taken from the key `job` itself."""
    json: bool = False
    """Print the job's result as JSON (layers, plan, stats, verify, bench)."""
    show: str = "shapes"
    """What job=layers tells of each layer: shapes, cost (parameters, MFLOPs, ms, memory), values
    (on one picture), all of these in one wide table, or watch: every call while a pass goes on."""

    def __post_init__(self) -> None:
        _check_choice("job", self.name, JOBS)
        _check_choice("job.show", self.show, VIEWS_OF_LAYERS)
        if self.json and self.show != "shapes":
            raise ConfigError(
                f"job.show={self.show} has no effect with job.json=true, which gives every column."
            )


@dataclass
class TransformConfig:
    """The preprocessing of a custom model; library models bring their own."""

    resize: int = 256
    """Shorter side in pixels after resizing."""
    crop: int = 224
    """Side of the square centre crop in pixels."""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Per channel (R, G, B), of values in [0, 1]."""
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Per channel (R, G, B), of values in [0, 1]."""
    interpolation: str = "bilinear"
    """nearest, bilinear or bicubic, with antialiasing."""

    def __post_init__(self) -> None:
        _check_choice("model.transform.interpolation", self.interpolation, INTERPOLATIONS)
        if not 1 <= self.crop <= self.resize:
            raise ConfigError(
                f"model.transform.crop={self.crop}: expected 1 to model.transform.resize"
                f"={self.resize} pixels; give both."
            )
        for key in ("mean", "std"):
            if len(getattr(self, key)) != 3:
                raise ConfigError(f"model.transform.{key}: expected three numbers, one a channel.")
        if min(self.std) <= 0:
            raise ConfigError(f"model.transform.std={self.std}: expected numbers above 0.")


@dataclass
class ModelConfig:
    """The backbone."""

    name: str = "efficientnet_lite0"
    """The library's name for it, with model=torchvision or model=timm; else the key `model`."""
    library: str = "auto"
    """packaged, torchvision, timm or custom; auto asks them in that order who knows the name."""
    weights: str | None = "default"
    """A tag of the library, a path (.safetensors, .pth), 'default', or null for seeded random."""
    init: str = "loaded"
    """loaded keeps these weights; reset puts the model's own random ones in their place, of `seed`:
    the untrained baseline, the same in all else."""
    target: str | None = None
    """package.module:factory, for model=custom."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, for model=custom."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    """The preprocessing, for model=custom."""

    def __post_init__(self) -> None:
        _check_choice("model.library", self.library, LIBRARIES)
        _check_choice("model.init", self.init, ("loaded", "reset"))
        if self.init == "reset" and self.weights is None:
            raise ConfigError(
                "model.init=reset has no effect with model.weights=null, whose weights are random."
            )
        custom = self.library == "custom"
        if custom and not self.target:
            raise ConfigError(
                "model=custom needs model.target=package.module:factory, a function that returns "
                "your torch.nn.Module."
            )
        if not custom:
            for key, value in (("target", self.target), ("args", self.args)):
                if value:
                    raise ConfigError(f"model.{key} has an effect with model=custom only.")
            if self.transform != TransformConfig():
                raise ConfigError(
                    "model.transform has an effect with model=custom only; "
                    "library models bring the preprocessing of their weights."
                )


@dataclass
class ReduceConfig:
    """What is stored of each captured tensor."""

    name: str = "none"
    """none keeps the tensor as the layer gave it; or one of flatten, avg, max, gem, cls,
    patch_avg, grid; or pca, whiten of statistics."""
    p: float | None = None
    """Exponent of gem, 3 when not given."""
    size: int | None = None
    """Cells per side of grid, 2 when not given."""
    stats: str | None = None
    """The stats.h5 of job=stats, or its folder, for pca and whiten; the reduction that it was taken
    behind comes first."""
    k: int | None = None
    """Directions that pca and whiten keep, those of largest variance; all when not given."""
    epsilon: float | None = None
    """Added to each variance by whiten, in its unit, so that noise is not blown up; 0 when not
    given."""
    zca: bool | None = None
    """whiten turns back into the features' own axes; false when not given."""

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ConfigError(
                f"reduce={self.name}: expected one of {', '.join(REDUCTIONS)}."
                f"{nearest(str(self.name), REDUCTIONS)}"
            )
        for key, owners in _OF_REDUCTIONS.items():
            value = getattr(self, key)
            if value is not None and self.name not in owners:
                names = " and ".join(f"reduce={owner}" for owner in owners)
                raise ConfigError(f"reduce.{key} has an effect with {names} only.")
        for key in ("p", "size", "k"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"reduce.{key}={value}: expected a number above 0.")
        if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
            raise ConfigError(f"reduce.epsilon={self.epsilon}: expected a number of at least 0.")
        if self.name in PROJECTIONS and not self.stats:
            raise ConfigError(
                f"reduce={self.name} needs reduce.stats=FILE, the stats.h5 that job=stats made."
            )

    @property
    def args(self) -> dict[str, float | str]:
        """The parameters in force, defaults filled in; for pca and whiten those of the map itself,
        to which the statistics add theirs."""
        if self.name == "gem":
            return {"p": 3.0 if self.p is None else self.p}
        if self.name == "grid":
            return {"size": 2 if self.size is None else self.size}
        if self.name == "whiten":
            return {"epsilon": self.epsilon or 0.0, "zca": bool(self.zca)}
        return {}


@dataclass
class DataConfig:
    """The images and the policy for odd ones."""

    name: str = "textiles"
    """Taken from the key `data` itself."""
    root: str | None = None
    """The folder, for data=folder."""
    follow_links: bool = False
    """Follow symbolic links that lead out of data.root, for data=folder."""
    exif: str = "apply"
    """apply turns a picture upright as its EXIF orientation asks, ignore leaves it."""
    background: str = "white"
    """The colour under transparent pixels: a name or #rrggbb."""
    max_pixels: int = 89_478_485
    """A picture of more pixels is a recorded failure (too large), found before it is decoded."""
    limit: int | None = None
    """Only the first rows of the listing."""

    def __post_init__(self) -> None:
        _check_choice("data", self.name, DATA_KINDS)
        _check_choice("data.exif", self.exif, ("apply", "ignore"))
        if self.name == "folder" and not self.root:
            raise ConfigError("data=folder needs data.root=DIR, the folder of your images.")
        if self.name != "folder" and (self.root or self.follow_links):
            raise ConfigError(
                "data.root and data.follow_links have an effect with data=folder only; "
                f"add data=folder (now data={self.name})."
            )
        for key in ("max_pixels", "limit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"data.{key}={value}: expected a whole number of at least 1.")


@dataclass
class StatsConfig:
    """What job=stats keeps of each layer."""

    rows: str = "image"
    """image: the whole tensor of a picture is a row; position: each place of a map, or each token,
    is one, of C features."""
    kind: str = "full"
    """full keeps the D x D scatter matrix (D up to 16384), diagonal the variances only."""
    against: str | None = None
    """Another stats.h5, or its folder; the Fréchet distance to it is printed for every layer that
    both have."""

    def __post_init__(self) -> None:
        _check_choice("stats.rows", self.rows, ("image", "position"))
        _check_choice("stats.kind", self.kind, ("full", "diagonal"))
        if self.against is not None and self.kind != "full":
            raise ConfigError("stats.against needs covariances, so stats.kind=full.")


@dataclass
class VerifyConfig:
    """How job=verify looks at a store."""

    sample: int = 0
    """So many random rows are extracted from their pictures again and compared."""
    repair: bool = False
    """Set aside what is damaged and extract those rows again."""

    def __post_init__(self) -> None:
        if self.sample < 0:
            raise ConfigError(f"verify.sample={self.sample}: expected 0 or more rows.")


@dataclass
class AttributeConfig:
    """What job=attribute computes and draws."""

    method: Any = "gradcam"
    """saliency, input_x_gradient, integrated_gradients, gradcam, guided_gradcam, occlusion, or some
    of them as a list."""
    layer: str | None = None
    """The layer of gradcam and guided_gradcam; null takes the last stage, of a transformer with a
    class token the one before it, whose patches still count."""
    steps: int | None = None
    """Points between baseline and picture for integrated_gradients, 32 when not given."""
    baseline: str | None = None
    """What stands for nothing in integrated_gradients and occlusion: black, mean (of the model's
    preprocessing; when not given) or blur (the picture itself, blurred)."""
    window: int | None = None
    """Side of the square that occlusion hides, in pixels of the crop; a seventh when not given."""
    stride: int | None = None
    """Pixels between two squares of occlusion, half the window when not given."""
    per_class: int = 8
    """Rows drawn for each class of the data set, on one sheet below OUT/pictures; 0 draws none."""
    maps: str | None = None
    """A layer whose feature maps are drawn as well, for the first picture of each sheet."""

    def __post_init__(self) -> None:
        for method in self.methods:
            _check_choice("attribute.method", method, METHODS)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"attribute.method={self.method}: expected some of {METHODS}.")
        if self.baseline is not None:
            _check_choice("attribute.baseline", self.baseline, BASELINES)
        owners = {
            "layer": OF_A_LAYER,
            "steps": ("integrated_gradients",),
            "baseline": BY_CAPTUM,
            "window": ("occlusion",),
            "stride": ("occlusion",),
        }
        for key, methods in owners.items():
            if getattr(self, key) is not None and not set(methods) & set(self.methods):
                raise ConfigError(
                    f"attribute.{key} has an effect with attribute.method={' or '.join(methods)} "
                    f"only, now {', '.join(self.methods)}."
                )
        for key in ("steps", "window", "stride"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"attribute.{key}={value}: expected at least 1.")
        if self.window and self.stride and self.stride > self.window:
            raise ConfigError(
                f"attribute.stride={self.stride} is larger than attribute.window={self.window}: "
                "pixels between two squares would never be hidden."
            )
        if self.per_class < 0:
            raise ConfigError(f"attribute.per_class={self.per_class}: expected 0 or more.")
        if self.maps is not None and not self.per_class:
            raise ConfigError("attribute.maps draws a row of each sheet: attribute.per_class=0.")

    @property
    def methods(self) -> tuple[str, ...]:
        """The key `method` as a tuple."""
        return (self.method,) if isinstance(self.method, str) else tuple(self.method or ())

    def settings(self, method: str) -> dict[str, Any]:
        """What changes the values of one method, the layer apart, defaults filled in."""
        settings: dict[str, Any] = {}
        if method == "integrated_gradients":
            settings["steps"] = self.steps or 32
        if method == "occlusion":
            settings |= {"window": self.window, "stride": self.stride}
        if method in BY_CAPTUM:
            settings["baseline"] = self.baseline or "mean"
        return settings


@dataclass
class BenchConfig:
    """What job=bench measures."""

    images: int = 512
    """Pictures of each run: photographs made for it, or the first ones of data=folder."""
    runs: int = 3
    """Rounds; in each every contender runs once, in turn."""

    def __post_init__(self) -> None:
        for key in ("images", "runs"):
            if getattr(self, key) < 1:
                raise ConfigError(f"bench.{key}={getattr(self, key)}: expected at least 1.")


@dataclass
class Config:
    """One run. The command's keys, one to one."""

    job: JobConfig = field(default_factory=JobConfig)
    """extract, plan (what it would take; writes nothing), layers (what can be captured), stats
    (mean and covariance of layers, without storing features), attribute (heat maps: why the model
    said so), verify or pack (a store that is there), bench (how fast it is here)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Any torchvision or timm name, efficientnet_lite0 (packaged, offline), or custom."""
    layers: Any = "embedding"
    """A preset, a list of names, globs or presets, or a mapping of these to reductions. A name is a
    module's, or an operation's as torch.fx names it (layer1.0.add)."""
    capture: Any = "output"
    """output, input, grad_output, grad_input, attention, or a list of them: what comes out of a
    layer, what goes into it, the gradients of `target` there, and the weights of an attention
    module."""
    target: Any = "predicted"
    """The number whose gradient is taken, or that job=attribute explains: of the class label or
    predicted, of a class by its index, or loss, entropy, logsumexp."""
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    """What is stored of each tensor: none, flatten, avg, max, gem, cls, patch_avg or grid; pca or
    whiten project by the statistics of job=stats."""
    data: DataConfig = field(default_factory=DataConfig)
    """folder, textiles (2000 packaged pictures) or sample (a few that come with featx)."""
    out: str = "runs/${data.name}/${model.name}"
    """The store, a folder, where job=stats puts stats.h5; the same command with the same folder
    goes on where it stopped."""
    precision: str = "auto"
    """fp32, bf16, fp16, or auto: the fastest that keeps a cosine of 0.999 to fp32 in every row."""
    dtype: str = "float16"
    """float16, bfloat16 or float32, of the stored features, whatever they were computed in."""
    batch_size: Any = "auto"
    """Images per forward; auto suits the device."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the first accelerator there is."""
    compile: Any = "auto"
    """torch.compile; auto where the run is long enough to earn the compilation back."""
    decode: str = "fast"
    """fast, or reference: Pillow and the weights' own transform, exactly."""
    part_rows: Any = "auto"
    """Rows per part, a power of two; auto from bytes per row and measured speed."""
    codec: str = "none"
    """Compression of the stored chunks: none, lzf, gzip, zstd or blosc2."""
    max_failures: float = 0.01
    """Share (below 1) or number of images that may fail before the exit code is 3."""
    nonfinite: str = "error"
    """error stops at a feature that is NaN, infinite or too large; record marks its row."""
    pack: Any = "auto"
    """One plain features.h5 at the end; auto where the disk has room; false keeps the parts."""
    tensorboard: Any = False
    """true writes OUT/tensorboard: activations and timings of the run, the model's graph, and a
    projector with 1000 pictures; a number means so many pictures."""
    grow: bool = False
    """Add images that are new in the data set behind the rows of the store, which keep places."""
    overwrite: bool = False
    """Delete the store in `out` and start anew; with job=stats, the statistics there."""
    seed: int = 0
    """Of random weights, and of the rows that verify.sample chooses."""
    store: str | None = None
    """The folder or features.h5 that job=verify and job=pack read; null takes `out`."""
    stats: StatsConfig = field(default_factory=StatsConfig)
    """What job=stats keeps of each layer, and with what it is compared."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """What job=verify does beside comparing every chunk with its checksum."""
    attribute: AttributeConfig = field(default_factory=AttributeConfig)
    """What job=attribute computes and draws."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """How much job=bench measures: featx, the script a user writes, and each stage alone."""

    def __post_init__(self) -> None:
        _check_choice("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        _check_choice("dtype", self.dtype, tuple(ITEM_BYTES))
        _check_choice("decode", self.decode, ("fast", "reference"))
        _check_choice("codec", self.codec, CODECS)
        _check_choice("nonfinite", self.nonfinite, ("error", "record"))
        _check_auto_or_int("batch_size", self.batch_size)
        _check_auto_or_int("part_rows", self.part_rows)
        _check_auto_or_bool("compile", self.compile)
        _check_auto_or_bool("pack", self.pack)
        _check_tensorboard(self.tensorboard)
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device}: expected auto, cpu, cuda, cuda:N or mps.")
        if self.max_failures < 0:
            raise ConfigError(f"max_failures={self.max_failures}: expected 0 or more.")
        if self.part_rows != "auto":
            if self.part_rows & (self.part_rows - 1):
                raise ConfigError(
                    f"part_rows={self.part_rows}: expected a power of two, such as "
                    f"{1 << self.part_rows.bit_length()}."
                )
            if self.batch_size != "auto" and self.batch_size > self.part_rows:
                raise ConfigError(
                    f"batch_size={self.batch_size} is larger than part_rows={self.part_rows}; "
                    "a batch never crosses a part, so raise part_rows or lower batch_size."
                )
        self._check_jobs()
        layer_requests(self)
        self._check_target()

    @property
    def takes_gradients(self) -> bool:
        """Whether any layer's gradient is asked for."""
        kinds = [name.partition(":")[2] for name, _ in layer_requests(self)]
        return any(kind in GRADIENTS for kind in kinds)

    def _check_target(self) -> None:
        index = isinstance(self.target, int) and not isinstance(self.target, bool)
        if self.target not in SCALARS and not (index and self.target >= 0):
            raise ConfigError(
                f"target={self.target}: expected one of {', '.join(SCALARS)}, or the index of a "
                "class."
            )
        if self.takes_gradients or self.job.name == "attribute":
            if self.compile is True:
                raise ConfigError(
                    "compile=true does not go with gradients: a compiled pass hides where they "
                    "pass. Use compile=false."
                )
        elif self.target != "predicted":
            raise ConfigError(
                f"target={self.target} has an effect with capture=grad_output or grad_input and "
                "with job=attribute only."
            )

    def _check_jobs(self) -> None:
        """Keys that belong to some jobs have no effect with others."""
        used = {
            "job.json": (self.job.json, ("layers", "plan", "stats", "verify", "bench")),
            "job.show": (self.job.show != "shapes", ("layers",)),
            "store": (self.store is not None, ("verify", "pack")),
            "stats": (self.stats != StatsConfig(), ("stats",)),
            "verify": (self.verify != VerifyConfig(), ("verify",)),
            "tensorboard": (self.tensorboard is not False, ("extract", "plan")),
            "attribute": (self.attribute != AttributeConfig(), ("attribute",)),
            "bench": (self.bench != BenchConfig(), ("bench",)),
        }
        for key, (given, jobs) in used.items():
            if given and self.job.name not in jobs:
                names = " and ".join(f"job={name}" for name in jobs)
                raise ConfigError(f"{key} has an effect with {names} only.")
        if self.job.name == "stats":
            self._check_stats()
        if self.job.name == "attribute":
            extracted = {"layers": "embedding", "capture": "output", "reduce": ReduceConfig()}
            for key, default in extracted.items():
                if getattr(self, key) != default:
                    raise ConfigError(
                        f"{key} has no effect with job=attribute; attribute.method and "
                        "attribute.layer say what is computed."
                    )
        if self.grow and self.overwrite:
            raise ConfigError("grow=true adds to a store and overwrite=true deletes it; give one.")

    def _check_stats(self) -> None:
        """Keys of a store have no effect where no features are stored."""
        for key in _OF_STORES:
            default = next(f.default for f in fields(Config) if f.name == key)
            if getattr(self, key) != default:
                raise ConfigError(
                    f"{key} has no effect with job=stats: statistics are taken in float64 of what "
                    "the layers give, and no features are stored."
                )

    def allowed_failures(self, num_rows: int) -> int:
        """How many of num_rows images may fail before the exit code is 3."""
        if self.max_failures < 1:
            return int(self.max_failures * num_rows)
        return int(self.max_failures)


def layer_requests(config: Config) -> list[tuple[str, ReduceConfig]]:
    """The keys `layers`, in its three forms, and `capture` as one list.

    Returns:
        (name, glob or preset; reduction); what is not an output has its kind behind the name, as in
        'layer4:input'.
    """
    asked = config.layers
    if isinstance(asked, str):
        asked = [asked]
    if isinstance(asked, Mapping):
        pairs = [(str(name), _as_reduce(value)) for name, value in asked.items()]
    elif isinstance(asked, list | tuple) and all(isinstance(name, str) for name in asked):
        pairs = [(name, config.reduce) for name in asked]
    else:
        raise ConfigError(
            f"layers={asked}: expected a preset ({', '.join(PRESETS)}), a list such as "
            "[layer4,avgpool], or a mapping such as {layer4: avg}."
        )
    if not pairs:
        raise ConfigError(f"layers is empty: name a layer or a preset ({', '.join(PRESETS)}).")
    kinds = captures(config)
    return [
        (f"{name}:{kind}" if kind != "output" and ":" not in name else name, reduce)
        for name, reduce in pairs
        for kind in (kinds if ":" not in name else ("output",))
    ]


def with_statistics_at(config: Config, path: str | None) -> Config:
    """A config whose pca and whiten take their statistics from `path`, where it is given."""
    if path is None:
        return config

    def moved(reduce: ReduceConfig) -> ReduceConfig:
        return replace(reduce, stats=path) if reduce.name in PROJECTIONS else reduce

    layers = config.layers
    if isinstance(layers, Mapping):
        layers = {name: moved(_as_reduce(value)) for name, value in layers.items()}
    return replace(config, layers=layers, reduce=moved(config.reduce))


def captures(config: Config) -> tuple[str, ...]:
    """The key `capture` as a tuple."""
    asked = config.capture
    kinds = (asked,) if isinstance(asked, str) else tuple(asked or ())
    for kind in kinds:
        _check_choice("capture", kind, CAPTURES)
    if not kinds or len(set(kinds)) < len(kinds):
        raise ConfigError(f"capture={asked}: expected some of {', '.join(CAPTURES)}.")
    return kinds


def _as_reduce(value: object) -> ReduceConfig:
    if isinstance(value, ReduceConfig):
        return value
    if isinstance(value, str):
        return ReduceConfig(name=value)
    if isinstance(value, Mapping) and set(value) <= {f.name for f in fields(ReduceConfig)}:
        return ReduceConfig(**value)
    raise ConfigError(
        f"layers: {value} is not a reduction; expected one of {', '.join(REDUCTIONS)}, "
        "or a mapping such as {name: grid, size: 4}."
    )
