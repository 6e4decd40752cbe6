"""Options of `job`, of single jobs, of the log and of the comparison of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le

from featx.config.checks import (
    Count,
    NaturalNumber,
    OneOrMore,
    OnlyWith,
    Share,
    names_tuple,
    options,
)
from featx.errors import ConfigError


@options("job")
class JobConfig:
    """Job of the command, and the form of its result."""

    name: str = "extract"
    """Name of the job, from the option `job` itself."""
    json: bool = False
    """Print the result of the job as JSON."""
    show: Literal["shapes", "cost", "values", "all", "watch", "local"] | None = None
    """Columns of job=layers: shapes (the default), cost (parameters, MFLOPs, ms, memory), values
    (on one image), all of these in one wide table, or watch: every call during a forward pass. With
    job=probe, all adds few-shot accuracies, chosen settings and further scores; with job=models it
    prints all models, not the first 20, and local those whose weights are on this machine."""

    def __post_init__(self) -> None:
        if self.json and self.show not in (None, "shapes", "local"):
            raise ConfigError(
                f"job.show={self.show} has no effect with job.json=true, which gives everything."
            )


@options("log")
class LogConfig:
    """Log messages of the command."""

    json: bool = False
    """Write one JSON object per line to stderr instead of text and a progress bar."""
    metrics: str | None = None
    """File for Prometheus, whose name ends in .prom: images done, failed and per second, and the
    time left, rewritten every 10 s. The textfile collector of node_exporter reads it."""

    def __post_init__(self) -> None:
        if self.metrics is not None and not self.metrics.endswith(".prom"):
            raise ConfigError(
                f"log.metrics={self.metrics}: the name has to end in .prom, because node_exporter "
                "reads no other files."
            )


@options("status")
class StatusConfig:
    """Display of job=status."""

    watch: bool = False
    """Show the status again every 5 s until the run is complete."""


@options("stats")
class StatsConfig:
    """Statistics that job=stats computes."""

    observation: Literal["image", "position"] = "image"
    """image: one observation per image, which is the mean over the positions of maps and tokens
    unless `reduce` says otherwise; position: one observation of C features per position of a map,
    or per token."""
    covariance: Literal["full", "diagonal"] = "full"
    """full computes the D x D scatter matrix (D up to 16384), diagonal only the variances."""
    reference: str | None = None
    """Another stats.h5, or its folder. The Fréchet distance to it is printed for every layer that
    both contain."""

    def __post_init__(self) -> None:
        if self.reference is not None and self.covariance != "full":
            raise ConfigError("stats.reference needs covariances, so stats.covariance=full.")


@options("verify")
class VerifyConfig:
    """Checks of job=verify besides the checksums."""

    reextract_rows: NaturalNumber = 0
    """Number of random rows that are extracted from their images again and compared."""
    repair: bool = False
    """Extract the rows of damaged chunks again; all others are kept."""


@options("models")
class ModelsConfig:
    """Search of job=models."""

    query: str | None = None
    """Words that the name of a model, of its weights or of its library contains, such as dino, or a
    name that other programs have for it; null shows recommended models and the libraries."""

    def __post_init__(self) -> None:
        if self.query is not None and not self.query.strip():
            raise ConfigError("models.query is empty: expected words, such as models.query=dino.")


@options("export")
class ExportConfig:
    """Files that job=export writes; a format with options of its own has them in a subclass."""

    format: str = "npy"
    """File format of the export."""
    ok_only: bool = False
    """Leave failed rows out. Otherwise they are exported with their status, and their features are
    NaN."""
    incomplete: bool = False
    """Export a store that is not complete, with NaN and status 255 in rows that are missing."""


@options("report")
class ReportConfig:
    """Contents of the page of job=report."""

    rows: Annotated[int, Ge(10), Le(10_000)] = 2000
    """Number of random rows for embedding plots and the statistics of layers, 10 to 10000; a
    smaller store is taken whole."""
    thumbnails: NaturalNumber = 1000
    """Largest number of images that are read again for thumbnails; 0 leaves them out."""
    tsne: bool = True
    """Plot t-SNE as well as PCA; false saves its time, and needs no scikit-learn."""
    texts: OneOrMore[str] | None = None
    """What images show, or a list of such texts, or a file NAME.txt with one a line: the page shows
    the images nearest to each, as neighbors.text of job=neighbors ranks them."""


@options("zeroshot")
class ZeroshotConfig:
    """Classifier of class names that job=zeroshot builds from the text tower of a CLIP model."""

    classes: str | None = None
    """Names of the classes as the texts have them: a text file with one a line, or a .json file
    that maps classes of the store to their names; null takes the classes of the store."""
    templates: str = "a photo of a {}."
    """Texts of a class, {} being its name: one such text, a text file with one a line, or openai
    (80 texts) or simple (7), of open_clip. The vectors of the texts are averaged."""

    def __post_init__(self) -> None:
        if not self.templates.strip():
            raise ConfigError("zeroshot.templates is empty: give a text with {}, or a file.")


@options("conformance")
class ConformanceConfig:
    """Comparison of some images with the model library's own path, before a run starts."""

    mode: Literal["off", "warn", "strict"] = "strict"
    """strict refuses a run whose values differ by more than featx promises (docs/models.md); warn
    runs with a warning; off leaves the comparison out. A resume compares nothing."""


