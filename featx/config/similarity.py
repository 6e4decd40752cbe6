"""Options of job=neighbors, job=duplicates, job=cka and job=distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from featx.config.checks import NAMES, check_choice
from featx.errors import ConfigError

METRICS = ("cosine", "euclidean")
RSA_DISTANCES = ("correlation", "cosine")
USUAL_MEASURES = ("cka", "cka_debiased", "rsa")
MEASURES = (*USUAL_MEASURES, "svcca", "procrustes")


@dataclass
class NeighborsConfig:
    """Nearest neighbours that job=neighbors finds."""

    key: str | None = None
    """Key of one image, whose neighbours alone are found and printed; null takes every row."""
    image: str | None = None
    """Image file that is no row of the store: its features are computed by the model of the store,
    and its neighbours alone are found and printed."""
    k: int = 10
    """Number of neighbours of each row."""
    metric: str = "cosine"
    """Measure of nearness: cosine or euclidean."""
    recall: float | None = None
    """Share of the neighbours to find, such as 0.99, with an index of faiss (extra faiss, on the
    CPU), which is faster for very many rows. The share is measured and printed. 1 takes the exact
    search of faiss, null that of featx."""

    def __post_init__(self) -> None:
        check_choice("neighbors.metric", self.metric, METRICS)
        if self.k < 1:
            raise ConfigError(f"neighbors.k={self.k}: expected at least 1.")
        if self.recall is not None and not 0 < self.recall <= 1:
            raise ConfigError(
                f"neighbors.recall={self.recall}: expected a share above 0 and at most 1."
            )
        if self.key is not None and self.image is not None:
            raise ConfigError(
                "neighbors.key is a row of the store and neighbors.image an image that is none: "
                "give one of them."
            )
        key = "key" if self.image is None else "image"
        if self.recall is not None and getattr(self, key) is not None:
            raise ConfigError(
                f"neighbors.recall has no effect with neighbors.{key}: the neighbours of one "
                "image are searched exactly."
            )


@dataclass
class DuplicatesConfig:
    """Near-duplicates that job=duplicates finds."""

    threshold: float = 0.98
    """Smallest cosine that links two rows; linked rows form a group."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(
                f"duplicates.threshold={self.threshold}: expected a cosine above 0 and at most 1."
            )


@dataclass
class CkaConfig:
    """Layers and rows that job=cka compares."""

    other_store: str | None = None
    """Second store, whose layers are compared with those of the first, with rows matched by key;
    null compares the layers of one store."""
    measures: Annotated[Any, NAMES] = None
    """Measures of similarity: cka, cka_debiased, rsa, svcca and procrustes (a distance), or some of
    them; null takes the first three."""
    rows: int = 2000
    """Largest number of rows to compare; of more rows, random ones are chosen. rsa takes at most
    10000."""
    rsa_distance: str = "correlation"
    """Distance of two images in RSA: correlation, or cosine, which does not see a rotation."""

    def __post_init__(self) -> None:
        check_choice("cka.rsa_distance", self.rsa_distance, RSA_DISTANCES)
        if self.rows < 4:
            raise ConfigError(f"cka.rows={self.rows}: expected at least 4.")
        for name in self.chosen_measures:
            check_choice("cka.measures", name, MEASURES)
        if not self.chosen_measures or len(set(self.chosen_measures)) < len(self.chosen_measures):
            raise ConfigError(
                f"cka.measures={self.measures}: expected some of {', '.join(MEASURES)}."
            )
        if "rsa" not in self.chosen_measures and self.rsa_distance != "correlation":
            raise ConfigError("cka.rsa_distance has an effect with rsa in cka.measures only.")

    @property
    def chosen_measures(self) -> tuple[str, ...]:
        """The measures, in the given order."""
        if self.measures is None:
            return USUAL_MEASURES
        return (self.measures,) if isinstance(self.measures, str) else tuple(self.measures)


@dataclass
class DistanceConfig:
    """Stores whose images job=distance compares."""

    other_store: str | None = None
    """Second store, with the same layers of the same model for other images."""
    subsets: int = 100
    """Number of random subsets over which KID is averaged."""
    subset_rows: int = 1000
    """Largest number of rows of each store in a subset."""

    def __post_init__(self) -> None:
        if self.subsets < 1:
            raise ConfigError(f"distance.subsets={self.subsets}: expected at least 1.")
        if self.subset_rows < 2:
            raise ConfigError(f"distance.subset_rows={self.subset_rows}: expected at least 2.")
