"""job=zeroshot: a classifier of class names for the features of a CLIP model."""

from __future__ import annotations

from typing import Any

from featx.base import command_text, facts, percent_text, shown_path
from featx.config import Config, ZeroshotConfig
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.storage import parse_path

_LISTED = 5
"""Number of classes that a line names."""


def run(config: Config, config_yaml: str) -> int:
    """Make the head, write it and print what it does on the store; returns the exit code 0."""
    config.store_path()  # reports a missing store before torch is imported
    from featx.analysis import run_zeroshot  # which imports torch

    result = run_zeroshot(config)
    print_summary(config, result, _text(result))
    return 0


def _text(result: dict[str, Any]) -> str:
    """Format the result for people."""
    head = shown_path(parse_path(result["head"]))
    templates = result["templates"]
    texts = templates if isinstance(templates, str) else templates[0]
    more = result["num_templates"] - 1
    return facts(
        [
            ("model", f"{result['model']}, weights {result['weights']}"),
            ("classes", _names_text(result["names"])),
            ("texts", f"{texts}{f', and {more} more' if more and texts != templates else ''}"),
            *_accuracy_lines(result),
            ("head", head),
            ("next", command_text("job=predict", f"store={head}", "data=./new")),
        ]
    )


def _accuracy_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of the accuracy over the rows of the store."""
    if result["accuracy"] is None:
        return [("accuracy", "not known: no row has the label of one of these classes")]
    worst = sorted(result["per_class"].items(), key=lambda pair: pair[1])[:_LISTED]
    each = ", ".join(f"{name} {percent_text(share)}" for name, share in worst)
    return [
        (
            "accuracy",
            f"{percent_text(result['accuracy'])} of {result['rows']} rows; "
            f"the most frequent class has {percent_text(result['chance'])}",
        ),
        ("worst", each),
    ]


def _names_text(names: list[str]) -> str:
    """Return the number of names and the first of them."""
    return f"{len(names)}: {', '.join(names[:_LISTED])}{', ...' if names[_LISTED:] else ''}"


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