Method = Literal[
    "saliency", "input_x_gradient", "integrated_gradients", "gradcam", "guided_gradcam", "occlusion"
]
METHODS: tuple[str, ...] = get_args(Method)
OF_A_LAYER = ("gradcam", "guided_gradcam")
BY_CAPTUM = ("integrated_gradients", "occlusion")
DEFAULT_BASELINE = "mean"
DEFAULT_STEPS = 32
"""Points between baseline and image; the fields are None so that a value without effect shows."""


@options("attribute")
class AttributeConfig:
    """Heat maps that job=attribute computes and draws."""

    method: OneOrMore[Method] = "gradcam"
    """Method of attribution: saliency, input_x_gradient, integrated_gradients, gradcam,
    guided_gradcam or occlusion, or a list of them."""
    steps: Annotated[Count | None, OnlyWith("method", "integrated_gradients")] = None
    """Number of points between baseline and image for integrated_gradients, 32 when not given."""
    baseline: Annotated[Literal["black", "mean", "blur"] | None, OnlyWith("method", *BY_CAPTUM)] = (
        None
    )
    """Image without information in integrated_gradients and occlusion: black, mean (of the model's
    preprocessing; when not given) or blur (the image itself, blurred)."""
    window: Annotated[Count | None, OnlyWith("method", "occlusion")] = None
    """Side of the square that occlusion hides, in pixels of the crop; a seventh of the crop when
    not given. The square moves by half of that."""
    per_class: NaturalNumber = 8
    """Number of rows drawn for each class of the data set, on one sheet below OUT/sheets; 0 draws
    none."""
    feature_map_layer: str | None = None
    """Layer whose feature maps are drawn as well, for the first image of each sheet."""

    def __post_init__(self) -> None:
        if self.feature_map_layer is not None and not self.per_class:
            raise ConfigError(
                "attribute.feature_map_layer draws a row of each sheet: attribute.per_class=0."
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """The option `method` as a tuple."""
        return names_tuple(self.method)

    def settings(self, method: str) -> dict[str, Any]:
        """Return the options that change the values of a method, with defaults; not the layer."""
        settings: dict[str, Any] = {}
        if method == "integrated_gradients":
            settings["steps"] = self.steps or DEFAULT_STEPS
        if method == "occlusion" and self.window is not None:
            settings |= {"window": self.window, "stride": max(1, self.window // 2)}
        if method in BY_CAPTUM:
            settings["baseline"] = self.baseline or DEFAULT_BASELINE
        return settings


Metric = Literal["cosine", "euclidean"]
METRICS: tuple[str, ...] = get_args(Metric)
Measure = Literal["cka", "cka_debiased", "rsa", "rsa_cosine", "svcca", "procrustes"]
MEASURES: tuple[str, ...] = get_args(Measure)
USUAL_MEASURES = MEASURES[:3]


@options("neighbors")
class NeighborsConfig:
    """Nearest neighbours that job=neighbors finds, and how near rows are for job=outliers and
    job=duplicates."""

    key: str | None = None
    """Key of one image, whose neighbours alone are found and printed; null takes every row."""
    image: str | None = None
    """Image file that is no row of the store: its features are computed by the model of the store,
    and its neighbours alone are found and printed."""
    text: OneOrMore[str] | None = None
    """What images show, or a list of such texts, or a file NAME.txt with one a line: the rows whose
    embedding by a model with a text tower is nearest to each are printed."""
    k: Count = 10
    """Number of neighbours of each row; their mean distance is the score of job=outliers."""
    metric: Metric = "cosine"
    """Measure of nearness, also of job=outliers and export.format=faiss: cosine or euclidean."""
    standardise: bool = True
    """Whether each value of the layer is standardised over all rows first, as in the report, also
    by job=duplicates. Cosines of the plain values are near 1 for all images of one kind. Texts are
    compared with the plain values."""
    recall: Share | None = None
    """Share of the neighbours to find, such as 0.99, with an index of faiss (extra faiss, on the
    CPU), which is faster for very many rows. The share is measured and printed. null
    searches exactly."""

    def __post_init__(self) -> None:
        given = [name for name in ("key", "image", "text") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                "neighbors.key is a row of the store, neighbors.image an image that is none, and "
                f"neighbors.text what images show: give one of {' and '.join(given)}."
            )
        if given and self.recall is not None:
            raise ConfigError(
                f"neighbors.recall has no effect with neighbors.{given[0]}: the neighbours of one "
                "image or text are searched exactly."
            )
        if self.text is not None and self.metric != "cosine":
            raise ConfigError("neighbors.text is compared with images by metric=cosine only.")


@options("duplicates")
class DuplicatesConfig:
    """Near-duplicates that job=duplicates finds."""

    threshold: Annotated[float, Gt(0), Le(1)] | None = None
    """Smallest cosine that links two rows; linked rows form a group. null is 0.9, or 0.98 with
    neighbors.standardise=false."""

    def least_cosine(self, standardised: bool) -> float:
        """Return the threshold that is given, or the default."""
        return self.threshold or (0.9 if standardised else 0.98)


@options("cka")
class CkaConfig:
    """Layers and rows that job=cka compares."""

    measures: OneOrMore[Measure] | None = None
    """Measures of similarity: cka, cka_debiased, rsa (of distances of images by correlation),
    rsa_cosine (by the cosine, which does not see a rotation), svcca and procrustes (a distance), or
    some of them; null takes the first three."""
    rows: Annotated[int, Ge(4)] = 2000
    """Largest number of rows to compare; of more rows, random ones are chosen. rsa and rsa_cosine
    take at most 10000."""

    @property
    def chosen_measures(self) -> tuple[str, ...]:
        """The measures, in the given order."""
        return USUAL_MEASURES if self.measures is None else names_tuple(self.measures)
