"""Recognises a command whose store is complete, without loading its model.

The summary of a complete store records a digest of all that decides what a command asks for: its
options, the listing, the versions of packages, the files of the weights by size, time and inode,
and the fingerprints in the store. If a later command has the same digest, loading the model would
only lead to the same fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from featx.base import announce, digest, installed_version, log_message, shown_path
from featx.config import Config, JobConfig, LogConfig, in_this_process, layer_requests
from featx.models import resolve_library
from featx.pipeline.changed_images import image_changes
from featx.pipeline.row_failures import failures_text
from featx.pipeline.run_metrics import RunMetrics, peak_memory_mib
from featx.pipeline.run_summary import data_text
from featx.storage import is_url, parse_path
from featx.store import (
    Manifest,
    changed_states,
    is_listing_of,
    layout,
    listing_identity,
    load_manifest,
    read_packed,
    read_result,
)
from featx.types import Listing, Source, Stateful


class FinishedRun:
    """Recognition of the store that a command has completed, or is about to complete.

    To be created before the weights are loaded, so that a file that is exchanged meanwhile is
    noticed.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        # Path of each file of the weights -> its size, times and inode; None if one does not exist
        # or the config does not say all that decides the values.
        self._weights: dict[str, tuple[int, ...]] | None = None
        files = resolve_library(config.model).weight_files(config.model)
        # Statistics of a reduction are a file that may be written again.
        has_statistics = any(reduce.statistics_path for _, reduce in layer_requests(config))
        if files is None or has_statistics:
            return
        states: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                status = file.expanduser().stat()
            except OSError:
                return
            ids = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            states[str(file.expanduser().absolute())] = ids
        self._weights = states

    def digest(self, manifest: Manifest, listing: Listing) -> str | None:
        """Digest by which a later command recognises that its store is complete.

        None if the config does not say all that decides the values.
        """
        if self._weights is None:
            return None
        versions: dict[str, str] = {}
        for run in manifest.runs:
            versions |= run.header.versions
            versions |= {
                name.removeprefix("version."): str(version)  # of a decoder
                for name, version in run.header.fingerprint.items()
                if name.startswith("version.") and name != "version.cuda"
            }
        if any(installed_version(name) != version for name, version in versions.items()):
            return None
        return digest(
            {
                "command": command_digest(self._config),
                "weights": {path: list(state) for path, state in self._weights.items()},
                "listing": listing_identity(listing),
                "store": manifest.digest,
            }
        )

    def summary(self, list_images: Callable[[], tuple[Source, Listing]]) -> dict[str, Any] | None:
        """Summary of a store for which nothing is left to do, which is described on stderr.

        Nothing is written. Doubt of any kind, such as an image with another modification time,
        gives None: the run then looks at everything.
        """
        config, out = self._config, parse_path(self._config.out)
        changes_store = config.overwrite or config.grow or config.retry_failed
        writes_more = config.refresh is True or config.tensorboard or config.profile
        if changes_store or writes_more or is_url(out):
            return None
        manifest, is_intact = load_manifest(out)
        if manifest is None or not is_intact or (out / layout.OVERWRITE_MARKER).exists():
            return None
        try:
            runs = read_result(out / layout.SUMMARY)["runs"]
            recorded = {run["request"]: run for run in runs if run.get("request")}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # the summary is for people; without it the run looks at everything
        if not recorded:
            return None
        source, listing = list_images()
        entry = recorded.get(self.digest(manifest, listing))
        packed = None if entry is None else read_packed(out, manifest)
        if entry is None or packed is None or not _has_same_images(out, manifest, source, listing):
            return None
        failures, num_bytes = packed
        header = manifest.runs[-1].header
        state = present_rows_text(config, source, listing, len(listing))
        announce(
            [
                ("data", data_text(config.data, listing)),
                ("model", f"{header.model}, weights {header.weights}"),
                ("output", f"{shown_path(out)}, {state}"),
            ]
        )
        if failures:
            log_message(failures_text(failures))
        figures = RunMetrics(seconds={}, images_per_second=None, bytes_read=0, bottleneck=None)
        return {
            **entry,
            **figures.as_dict(),
            "rows": len(listing),
            "failures": len(failures),
            "bytes": num_bytes,
            "underflow_rows": {},
            "peak_memory_mib": peak_memory_mib(),
        }


def present_rows_text(config: Config, source: Source, listing: Listing, done: int) -> str:
    """Say how many rows are in the store, and whether their images are compared."""
    text = f"{done} of {len(listing)} rows are there already"
    if config.refresh is True or (
        isinstance(source, Stateful) and source.states(listing.keys[:1]) is not None
    ):
        return text
    return f"{text}; only refresh=true compares their images, which have no state"


def command_digest(config: Config) -> str:
    """Return the SHA-256 of what a command computes, as hex digits.

    Options on how it computes and reports are left out.
    """
    identifying = replace(
        in_this_process(config),
        job=JobConfig(config.job.name),
        log=LogConfig(),
        max_failures=0.01,
        pack="auto",
    )
    parts = {"config": asdict(identifying), "code": config.model.code_sha256()}
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _has_same_images(out: Path, manifest: Manifest, source: Source, listing: Listing) -> bool:
    """Return whether all images are as they were when the store was last compared with them."""
    if not is_listing_of(out / layout.LISTING, listing):
        return False
    states = source.states(listing.keys) if isinstance(source, Stateful) else None
    if states is not None and changed_states(out / layout.IMAGES, states).any():
        return False
    del states  # `image_changes` asks for them again
    changes = image_changes(source, listing.keys, out, manifest)
    return not (len(changes.rows) or len(changes.gone) or changes.num_unknown)
