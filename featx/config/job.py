"""Options of the group `job`, and of jobs and logs with few options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from featx.config.checks import check_choice
from featx.errors import ConfigError

VIEWS_OF_LAYERS = ("shapes", "cost", "values", "all", "watch")
"""Values of job.show with job=layers; job=probe accepts `all` in addition to its default."""


@dataclass
class JobConfig:
    """Job of the command, and the form of its result."""

    name: str = "extract"
    """Name of the job, from the option `job` itself."""
    json: bool = False
    """Print the result of the job as JSON."""
    show: str | None = None
    """Columns of job=layers: shapes (the default), cost (parameters, MFLOPs, ms, memory), values
    (on one image), all of these in one wide table, or watch: every call during a forward pass. With
    job=probe, all adds few-shot accuracies, chosen settings and further scores."""
    depth: Annotated[Any, "number or all"] = None
    """Levels of modules that job=layers lists: 1, the top level (the default), 2 or more, or all,
    which also lists operations. A module that computes nearly everything is replaced by those
    inside it."""

    def __post_init__(self) -> None:
        if self.show is not None:
            check_choice("job.show", self.show, VIEWS_OF_LAYERS)
        if self.depth not in (None, "all") and (type(self.depth) is not int or self.depth < 1):
            raise ConfigError(f"job.depth={self.depth}: expected 1, 2, ... or all.")
        for key in ("show", "depth"):
            value = getattr(self, key)
            if self.json and value not in (None, "shapes"):
                raise ConfigError(
                    f"job.{key}={value} has no effect with job.json=true, which gives everything."
                )


@dataclass
class LogConfig:
    """Log messages of the command."""

    json: bool = False
    """Write one JSON object per line to stderr instead of text and a progress bar."""
    metrics: str | None = None
    """File for Prometheus, whose name ends in .prom: images done, failed and per second, and the
    time left, rewritten every 10 s. The textfile collector of node_exporter reads it."""

    def __post_init__(self) -> None:
        if self.metrics is None:
            return
        if not self.metrics.endswith(".prom"):
            raise ConfigError(
                f"log.metrics={self.metrics}: the name has to end in .prom, because node_exporter "
                "reads no other files."
            )


@dataclass
class StatusConfig:
    """Display of job=status."""

    watch: bool = False
    """Show the status again every 5 s until the run is complete."""


@dataclass
class StatsConfig:
    """Statistics that job=stats computes."""

    observation: str = "image"
    """image: one observation per image, its whole tensor; position: one observation of C features
    per position of a feature map, or per token."""
    covariance: str = "full"
    """full computes the D x D scatter matrix (D up to 16384), diagonal only the variances."""
    reference: str | None = None
    """Another stats.h5, or its folder. The Fréchet distance to it is printed for every layer that
    both contain."""

    def __post_init__(self) -> None:
        check_choice("stats.observation", self.observation, ("image", "position"))
        check_choice("stats.covariance", self.covariance, ("full", "diagonal"))
        if self.reference is not None and self.covariance != "full":
            raise ConfigError("stats.reference needs covariances, so stats.covariance=full.")


@dataclass
class VerifyConfig:
    """Checks of job=verify besides the checksums."""

    reextract_rows: int = 0
    """Number of random rows that are extracted from their images again and compared."""
    repair: bool = False
    """Quarantine damaged files and extract their rows again."""

    def __post_init__(self) -> None:
        if self.reextract_rows < 0:
            raise ConfigError(
                f"verify.reextract_rows={self.reextract_rows}: expected 0 or more rows."
            )


@dataclass
class ModelsConfig:
    """Search of job=models."""

    query: str | None = None
    """Words that the name of a model, of its weights or of its library contains, such as dino, or a
    name that other programs have for it; null shows recommended models and the libraries."""
    limit: int = 20
    """Largest number of models that are printed; job.json=true prints all."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"models.limit={self.limit}: expected at least 1.")
        if self.query is not None and not self.query.strip():
            raise ConfigError("models.query is empty: expected words, such as models.query=dino.")
