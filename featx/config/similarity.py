"""Options of job=neighbors, duplicates, outliers and cka."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le

from featx.config.checks import Count, OneOrMore, Share, names_tuple, options
from featx.errors import ConfigError

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
