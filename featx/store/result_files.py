"""JSON files of results in the folder of a store: each has the SHA-256 of its own content.

A flipped digit in probe.json or summary.json is as wrong as one in a feature, and no checksum of
HDF5 covers it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from featx.base import digest
from featx.errors import StoreError
from featx.store import layout

_CHECKSUM = "sha256"


def result_json(values: Mapping[str, Any], indent: int) -> bytes:
    """Content of a file of results: the values, and the SHA-256 of them as the last entry.

    Args:
        values: JSON types.
        indent: spaces per level.
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    sealed = {**values, _CHECKSUM: digest(json.loads(text))}
    text = json.dumps(sealed, indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogateescape") + b"\n"


def read_result(path: Path) -> dict[str, Any]:
    """Read a file of results.

    Args:
        path: path of the file; one without a checksum is read as it is.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: the file is damaged.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        values = dict(json.loads(data.decode("utf-8", "surrogateescape")))
        is_intact = values.pop(_CHECKSUM, None) in (None, digest(values))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}.") from error
    if not is_intact:
        raise StoreError(
            f"{path} differs from its own sha256: it has changed since it was written. The job "
            "that made it writes it again."
        )
    return values


def result_problems(root: Path) -> Iterator[tuple[Path, str]]:
    """Files of results in the folder of a store that are damaged, each with the problem."""
    for name in (layout.SUMMARY, layout.PROBE, layout.ZEROSHOT):
        path = root / name
        if not path.exists():
            continue
        try:
            values = read_result(path)
        except StoreError as error:
            yield path, str(error).removeprefix(f"{path} ").rstrip(".")
            continue
        if name == layout.PROBE:
            # The probe as a whole is made again, so its description is what a repair sets aside.
            for changed in _changed_files(root, values):
                yield path, f"{changed.name} differs from the sha256 in it"


def _changed_files(root: Path, probe: Mapping[str, Any]) -> Iterator[Path]:
    """Files that probe.json names with a SHA-256, and that differ from it."""
    layers = probe.get("layers", {})
    entries = [probe.get("predictions"), probe.get("few_shot_predictions")]
    entries += [about.get("head") for about in layers.values()]
    for entry in filter(None, entries):
        # Only files that job=probe writes: a stranger's probe.json could name any file.
        path = root / layout.PROBE_HEADS / PurePosixPath(entry["file"]).name
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            yield path
