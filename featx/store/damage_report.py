"""Problems found in a store, and the report of its verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featx.types import Failure


@dataclass(frozen=True)
class Damage:
    """Problem found in a store.

    Attributes:
        path: path of the file.
        what: description of the problem.
        start: first row of the store that is affected.
        stop: row after the last one; equal to `start` if no features are affected.
        layer: only layer that is affected, or None for all.
    """

    path: Path
    what: str
    start: int = 0
    stop: int = 0
    layer: str | None = None


@dataclass
class DamageReport:
    """Result of checking a store.

    Attributes:
        root: folder or file that was checked.
        num_rows: number of rows of the listing.
        num_files: number of checked files.
        num_chunks: number of chunks that were compared with their checksums.
        num_bytes: size of these chunks when decoded, in bytes.
        missing: file names of missing parts.
        damages: problems that were found.
        failures: row -> failure, of all files that were read.
    """

    root: Path
    num_rows: int = 0
    num_files: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    missing: list[str] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and nothing is damaged."""
        return not self.missing and not self.damages

    def as_dict(self) -> dict[str, Any]:
        """Content of the report as JSON types."""
        return {
            "store": str(self.root),
            "complete": self.complete,
            "rows": self.num_rows,
            "files": self.num_files,
            "chunks": self.num_chunks,
            "bytes": self.num_bytes,
            "missing": self.missing,
            "damages": [
                {"file": d.path.name, "what": d.what, "rows": [d.start, d.stop]}
                for d in self.damages
            ],
        }
