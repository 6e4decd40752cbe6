"""job=export: a store in another format, with the same rows, order and keys."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Unpack

from featx.base import size_text
from featx.config import Config, ExportConfig
from featx.errors import counted
from featx.export import run_export
from featx.jobs.base import JOBS, Input, Job, config_of_store_call, print_summary, with_keywords
from featx.jobs.keywords import ExportOptions


@with_keywords(ExportOptions)
def export_store(store: object = None, /, **keys: Unpack[ExportOptions]) -> Path:
    """Run job=export from Python, with the options of the command and the same files.

        featx.export_store("runs/p", export={"format": "parquet"}, out="exports/p")

    Args:
        store: path of the store, or an open one.
        export: a mapping, such as `{"format": "parquet"}`.
        out: folder of the export; the default stands for one in the store.

    Returns:
        The folder of the export.

    Raises:
        FeatxError: an error that the command would report with exit code 1 or 2.
    """
    config = config_of_store_call("export", keys, store)
    return Path(run_export(config)["folder"])


def run(config: Config, config_yaml: str) -> int:
    """Write the export and print how to open it; returns the exit code 0."""
    summary = run_export(config)
    rows = f"{summary['rows']}"
    if failed := summary["failures"]:
        rows += f", {failed} of them failed: NaN"
    if left_out := summary["left_out"]:
        rows += f"; {counted(left_out, 'row', 'rows')} without features left out"
    about = [
        ("format", summary["format"]),
        ("layers", ", ".join(summary["layers"])),
        ("columns", ", ".join(summary["columns"]) or None),
        ("rows", rows),
        ("files", f"{summary['files']}, {size_text(summary['bytes'])}"),
        ("seconds", "already complete" if summary["already"] else f"{summary['seconds']:.1f}"),
        ("folder", summary["folder"]),
    ]
    print_summary(config, summary, about, summary["opening"])
    return 0


def _reads_with(config: Config) -> Collection[str]:
    """Return the measure of an index, or where the images are if the export has images."""
    if config.export.format == "faiss":
        return ("neighbors.metric",)
    has_images = config.export.format in ("webdataset", "fiftyone")
    return ("data.name", "data.root") if has_images else ()


JOBS.register(
    Job(
        "export",
        "Write a store in another format, such as Parquet or Zarr.",
        ExportConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "overwrite"),
        reads_with=_reads_with,
        reads_when={"neighbors.metric": "job=export export.format=faiss"},
    )
)
