"""Options of job=report."""

from __future__ import annotations

from dataclasses import dataclass

from featx.errors import ConfigError


@dataclass
class ReportConfig:
    """Contents of the page of job=report."""

    rows: int = 2000
    """Number of random rows for maps and the statistics of layers, 10 to 10000; a smaller store is
    taken whole."""
    thumbnails: int = 1000
    """Largest number of thumbnails in the page; 0 leaves them out."""
    tsne: bool = True
    """Draw a t-SNE map as well as a PCA map; false saves its time."""

    def __post_init__(self) -> None:
        if not 10 <= self.rows <= 10_000:
            raise ConfigError(f"report.rows={self.rows}: expected 10 to 10000.")
        if self.thumbnails < 0:
            raise ConfigError(f"report.thumbnails={self.thumbnails}: expected 0 or more.")
