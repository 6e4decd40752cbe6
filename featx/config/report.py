"""Options of job=report."""

from __future__ import annotations

from dataclasses import dataclass

from featx.errors import ConfigError


@dataclass
class ReportConfig:
    """What job=report takes into its page."""

    rows: int = 2000
    """So many random rows for its maps and the statistics of layers, 10 to 10000; all where there
    are no more."""
    thumbnails: int = 1000
    """Largest number of thumbnails in the page; 0 leaves them out."""
    tsne: bool = True
    """Draw t-SNE beside PCA; false saves its time."""

    def __post_init__(self) -> None:
        if not 10 <= self.rows <= 10_000:
            raise ConfigError(f"report.rows={self.rows}: expected 10 to 10000.")
        if self.thumbnails < 0:
            raise ConfigError(f"report.thumbnails={self.thumbnails}: expected 0 or more.")
