"""Jobs that read a store: export, similar, report, probe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from featx.errors import ConfigError
from featx.options.checks import NAMES, check_choice

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
    recall: float | None = None
    """For very many rows, by faiss (extra faiss, on the CPU): find only this share of the nearest
    rows, such as 0.99, in far less time; the share is measured and told. 1 is exact, as it is when
    not given."""
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
            "recall": ("",),
            "other": ("cka",),
            "rows": ("cka",),
        }
        for key, known in owners.items():
            if getattr(self, key) is not None and kind not in known:
                where = "similar.cka=true only" if known == ("cka",) else "nearest rows only"
                where = "the nearest rows of every row only" if known == ("",) else where
                raise ConfigError(
                    f"similar.{key} has an effect with {where}"
                    + (f", not with similar.{kind}." if kind else ".")
                )
        if self.metric is not None:
            check_choice("similar.metric", self.metric, METRICS)
        if self.k is not None and self.k < 1:
            raise ConfigError(f"similar.k={self.k}: expected at least 1.")
        if self.recall is not None and not 0 < self.recall <= 1:
            raise ConfigError(f"similar.recall={self.recall}: expected a share above 0, up to 1.")
        if self.rows is not None and self.rows < 4:
            raise ConfigError(f"similar.rows={self.rows}: expected at least 4.")
        if self.duplicates is not None and not 0 < self.duplicates <= 1:
            raise ConfigError(
                f"similar.duplicates={self.duplicates}: expected a cosine above 0, up to 1."
            )


@dataclass
class ReportConfig:
    """What job=report takes into its page."""

    rows: int = 2000
    """So many random rows for its maps and the statistics of layers, 10 to 10000; all where there
    are no more."""
    pictures: int = 1000
    """Thumbnails in the page, at the most; 0 leaves pictures out."""
    tsne: bool = True
    """Draw t-SNE beside PCA; false saves its time."""

    def __post_init__(self) -> None:
        if not 10 <= self.rows <= 10_000:
            raise ConfigError(f"report.rows={self.rows}: expected 10 to 10000.")
        if self.pictures < 0:
            raise ConfigError(f"report.pictures={self.pictures}: expected 0 or more.")


@dataclass
class ProbeConfig:
    """How job=probe fits and judges a probe."""

    method: Annotated[Any, NAMES] = "linear"
    """linear (logistic regression), knn, ridge, or some of them as a list; the first one chooses
    the best layer."""
    split: str = "holdout"
    """Which rows are tested: holdout (a share of each class), kfold (each row once), or column (as
    probe.split_column or probe.split_file says)."""
    test: float | None = None
    """Share of each class that holdout tests, 0.2 when not given."""
    folds: int | None = None
    """Folds of kfold, 5 when not given."""
    split_file: str | None = None
    """A CSV file with the columns key and split (train, validation or test), for column."""
    split_column: str | None = None
    """A column of the store (data.columns) that says train, validation or test, for column."""
    label_column: str | None = None
    """A column of the store (data.columns) that is probed for instead of its labels: text, whole
    numbers or booleans."""
    group_column: str | None = None
    """A column of the store (data.columns) whose rows of one value, such as a patient or a slide,
    stay on one side of every split; boxes of an image and frames of a video always do."""
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
        for key, owner in (
            ("test", "holdout"),
            ("folds", "kfold"),
            ("split_file", "column"),
            ("split_column", "column"),
        ):
            if getattr(self, key) is not None and kind != owner:
                raise ConfigError(f"probe.{key} has an effect with probe.split={owner} only.")
        if kind == "column" and bool(self.split_file) == bool(self.split_column):
            raise ConfigError(
                "probe.split=column needs probe.split_file=FILE.csv with the columns key and split "
                "or probe.split_column=NAME, a column of the store; one of the two."
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
