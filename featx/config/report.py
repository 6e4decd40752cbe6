"""Options of job=report."""

from __future__ import annotations

from dataclasses import dataclass

from featx.errors import ConfigError


@dataclass
class ReportConfig:
    """Contents of the page of job=report."""

    rows: int = 2000
    """Number of random rows for embedding plots and the statistics of layers, 10 to 10000; a
    smaller store is taken whole."""
    thumbnails: int = 1000
    """Largest number of images that are read again for thumbnails; 0 leaves them out."""
    tsne: bool = True
    """Plot t-SNE as well as PCA; false saves its time, and needs no scikit-learn."""

    def __post_init__(self) -> None:
        if not 10 <= self.rows <= 10_000:
            raise ConfigError(f"report.rows={self.rows}: expected 10 to 10000.")
        if self.thumbnails < 0:
            raise ConfigError(f"report.thumbnails={self.thumbnails}: expected 0 or more.")
