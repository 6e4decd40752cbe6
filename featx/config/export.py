"""Options of job=export."""

from __future__ import annotations

import math
from dataclasses import dataclass

from featx.config.checks import check_choice
from featx.errors import ConfigError

EXPORTS = (
    "npy",
    "parquet",
    "safetensors",
    "zarr",
    "webdataset",
    "projector",
    "huggingface",
)
IN_SHARDS = ("parquet", "safetensors", "webdataset", "huggingface")


@dataclass
class ExportConfig:
    """What job=export writes."""

    format: str = "npy"
    """npy (one array a layer), parquet, safetensors, zarr, webdataset (pictures and features),
    projector (TensorBoard's vectors.tsv and metadata.tsv) or huggingface (a data set on disk)."""
    ok_only: bool = False
    """Leave failed rows out; else they are there with their status, and their features are NaN."""
    incomplete: bool = False
    """Export a store that is not complete, with NaN and status 255 where rows are not there yet."""
    shard_gib: float | None = None
    """Size of one file of parquet, safetensors, webdataset and huggingface, at the most; 1 when not
    given. Of webdataset it is estimated."""

    def __post_init__(self) -> None:
        check_choice("export.format", self.format, EXPORTS)
        if self.shard_gib is not None:
            if self.format not in IN_SHARDS:
                raise ConfigError(
                    f"export.shard_gib has an effect with export.format={' or '.join(IN_SHARDS)} "
                    f"only, now {self.format}."
                )
            if not 0 < self.shard_gib < math.inf:
                raise ConfigError(f"export.shard_gib={self.shard_gib}: expected more than 0.")

    @property
    def shard_bytes(self) -> int:
        """The key `shard_gib` in bytes."""
        return int((1.0 if self.shard_gib is None else self.shard_gib) * (1 << 30))
