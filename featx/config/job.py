"""The key `job`, and those of jobs with few."""

from __future__ import annotations

from dataclasses import dataclass

from featx.config.checks import check_choice
from featx.errors import ConfigError

JOBS = (
    "extract",
    "plan",
    "layers",
    "stats",
    "attribute",
    "probe",
    "predict",
    "neighbors",
    "duplicates",
    "cka",
    "export",
    "report",
    "verify",
    "status",
    "pack",
    "bench",
)
VIEWS_OF_LAYERS = ("shapes", "cost", "values", "all", "watch")


@dataclass
class JobConfig:
    """What the command does."""

    name: str = "extract"
    """Taken from the key `job` itself."""
    json: bool = False
    """Print the job's result as JSON (layers, plan, stats, probe, predict, neighbors, duplicates,
    cka, export, report, verify, status, bench)."""
    show: str = "shapes"
    """What job=layers tells of each layer: shapes, cost (parameters, MFLOPs, ms, memory), values
    (on one picture), all of these in one wide table, or watch: every call while a pass goes on."""

    def __post_init__(self) -> None:
        check_choice("job", self.name, JOBS)
        check_choice("job.show", self.show, VIEWS_OF_LAYERS)
        if self.json and self.show != "shapes":
            raise ConfigError(
                f"job.show={self.show} has no effect with job.json=true, which gives every column."
            )


@dataclass
class LogConfig:
    """How the command tells of a run while it goes on."""

    json: bool = False
    """One JSON object a line on stderr, in place of the text and the bar for people."""


@dataclass
class StatsConfig:
    """What job=stats keeps of each layer."""

    observation: str = "image"
    """image: one observation for each image, its whole tensor; position: one observation of C
    features for each position of a map, or each token."""
    covariance: str = "full"
    """full keeps the D x D scatter matrix (D up to 16384), diagonal only the variances."""
    reference: str | None = None
    """Another stats.h5, or its folder. The Fréchet distance to it is printed for every layer that
    both have."""

    def __post_init__(self) -> None:
        check_choice("stats.observation", self.observation, ("image", "position"))
        check_choice("stats.covariance", self.covariance, ("full", "diagonal"))
        if self.reference is not None and self.covariance != "full":
            raise ConfigError("stats.reference needs covariances, so stats.covariance=full.")


@dataclass
class VerifyConfig:
    """How job=verify looks at a store."""

    reextract_rows: int = 0
    """Number of random rows that are extracted from their images again and compared."""
    repair: bool = False
    """Quarantine what is damaged and extract those rows again."""

    def __post_init__(self) -> None:
        if self.reextract_rows < 0:
            raise ConfigError(
                f"verify.reextract_rows={self.reextract_rows}: expected 0 or more rows."
            )


@dataclass
class BenchConfig:
    """What job=bench measures."""

    num_images: int = 512
    """Number of images of each run: photographs made for it, or the first ones of data=folder."""
    runs: int = 3
    """Number of rounds; in each, every contender runs once, in turn."""

    def __post_init__(self) -> None:
        for key in ("num_images", "runs"):
            if getattr(self, key) < 1:
                raise ConfigError(f"bench.{key}={getattr(self, key)}: expected at least 1.")
