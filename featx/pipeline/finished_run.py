"""Recognises a command whose store is complete, without loading its model.

The summary of a complete store records a digest of all that decides what a command asks for: its
options, the listing, the versions of packages, the files of the weights by size, time and inode,
and the fingerprints in the store. If a later command has the same digest, loading the model would
only lead to the same fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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
from featx.types import Listing, Source, Stateful, StoreHeader

FileStates = dict[str, tuple[int, int, int, int]]
"""Path -> (size in bytes, modification and change time in ns, inode)."""


def weight_states(config: Config) -> FileStates | None:
    """Return the states of the files that decide the weights; None if they are not known.

    To be called before the weights are loaded, so that a file that is exchanged meanwhile is
    noticed.
    """
    files = resolve_library(config.model).weight_files(config.model)
    return None if files is None else _states(files)


def request_digest(
    config: Config, manifest: Manifest, listing: Listing, states: FileStates | None
) -> str | None:
    """Return the digest by which a later command recognises that its store is complete.

    Returns:
        hex digest; None if the config does not say all that decides the values.
    """
    # Statistics of a reduction are a file that may be written again.
    reads_statistics = any(reduce.statistics_path for _, reduce in layer_requests(config))
    if states is None or reads_statistics:
        return None
    versions = {name: version for run in manifest.runs for name, version in _versions(run.header)}
    if any(installed_version(name) != version for name, version in versions.items()):
        return None
    return digest(
        {
            "command": command_digest(config),
            "weights": {path: list(state) for path, state in states.items()},
            "listing": listing_identity(listing),
            "store": manifest.digest,
        }
    )


def finished_summary(
    config: Config,
    list_images: Callable[[], tuple[Source, Listing]],
    states: FileStates | None,
) -> dict[str, Any] | None:
    """Return the summary of a store for which nothing is left to do, and describe it on stderr.

    Nothing is written. Doubt of any kind, such as an image with another modification time, gives
    None: the run then looks at everything.
    """
    out = parse_path(config.out)
    changes_store = config.overwrite or config.grow or config.refresh or config.retry_failed
    if changes_store or config.tensorboard or config.profile or is_url(out):
        return None
    manifest, is_intact = load_manifest(out)
    recorded = _recorded(out)
    if (
        manifest is None
        or not is_intact
        or not recorded
        or (out / layout.OVERWRITE_MARKER).exists()
    ):
        return None
    source, listing = list_images()
    entry = recorded.get(request_digest(config, manifest, listing, states))
    packed = None if entry is None else read_packed(out, manifest)
    if entry is None or packed is None or not _has_same_images(out, manifest, source, listing):
        return None
    header = manifest.runs[-1].header
    settings = [
        ("data", data_text(config, listing)),
        ("model", f"{header.model}, weights {header.weights}"),
        ("output", f"{shown_path(out)}, {len(listing)} of {len(listing)} rows are there already"),
    ]
    announce(settings, settings)
    if packed.failures:
        log_message(failures_text(packed.failures))
    return {
        **entry,
        **RunMetrics(seconds={}, images_per_second=None, bytes_read=0, bottleneck=None).as_dict(),
        "rows": len(listing),
        "failures": len(packed.failures),
        "bytes": packed.num_bytes,
        "underflow_rows": {},
        "peak_memory_mib": peak_memory_mib(),
    }


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


def _recorded(out: Path) -> dict[str | None, Mapping[str, Any]]:
    """Digests in the summary of a store, each with the summary of its run."""
    try:
        runs = read_result(out / layout.SUMMARY)["runs"]
        return {run["request"]: run for run in runs if run.get("request")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # the summary is for people; without it the run looks at everything


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


def _versions(header: StoreHeader) -> list[tuple[str, str]]:
    """Packages and their versions that a run of a store records."""
    of_decoders = {
        name.removeprefix("version."): str(version)
        for name, version in header.fingerprint.items()
        if name.startswith("version.") and name != "version.cuda"
    }
    return list({**header.versions, **of_decoders}.items())


def _states(files: Sequence[Path]) -> FileStates | None:
    """States of some files; None if one of them does not exist."""
    states = {}
    for file in files:
        try:
            status = file.expanduser().stat()
        except OSError:
            return None
        ids = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        states[str(file.expanduser().absolute())] = ids
    return states
