"""Options of job=report."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from featx.config.checks import NaturalNumber, options


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
