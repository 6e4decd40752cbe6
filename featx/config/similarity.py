"""Options of job=similar."""

from __future__ import annotations

from dataclasses import dataclass

from featx.config.checks import check_choice
from featx.errors import ConfigError

METRICS = ("cosine", "euclidean")


@dataclass
class SimilarConfig:
    """What job=similar looks for: the nearest rows of every row where nothing else is asked."""

    key: str | None = None
    """A picture, by its key: only its own nearest rows are looked for, and printed."""
    k: int | None = None
    """How many nearest rows, 10 when not given."""
    metric: str | None = None
    """Of nearest rows: cosine (when not given) or euclidean."""
    recall: float | None = None
    """For very many rows, by faiss (extra faiss, on the CPU): find only this share of the nearest
    rows, such as 0.99, in far less time; the share is measured and told. 1 is exact, as it is when
    not given."""
    duplicates: float | None = None
    """Groups of rows that reach this cosine, such as 0.98, one with the next."""
    cka: bool = False
    """Linear CKA and RSA between the layers."""
    other: str | None = None
    """A second store, for cka: its layers against those of the first, rows matched by key."""
    rows: int | None = None
    """So many random rows for cka, 2000 when not given; all where there are no more."""

    def __post_init__(self) -> None:
        kinds = {"key": self.key is not None, "duplicates": self.duplicates is not None}
        kinds["cka"] = self.cka
        asked = [name for name, given in kinds.items() if given]
        if len(asked) > 1:
            names = " and ".join(f"similar.{name}" for name in asked)
            raise ConfigError(f"{names} are different questions; ask one at a time.")
        kind = asked[0] if asked else ""
        owners = {
            "k": ("", "key"),
            "metric": ("", "key"),
            "recall": ("",),
            "other": ("cka",),
            "rows": ("cka",),
        }
        for key, known in owners.items():
            if getattr(self, key) is not None and kind not in known:
                where = "similar.cka=true only" if known == ("cka",) else "nearest rows only"
                where = "the nearest rows of every row only" if known == ("",) else where
                raise ConfigError(
                    f"similar.{key} has an effect with {where}"
                    + (f", not with similar.{kind}." if kind else ".")
                )
        if self.metric is not None:
            check_choice("similar.metric", self.metric, METRICS)
        if self.k is not None and self.k < 1:
            raise ConfigError(f"similar.k={self.k}: expected at least 1.")
        if self.recall is not None and not 0 < self.recall <= 1:
            raise ConfigError(f"similar.recall={self.recall}: expected a share above 0, up to 1.")
        if self.rows is not None and self.rows < 4:
            raise ConfigError(f"similar.rows={self.rows}: expected at least 4.")
        if self.duplicates is not None and not 0 < self.duplicates <= 1:
            raise ConfigError(
                f"similar.duplicates={self.duplicates}: expected a cosine above 0, up to 1."
            )
