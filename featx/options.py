"""The options of each part of a run, as dataclass fields with their checks.

`Config` in config.py holds one of each. Defaults stand here and there and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from featx.errors import ConfigError, nearest

JOBS = (
    "extract",
    "plan",
    "layers",
    "stats",
    "attribute",
    "probe",
    "predict",
    "similar",
    "export",
    "verify",
    "pack",
    "bench",
)
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
PACKAGED_DATA = ("textiles", "sample")
DATA_KINDS = (
    "folder",
    "webdataset",
    "table",
    "hdf5",
    "torchvision",
    "huggingface",
    *PACKAGED_DATA,
    "python",
)
CODECS = ("none", "lzf", "gzip", "zstd", "blosc2")
EXPORTS = (
    "npy",
    "parquet",
    "safetensors",
    "zarr",
    "webdataset",
    "projector",
    "huggingface",
)
IN_SHARDS = ("parquet", "safetensors", "webdataset", "huggingface")
METRICS = ("cosine", "euclidean")
PROBES = ("linear", "knn", "ridge")
SPLITS = ("holdout", "kfold", "column")
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

_ROOTS = {
    "folder": "data.root=DIR, the folder of your images",
    "webdataset": "data.root=SHARDS: a folder of tars, one tar, or a pattern such as "
    "'data.root=\"train-{000..012}.tar\"'",
    "table": "data.root=FILE, the .csv or .parquet file",
    "hdf5": "data.root=FILE, the HDF5 file",
    "torchvision": "data.root=DIR, the folder that torchvision downloaded to",
    "huggingface": "data.root=DIR, the folder that save_to_disk wrote",
}
_OF_DATA = {
    "root": tuple(_ROOTS),
    "follow_links": ("folder", "webdataset", "table", "torchvision", "huggingface"),
    "extensions": ("folder", "webdataset"),
    "depth": ("folder",),
    "classes": ("folder",),
    "images": ("table",),
    "path_column": ("table", "huggingface"),
    "label_column": ("table", "huggingface"),
    "dataset": ("hdf5", "torchvision"),
    "labels": ("hdf5",),
    "split": ("torchvision", "huggingface"),
}
"""Keys of some kinds of data only."""


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}.")


@dataclass
class JobConfig:
    """What the command does."""

    name: str = "extract"
    """Taken from the key `job` itself."""
    json: bool = False
    """Print the job's result as JSON (layers, plan, stats, probe, predict, similar, export, verify,
    bench)."""
    show: str = "shapes"
    """What job=layers tells of each layer: shapes, cost (parameters, MFLOPs, ms, memory), values
    (on one picture), all of these in one wide table, or watch: every call while a pass goes on."""

    def __post_init__(self) -> None:
        check_choice("job", self.name, JOBS)
        check_choice("job.show", self.show, VIEWS_OF_LAYERS)
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
        check_choice("model.transform.interpolation", self.interpolation, INTERPOLATIONS)
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
        check_choice("model.library", self.library, LIBRARIES)
        check_choice("model.init", self.init, ("loaded", "reset"))
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
    """Where the images are: a folder, tar shards or their URLs, a table, an HDF5 file."""
    follow_links: bool = False
    """Follow symbolic links that lead out of data.root, and paths of a table that do."""
    extensions: list[str] | None = None
    """Endings of the names that count as images, such as [jpg,png], for data=folder and
    data=webdataset; null takes every format that featx reads."""
    depth: int | None = None
    """Folders between data.root and an image at the most, for data=folder: 0 takes images in
    data.root itself, 1 also those in class folders; null takes every depth."""
    classes: str | None = None
    """A JSON or CSV file, folder name -> class name or number, for data=folder."""
    images: str | None = None
    """The folder that paths of data=table start from; null is the folder of the table."""
    path_column: str | None = None
    """The column of paths or of image bytes, for data=table and data=huggingface; null takes the
    column path, else the column image."""
    label_column: str | None = None
    """The column of labels, for data=table and data=huggingface; null takes the column label where
    there is one, an empty name takes none."""
    dataset: str | None = None
    """For data=hdf5 the dataset that holds the images, such as /images; for data=torchvision the
    name of the class, such as CIFAR10."""
    labels: str | None = None
    """The dataset that holds the labels, for data=hdf5."""
    split: str | None = None
    """For data=torchvision train, test, or another part that the data set has; for
    data=huggingface one that was saved. null takes the first."""
    exif: str = "apply"
    """apply turns a picture upright as its EXIF orientation asks, ignore leaves it."""
    background: str = "white"
    """The colour under transparent pixels: a name or #rrggbb."""
    max_pixels: int = 89_478_485
    """A picture of more pixels is a recorded failure (too large), found before it is decoded."""
    limit: int | None = None
    """Only the first rows of the listing."""

    def __post_init__(self) -> None:
        check_choice("data", self.name, DATA_KINDS)
        check_choice("data.exif", self.exif, ("apply", "ignore"))
        if self.name in _ROOTS and not self.root:
            raise ConfigError(f"data={self.name} needs {_ROOTS[self.name]}.")
        defaults = {f.name: f.default for f in fields(self)}
        for key, owners in _OF_DATA.items():
            if getattr(self, key) != defaults[key] and self.name not in owners:
                names = " or ".join(f"data={owner}" for owner in owners)
                first = "; add data=folder" if key == "root" else ""
                raise ConfigError(
                    f"data.{key} has an effect with {names} only{first} (now data={self.name})."
                )
        if self.name == "hdf5" and not self.dataset:
            raise ConfigError("data=hdf5 needs data.dataset=/images, the dataset of the images.")
        if self.name == "torchvision" and not self.dataset:
            raise ConfigError("data=torchvision needs data.dataset=CIFAR10, the name of the class.")
        if self.extensions is not None and not self.extensions:
            raise ConfigError("data.extensions is empty: no name would count as an image.")
        if self.depth is not None and self.depth < 0:
            raise ConfigError(f"data.depth={self.depth}: expected a whole number of at least 0.")
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
        check_choice("stats.rows", self.rows, ("image", "position"))
        check_choice("stats.kind", self.kind, ("full", "diagonal"))
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
            check_choice("attribute.method", method, METHODS)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"attribute.method={self.method}: expected some of {METHODS}.")
        if self.baseline is not None:
            check_choice("attribute.baseline", self.baseline, BASELINES)
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
class ExportConfig:
    """What job=export writes."""

    format: str = "npy"
    """npy (one array a layer), parquet, safetensors, zarr, webdataset (pictures and features),
    projector (TensorBoard's vectors.tsv and metadata.tsv) or huggingface (a data set on disk)."""
    ok_only: bool = False
    """Leave failed rows out; else they are there with their status, and their features are NaN."""
    incomplete: bool = False
    """Export a store that is not complete, with NaN and status 255 where rows are not there yet."""
    shard_gib: float | None = None
    """Size of one file of parquet, safetensors, webdataset and huggingface, at the most; 1 when not
    given. Of webdataset it is estimated."""

    def __post_init__(self) -> None:
        check_choice("export.format", self.format, EXPORTS)
        if self.shard_gib is not None:
            if self.format not in IN_SHARDS:
                raise ConfigError(
                    f"export.shard_gib has an effect with export.format={' or '.join(IN_SHARDS)} "
                    f"only, now {self.format}."
                )
            if not 0 < self.shard_gib < math.inf:
                raise ConfigError(f"export.shard_gib={self.shard_gib}: expected more than 0.")

    @property
    def shard_bytes(self) -> int:
        """The key `shard_gib` in bytes."""
        return int((1.0 if self.shard_gib is None else self.shard_gib) * (1 << 30))


