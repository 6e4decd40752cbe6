"""job=report: a store as one HTML page without other files."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from featx.base import is_notebook, log_message, log_step, size_text
from featx.config import Config, ReportConfig
from featx.jobs.base import JOBS, Input, Job, config_of_store_call, print_summary, with_keywords
from featx.jobs.keywords import ReportOptions


@with_keywords(ReportOptions)
def write_report(store: object = None, /, **keys: Unpack[ReportOptions]) -> Path:
    """Run job=report from Python, with the options of the command and the same page.

        featx.write_report("runs/p", out="p.html")

    Args:
        store: path of the store, or an open one; in a list, the others are compared with the first.
        data: folder of the images, if they have moved.
        out: folder or HTML file of the page; the default stands for the folder of the store.
        report: a mapping of the options of the group.

    Returns:
        The HTML file.

    Raises:
        FeatxError: an error that the command would report with exit code 1 or 2.
    """
    from featx.export.report import run_report  # which imports torch

    config = config_of_store_call("report", keys, store)
    # In a notebook, what is printed on stderr looks like an error.
    log = log_step if is_notebook() else log_message
    return Path(run_report(config, log)["file"])


def run(config: Config, config_yaml: str) -> int:
    """Write the page and print where it is; returns the exit code 0."""
    from featx.export.report import run_report  # which imports torch

    summary = run_report(config, log_message)
    thumbnails = str(summary["thumbnails"])
    if undecoded := summary["thumbnails_not_decoded"]:
        thumbnails += f"; {undecoded} cannot be decoded now"
    if why := summary["without_thumbnails"]:
        thumbnails = f"none: {why}"
    rows = [
        ("layers", ", ".join(summary["layers"])),
        ("rows", f"{summary['rows_used']} used"),
        ("thumbnails", thumbnails),
        ("warning", None if summary["complete"] else "the store is not complete"),
        ("seconds", f"{summary['seconds']:.1f}"),
        ("size", size_text(summary["bytes"])),
        ("file", summary["file"]),
    ]
    print_summary(config, summary, rows)
    return 0


JOBS.register(
    Job(
        "report",
        "Write a store as one HTML page.",
        ReportConfig,
        extra="report",
        run=run,
        input=Input.STORE,
        reads=("job.json", "out", "layers", "device", "seed", "data.name", "data.root"),
        takes_several_stores=True,
    )
)
