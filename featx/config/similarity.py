"""Options of job=neighbors, job=duplicates and job=cka."""

from __future__ import annotations

from dataclasses import dataclass

from featx.config.checks import check_choice
from featx.errors import ConfigError

METRICS = ("cosine", "euclidean")
RSA_DISTANCES = ("correlation", "cosine")


@dataclass
class NeighborsConfig:
    """Nearest neighbours that job=neighbors finds."""

    key: str | None = None
    """Key of one image, whose neighbours alone are found and printed; null takes every row."""
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
        if self.recall is not None and self.key is not None:
            raise ConfigError(
                "neighbors.recall has no effect with neighbors.key: the neighbours of one row are "
                "searched exactly."
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
    rows: int = 2000
    """Largest number of rows to compare; of more rows, random ones are chosen."""
    rsa_distance: str = "correlation"
    """Distance of two images in RSA: correlation, or cosine, which does not see a rotation."""

    def __post_init__(self) -> None:
        check_choice("cka.rsa_distance", self.rsa_distance, RSA_DISTANCES)
        if self.rows < 4:
            raise ConfigError(f"cka.rows={self.rows}: expected at least 4.")