@dataclass
class SimilarConfig:
    """What job=similar looks for: the nearest rows of every row where nothing else is asked."""

    key: str | None = None
    """A picture, by its key: only its own nearest rows are looked for, and printed."""
    k: int | None = None
    """How many nearest rows, 10 when not given."""
    metric: str | None = None
    """Of nearest rows: cosine (when not given) or euclidean."""
    duplicates: float | None = None
    """Groups of rows that reach this cosine, such as 0.98, one with the next."""
    cka: bool = False
    """Linear CKA and RSA between the layers."""
    other: str | None = None
    """A second store, for cka: its layers against those of the first, rows matched by key."""
    rows: int | None = None
    """So many random rows for cka, 2000 when not given; all where there are no more."""

    def __post_init__(self) -> None:
        kinds = {"key": self.key is not None, "duplicates": self.duplicates is not None}
        kinds["cka"] = self.cka
        asked = [name for name, given in kinds.items() if given]
        if len(asked) > 1:
            names = " and ".join(f"similar.{name}" for name in asked)
            raise ConfigError(f"{names} are different questions; ask one at a time.")
        kind = asked[0] if asked else ""
        owners = {
            "k": ("", "key"),
            "metric": ("", "key"),
            "other": ("cka",),
            "rows": ("cka",),
        }
        for key, known in owners.items():
            if getattr(self, key) is not None and kind not in known:
                where = "similar.cka=true only" if known == ("cka",) else "nearest rows only"
                raise ConfigError(
                    f"similar.{key} has an effect with {where}"
                    + (f", not with similar.{kind}." if kind else ".")
                )
        if self.metric is not None:
            check_choice("similar.metric", self.metric, METRICS)
        if self.k is not None and self.k < 1:
            raise ConfigError(f"similar.k={self.k}: expected at least 1.")
        if self.rows is not None and self.rows < 4:
            raise ConfigError(f"similar.rows={self.rows}: expected at least 4.")
        if self.duplicates is not None and not 0 < self.duplicates <= 1:
            raise ConfigError(
                f"similar.duplicates={self.duplicates}: expected a cosine above 0, up to 1."
            )


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
class ProbeConfig:
    """How job=probe fits and judges a probe."""

    method: Any = "linear"
    """linear (logistic regression), knn, ridge, or some of them as a list; the first one chooses
    the best layer."""
    split: str = "holdout"
    """Which rows are tested: holdout (a share of each class), kfold (each row once), or column (as
    probe.split_file says)."""
    test: float | None = None
    """Share of each class that holdout tests, 0.2 when not given."""
    folds: int | None = None
    """Folds of kfold, 5 when not given."""
    split_file: str | None = None
    """A CSV file with the columns key and split (train, validation or test), for column."""
    test_store: str | None = None
    """Another store whose rows are tested, classes matched by name; all labelled rows of this one
    are then for training."""
    validation: float = 0.2
    """Share of each class of the training rows on which strengths and k are chosen."""
    l2: float | None = None
    """Strength of linear's and ridge's penalty, of the mean loss; swept when not given."""
    k: int | None = None
    """Neighbours that knn asks; swept when not given."""
    temperature: float | None = None
    """knn weighs a neighbour by exp(cosine / temperature), 0.07 when not given."""
    shots: Any = None
    """Also train on so few rows a class, such as [1,5,10]."""
    draws: int | None = None
    """Random choices of these rows, 5 when not given."""
    memory_gib: float = 4.0
    """What a layer's rows and their standardised copy may take; a larger layer is streamed."""
    epochs: int = 20
    """Passes over the training rows where they are streamed."""
    learning_rate: float = 1e-3
    """Of AdamW at the first step, where rows are streamed; it falls to 0 along a cosine."""
    clip_norm: float = 1.0
    """Largest norm of a step's gradients, where rows are streamed."""

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("probe.method", method, PROBES)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"probe.method={self.method}: expected some of {', '.join(PROBES)}.")
        check_choice("probe.split", self.split, SPLITS)
        self._check_owners()
        for key in ("test", "validation"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"probe.{key}={value}: expected a share between 0 and 1.")
        if self.folds is not None and self.folds < 2:
            raise ConfigError(f"probe.folds={self.folds}: expected at least 2.")
        if self.l2 is not None and not 0 <= self.l2 < math.inf:
            raise ConfigError(f"probe.l2={self.l2}: expected a number of at least 0.")
        for key in ("k", "draws", "epochs"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"probe.{key}={value}: expected at least 1.")
        for key in ("temperature", "learning_rate", "clip_norm"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"probe.{key}={value}: expected a number above 0.")
        if not self.memory_gib >= 0:
            raise ConfigError(f"probe.memory_gib={self.memory_gib}: expected 0 or more.")
        self._check_shots()

    def _check_owners(self) -> None:
        """Keys that belong to one kind of split, or to one method."""
        kind = "test_store" if self.test_store else self.split
        if self.test_store and self.split != "holdout":
            raise ConfigError(
                f"probe.test_store says which rows are tested, and so does probe.split="
                f"{self.split}; give one."
            )
        for key, owner in (("test", "holdout"), ("folds", "kfold"), ("split_file", "column")):
            if getattr(self, key) is not None and kind != owner:
                raise ConfigError(f"probe.{key} has an effect with probe.split={owner} only.")
        if kind == "column" and not self.split_file:
            raise ConfigError(
                "probe.split=column needs probe.split_file=FILE.csv with the columns key and split."
            )
        for key, owners in (
            ("l2", ("linear", "ridge")),
            ("k", ("knn",)),
            ("temperature", ("knn",)),
        ):
            if getattr(self, key) is not None and not set(owners) & set(self.methods):
                raise ConfigError(
                    f"probe.{key} has an effect with probe.method={' or '.join(owners)} only."
                )

    def _check_shots(self) -> None:
        whole = [isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in self.all_shots]
        if not all(whole) or len(set(self.all_shots)) < len(whole):
            raise ConfigError(
                f"probe.shots={self.shots}: expected rows a class, such as 5 or [1,5,10]."
            )
        if self.draws is not None and not self.all_shots:
            raise ConfigError("probe.draws has an effect with probe.shots only.")

    @property
    def methods(self) -> tuple[str, ...]:
        """The key `method` as a tuple."""
        return (self.method,) if isinstance(self.method, str) else tuple(self.method or ())

    @property
    def all_shots(self) -> tuple[Any, ...]:
        """The key `shots` as a tuple; empty when not given."""
        if self.shots is None:
            return ()
        return tuple(self.shots) if isinstance(self.shots, list | tuple) else (self.shots,)
