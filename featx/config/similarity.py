"""Options of job=neighbors, duplicates, outliers, mislabelled, cka and distance."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le

from featx.config.checks import Count, OneOrMore, Share, names_tuple, options
from featx.errors import ConfigError

Metric = Literal["cosine", "euclidean"]
METRICS: tuple[str, ...] = get_args(Metric)
RsaDistance = Literal["correlation", "cosine"]
RSA_DISTANCES: tuple[str, ...] = get_args(RsaDistance)
Measure = Literal["cka", "cka_debiased", "rsa", "svcca", "procrustes"]
MEASURES: tuple[str, ...] = get_args(Measure)
USUAL_MEASURES = MEASURES[:3]


@options("neighbors")
class NeighborsConfig:
    """Nearest neighbours that job=neighbors finds."""

    key: str | None = None
    """Key of one image, whose neighbours alone are found and printed; null takes every row."""
    image: str | None = None
    """Image file that is no row of the store: its features are computed by the model of the store,
    and its neighbours alone are found and printed."""
    text: OneOrMore[str] | None = None
    """What images show, or a list of such texts, or a file NAME.txt with one a line: the rows whose
    embedding by a model with a text tower is nearest to each are printed."""
    k: Count = 10
    """Number of neighbours of each row."""
    metric: Metric = "cosine"
    """Measure of nearness: cosine or euclidean."""
    standardise: bool = True
    """Whether each value of the layer is standardised over all rows first, as in the report.
    Cosines of the plain values are near 1 for all images of one kind. Texts are compared with the
    plain values."""
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
    """Smallest cosine that links two rows; linked rows form a group. null is 0.9, or 0.98 without
    `standardise`."""
    standardise: bool = True
    """Whether each value of the layer is standardised over all rows before cosines are computed, as
    in the report. Cosines of the plain values are near 1 for all images of one kind."""

    @property
    def least_cosine(self) -> float:
        """The threshold that is given, or the default."""
        return self.threshold or (0.9 if self.standardise else 0.98)


@options("outliers")
class OutliersConfig:
    """Rows that job=outliers finds."""

    k: Count = 10
    """Number of nearest rows whose mean distance is the score of a row."""
    metric: Metric = "cosine"
    """Distance of two rows of standardised values: cosine (1 - cosine) or euclidean."""


@options("mislabelled")
class MislabelledConfig:
    """Labels that job=mislabelled judges."""

    folds: Annotated[int, Ge(2), Le(1_000_000)] = 5
    """Number of folds: each row is judged by a linear probe that is fitted on the other folds."""
    label_column: str | None = None
    """Column of the store (data.columns) with the labels to judge instead of the store's."""


@options("cka")
class CkaConfig:
    """Layers and rows that job=cka compares."""

    other_store: str | None = None
    """Second store, whose layers are compared with those of the first, with rows matched by key;
    null compares the layers of one store."""
    measures: OneOrMore[Measure] | None = None
    """Measures of similarity: cka, cka_debiased, rsa, svcca and procrustes (a distance), or some of
    them; null takes the first three."""
    rows: Annotated[int, Ge(4)] = 2000
    """Largest number of rows to compare; of more rows, random ones are chosen. rsa takes at most
    10000."""
    rsa_distance: RsaDistance = "correlation"
    """Distance of two images in RSA: correlation, or cosine, which does not see a rotation."""

    def __post_init__(self) -> None:
        if "rsa" not in self.chosen_measures and self.rsa_distance != "correlation":
            raise ConfigError("cka.rsa_distance has an effect with rsa in cka.measures only.")

    @property
    def chosen_measures(self) -> tuple[str, ...]:
        """The measures, in the given order."""
        return USUAL_MEASURES if self.measures is None else names_tuple(self.measures)


@options("distance")
class DistanceConfig:
    """Stores whose images job=distance compares."""

    other_store: str | None = None
    """Second store, with the same layers of the same model for other images."""
    subsets: Annotated[int, Ge(1), Le(1_000_000)] = 100
    """Number of random subsets over which KID is averaged."""
    subset_rows: Annotated[int, Ge(2)] = 1000
    """Largest number of rows of each store in a subset."""
