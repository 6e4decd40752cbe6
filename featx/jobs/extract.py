"""job=extract: images -> features on disk. The main job; also featx.extract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featx.config import Config
from featx.errors import EXIT_TOO_MANY_FAILURES
from featx.extraction import run_extraction
from featx.keys import from_keywords, from_omegaconf, saved_yaml
from featx.progress import complain, describe_end, say
from featx.store import layout
from featx.store.reader import FeatureStore


def extract(**keys: Any) -> FeatureStore:
    """Run the main job from Python: the same keys as the command's, the same store.

        store = featx.extract(model="resnet50", layers=["layer4"], data="photos/", out="runs/p")

    Args:
        keys: every key of the command (`featx --help`). Short forms: `model` a name, `data` a
            folder or the name of a packaged data set, `reduce` a name; each also takes a mapping,
            such as `model={"name": "resnet50", "weights": None}`.

    Returns:
        The store, open for reading. Failed images are rows of NaN with their status; see
        `store.failures`, also when there are more than `max_failures`.

    Raises:
        FeatxError: whatever the command would report with exit code 1 or 2.
    """
    node = from_keywords(keys)
    config = from_omegaconf(node)
    summary = run_extraction(config, saved_yaml(node))
    say(describe_end(summary, config.out))
    return FeatureStore(Path(config.out).expanduser())


def run(config: Config, config_yaml: str) -> int:
    """The command's job: extract, say what happened, return the exit code."""
    summary = run_extraction(config, config_yaml)
    say(describe_end(summary, config.out))
    num_rows, num_failed = summary["rows"], summary["failures"]
    allowed = config.allowed_failures(num_rows)
    if num_failed > allowed or num_failed == num_rows:
        complain(
            f"{num_failed} of {num_rows} images failed, more than max_failures="
            f"{config.max_failures:g} ({allowed} images). Their rows are NaN with a status; "
            f"see {Path(config.out) / layout.FAILURES_CSV}."
        )
        return EXIT_TOO_MANY_FAILURES
    return 0
