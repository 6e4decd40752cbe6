"""job=probe: predictions of labels by simple methods on the features of a store."""

from __future__ import annotations

from collections.abc import Collection
from typing import Unpack

from featx.base import is_notebook, log_message, log_step
from featx.config import Config, ProbeConfig, listed_stores
from featx.errors import ConfigError
from featx.jobs.base import JOBS, Input, Job, config_of_store_call, print_summary, with_keywords
from featx.jobs.keywords import ProbeOptions
from featx.types import Json


@with_keywords(ProbeOptions)
def probe(store: object = None, /, **keys: Unpack[ProbeOptions]) -> Json:
    """Run job=probe from Python, with the options of the command and the same files.

        featx.probe("runs/p", layers=["layer4"], probe={"folds": 5})["accuracy"]

    Args:
        store: path of the store, or an open one.
        probe: a mapping of the options of the group.

    Returns:
        The contents of `probe.json`, which docs/probe.md describes.

    Raises:
        FeatxError: an error that the command would report with exit code 1 or 2.
    """
    config = config_of_store_call("probe", keys, store)
    from featx.analysis.probe import run_probe  # which imports torch

    return run_probe(config, log_step if is_notebook() else log_message)


def run(config: Config, config_yaml: str) -> int:
    """Fit and test the classifiers and print the best layer; returns the exit code 0."""
    config.store_path()  # reports a missing store before torch is imported
    from featx.analysis.probe import probe_sections, run_probe  # which import torch

    result = run_probe(config, log_message)
    print_summary(config, result, *probe_sections(result, config.job.show == "all"))
    return 0


def _reads_with(config: Config) -> Collection[str]:
    """Return the options of where the images are, whose sizes are compared with their masks."""
    return () if config.probe.masks is None else ("data.name", "data.root")


def _check(config: Config) -> None:
    """Refuse more stores than are compared."""
    stores = listed_stores(config.store or "")
    if len(stores) > 2 or (len(stores) > 1 and config.probe.masks is not None):
        raise ConfigError(
            f"store={config.store}: job=probe compares the classes of images in two stores."
        )


JOBS.register(
    Job(
        "probe",
        "Fit and test classifiers on the features of a labelled store.",
        ProbeConfig,
        run=run,
        input=Input.STORE_OR_OUT,
        reads=("job.json", "layers", "device", "seed"),
        reads_with=_reads_with,
        shows=("all",),
        check=_check,
        takes_several_stores=True,
    )
)
