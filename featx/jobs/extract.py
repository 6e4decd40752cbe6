"""job=extract: features of images in a store; also featx.extract."""

from __future__ import annotations

from typing import Unpack

from featx.analysis import FEATURES
from featx.base import announcements, is_notebook, log_message, print_result
from featx.config import Config
from featx.export.tensorboard import RunEvents, require_tensorboard
from featx.jobs.base import JOBS, RUN_OPTIONS, Input, Job, call_of_job, with_keywords
from featx.jobs.keywords import ExtractOptions
from featx.pipeline import describe_end, run_extraction, store_exit_code
from featx.store import FeatureStore
from featx.types import Source


@with_keywords(ExtractOptions)
def extract(
    data: object = None, /, *, verbose: bool | None = None, **keys: Unpack[ExtractOptions]
) -> FeatureStore:
    """Run job=extract from Python, with the options of the command and the same store.

        store = featx.extract("photos/", model="resnet50", layers=["layer4"], out="runs/p")

    Keywords without an entry here are described by `featx job=extract --help`. An option of a group
    may be a keyword, too: `data_limit=10`.

    Args:
        data: the images: a folder or another path, the name of a source (`"table"` with
            `data_root="photos.csv"`; `"textiles"` needs no other option), a list of paths (which
            are the keys, and sorted), arrays or Pillow images, a DataFrame or table with the column
            path and perhaps label, a map-style data set of (image, label) or of dicts with these
            keys, or a `Source` (docs/data.md). With other options of the group,
            `data={"root": "photos/", "limit": 100}` or `data={"source": dataset, "limit": 100}`.
        verbose: whether the settings are printed before the run, and a summary after it; None
            prints them except in a notebook, which shows a progress bar and what is returned.
        model: a name of torchvision or timm, whose weights bring their preprocessing; a
            `torch.nn.Module` or a function that returns one, which is used in eval mode, given back
            as it was, and fed with 224 of 256 pixels, normalised as for ImageNet; or a mapping
            (docs/models.md), such as `{"name": "resnet50", "weights": "mine.pth"}`,
            `{"library": "timm", "name": "resnet50"}` or
            `{"factory": net, "transform": {"resize": 64, "crop": 64}}`.
        layers: a name, a glob or a preset, a list of them, or a mapping to reductions, such as
            `{"layer4": "avg", "avgpool": "flatten"}`; None is "embedding", the vector before the
            classifier.
        reduce: a name, or a mapping, such as `{"name": "grid", "size": 4}`.

    Returns:
        The store, open for reading. Failed images are rows of NaN with their status; see
        `store.failures`, also when there are more than `max_failures`.

    Raises:
        FeatxError: an error that the command would report with exit code 1 or 2.
    """
    is_verbose = not is_notebook() if verbose is None else verbose
    with call_of_job("extract", keys, data) as call, announcements(is_verbose):
        config, config_yaml, source = call
        summary = _run(config, config_yaml, source)
    if is_verbose:
        print_result(describe_end(summary, config.out))
    if summary["failures"] == summary["rows"]:
        reason = f"all images failed ({summary['rows']}), so no row of the store has features"
        log_message(f"{reason}; see featx.open(...).failures.", level="warning")
    return FeatureStore(config.out)


def run(config: Config, config_yaml: str) -> int:
    """Extract the features and print a summary; returns the exit code."""
    summary = _run(config, config_yaml)
    print_result(describe_end(summary, config.out))
    return store_exit_code(config, summary)


def _run(config: Config, config_yaml: str, source: Source | None = None) -> dict[str, object]:
    """Run the extraction, observed by TensorBoard if requested, and return its summary."""
    if config.tensorboard:
        require_tensorboard()
    observe = RunEvents if config.tensorboard else None
    return run_extraction(config, config_yaml, FEATURES, observe=observe, source=source)


JOBS.register(
    Job(
        "extract",
        "Extract features of images into a store.",
        run=run,
        input=Input.IMAGES,
        reads=(
            *RUN_OPTIONS,
            *("executor", "retry_failed", "refresh", "log.metrics", "tensorboard", "profile"),
        ),
        makes_store=True,
    )
)
