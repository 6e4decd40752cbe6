"""job=extract: images -> features on disk. The main job; also featx.extract."""

from __future__ import annotations

from typing import Any

from featx.analysis.engine_specs import FEATURES
from featx.base.console import print_result
from featx.config.run_config import Config
from featx.config.saved_config import saved_yaml
from featx.config.schema import from_keywords, from_omegaconf, given_keywords, without_object
from featx.export.tensorboard.events import RunEvents, require_tensorboard
from featx.pipeline.extraction import run_extraction, store_exit_code
from featx.pipeline.run_summary import describe_end
from featx.sources import source_of
from featx.store.reader import FeatureStore
from featx.types import Source


def extract(**keys: Any) -> FeatureStore:
    """Run the main job from Python: the same keys as the command's, the same store.

        store = featx.extract(model="resnet50", layers=["layer4"], data="photos/", out="runs/p")

    Args:
        keys: every key of the command (`featx --help`). Short forms: `model` a name, `data` a
            folder or the name of a packaged data set, `reduce` a name; each also takes a mapping,
            such as `model={"name": "resnet50", "weights": None}`. `data` also takes a map-style
            data set of your own or a `Source` (docs/data.md), beside other keys of the group as
            `data={"source": dataset, "limit": 100}`.

    Returns:
        The store, open for reading. Failed images are rows of NaN with their status; see
        `store.failures`, also when there are more than `max_failures`.

    Raises:
        FeatxError: whatever the command would report with exit code 1 or 2.
    """
    keys, given = without_object(keys)
    node = from_keywords(keys)
    config = from_omegaconf(node, given_keywords(keys))
    source = None if given is None else source_of(given)
    summary = _run(config, saved_yaml(node), source)
    print_result(describe_end(summary, config.out))
    return FeatureStore(config.out)


def run(config: Config, config_yaml: str) -> int:
    """The command's job: extract, say what happened, return the exit code."""
    summary = _run(config, config_yaml)
    print_result(describe_end(summary, config.out))
    return store_exit_code(config, summary)


def _run(config: Config, config_yaml: str, source: Source | None = None) -> dict[str, Any]:
    """The summary of a run, which TensorBoard follows where it is asked to."""
    if config.tensorboard:
        require_tensorboard()
    observe = RunEvents if config.tensorboard else None
    return run_extraction(config, config_yaml, FEATURES, observe=observe, source=source)
