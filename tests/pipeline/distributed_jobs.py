"""Jobs with the tiny model in several processes, and what they made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from made_store import dataset_digests
from tiny_model import SIX_PARTS, run_job

import featx

JOBS = ("stats", "attribute")
"""Jobs other than job=extract."""

_ATTRIBUTE: dict[str, Any] = {**SIX_PARTS, "layers": "deep"}
_ATTRIBUTE["attribute"] = {
    "method": ["gradcam", "saliency"], "feature_map_layer": "conv", "per_class": 1,
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "extract": SIX_PARTS,
    "stats": {**SIX_PARTS, "layers": ["conv", "deep"], "stats": {"observation": "position"}},
    "attribute": _ATTRIBUTE,
}
OVERRIDES = {
    "extract": ("layers=[conv]",),
    "stats": ("job=stats", "layers=[conv,deep]", "stats.observation=position"),
    "attribute": ("job=attribute", "attribute.method=[gradcam,saliency]", "layers=deep",
                  "attribute.feature_map_layer=conv", "attribute.per_class=1"),
}  # fmt: skip
"""The same for the command, beside tiny_model.COMMAND without its layers."""


def run(job: str, data: Path, out: str = "store", **keys: Any) -> int:
    """The exit code of a job on the images of a folder."""
    return run_job(job, **{**OPTIONS[job], "data": data, "out": out, **keys})


def made(job: str, out: str = "store") -> dict[str, Any]:
    """Everything that has to be the same however the job was spread."""
    root = Path(out)
    if job != "stats":
        images = {path.name: path.read_bytes() for path in root.glob("sheets/*")}
        return {**dataset_digests(root), **images}
    statistics = featx.open_stats(root)
    numbers = {
        name: (statistics[name].sha256, statistics[name].smallest.tolist()) for name in statistics
    }
    return {**numbers, "settings": statistics.settings, "failures": failures(root)}


def failures(root: Path) -> str:
    return (root / "stats-failures.csv").read_text()


def parts_done(job: str, root: Path) -> int:
    """Parts of four rows, by the names of the files alone."""
    if job != "stats":
        return len(list((root / "parts").glob("part-*.h5")))
    spans = [path.stem.split("-")[1:] for path in (root / "stats-parts").glob("rows-*.h5")]
    return sum(-(-(int(stop) - int(start)) // 4) for start, stop in spans)
