"""job=zeroshot: a classifier of class names for the features of a CLIP model."""

from __future__ import annotations

from featx.base import command_text, percent_text, shown_path
from featx.config import Config, ZeroshotConfig
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.jobs.similarity_files import open_input
from featx.storage import parse_path

_LISTED = 5
"""Number of classes that a line names."""


def run(config: Config, config_yaml: str) -> int:
    """Make the head, write it and print what it does on the store; returns the exit code 0."""
    store = open_input(config.store_path())
    from featx.analysis import run_zeroshot  # which imports torch

    result = run_zeroshot(config, store)
    head, names = shown_path(parse_path(result["head"])), result["names"]
    templates, more = result["templates"], result["num_templates"] - 1
    texts = templates if isinstance(templates, str) else templates[0]
    classes = f"{len(names)}: {', '.join(names[:_LISTED])}"
    if len(names) > _LISTED:
        classes += ", ..."
    if more and texts != templates:
        texts += f", and {more} more"
    accuracy, worst = "not known: no row has the label of one of these classes", None
    if result["accuracy"] is not None:
        accuracy = (
            f"{percent_text(result['accuracy'])} of {result['rows']} rows; "
            f"the most frequent class has {percent_text(result['chance'])}"
        )
        shares = sorted(result["per_class"].items(), key=lambda pair: pair[1])[:_LISTED]
        worst = ", ".join(f"{name} {percent_text(share)}" for name, share in shares)
    rows = [
        ("model", f"{result['model']}, weights {result['weights']}"),
        ("classes", classes),
        ("texts", texts),
        ("accuracy", accuracy),
        ("worst", worst),
        ("head", head),
        ("next", command_text("job=predict", f"store={head}", "data=./new")),
    ]
    print_summary(config, result, rows)
    return 0


JOBS.register(
    Job(
        "zeroshot",
        "Make a classifier of class names for the features of a CLIP model.",
        ZeroshotConfig,
        run=run,
        input=Input.STORE,
        reads=("job.json", "device"),
        why="it reads the embedding of an existing store; the model is that of the store",
    )
)
