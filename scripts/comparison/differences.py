"""What differs between two folders that commands have written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from comparison.contents import read_values

NOT_COMPARED = (
    # Locks, heartbeats and caches of a run, and states of files, which contain times.
    "*/.lock*", "*/workers/*", "*/images.h5:tag", "*/stats-images.h5:tag", "*/jobs/*",
    # Times of the images of data=sample, which are those of the checkout.
    "*/sample/images.h5:mtime_ns",
    # Times, rates, memory, free space, and what a run concludes of them.
    "*:*seconds*", "*:*per_second*", "*:*_age_s", "*:*share_of_trial", "*:*below_trial",
    "*:*bottleneck", "*:*memory_mib", "*:*.ms", "*:*.own_ms", "*:*.disk_free", "*:*finished",
    "*:*.request", "*.prom*",
    # Versions, and digests of what is compared entry by entry.
    "*:*versions.*", "*.json:.sha256", "*@manifest.sha256", "*@text_checksums",
)  # fmt: skip
"""Files, and values of files after a colon, that may differ between two runs of one checkout."""


def compare_folders(first: Path, second: Path, ignored: Sequence[str] = ()) -> list[str]:
    """Return what differs between two folders, a line for each value but those of patterns."""
    skipped = (*NOT_COMPARED, *ignored)
    files = [_files(folder) for folder in (first, second)]
    lines = []
    for name in sorted(files[0].keys() | files[1].keys()):
        if any(fnmatch(f"/{name}", pattern) for pattern in skipped):
            continue
        if name not in files[0] or name not in files[1]:
            lines.append(f"{name}: only {'A' if name in files[0] else 'B'} has it")
        else:
            lines += compare_files(files[0][name], files[1][name], name, skipped)
    return lines


def _files(folder: Path) -> dict[str, Path]:
    """Files below a folder by name, those of TensorBoard without time, host and process."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if not path.is_dir()}
    time = r"tfevents\..*?(?=\.graph|$)"
    return {re.sub(time, "tfevents", str(name)): path for name, path in found.items()}


def compare_files(first: Path, second: Path, name: str, skipped: Sequence[str]) -> list[str]:
    """Return what differs between two files, a line for each value."""
    if first.read_bytes() == second.read_bytes():
        return []
    values = []
    for path, side in ((first, "A"), (second, "B")):
        try:
            values.append(dict(read_values(path)))
        except Exception as error:  # noqa: BLE001 - a file that the case has damaged
            return [f"{name}: cannot be read in {side}: {error!r}"]
    lines = []
    for key in dict.fromkeys([*values[0], *values[1]]):
        if any(fnmatch(f"/{name}:{key}", pattern) for pattern in skipped):
            continue
        if key not in values[0] or key not in values[1]:
            lines.append(f"{name}:{key}: only {'A' if key in values[0] else 'B'} has it")
        elif difference := compare_values(values[0][key], values[1][key]):
            lines.append(f"{name}:{key}: {difference}")
    return lines


def compare_values(first: Any, second: Any) -> str:
    """Return how two values differ, and nothing if they are equal bit for bit."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return _compare_arrays(first, second)
    if isinstance(first, list) and isinstance(second, list):
        return _compare_words(first, second)
    if isinstance(first, bytes) and isinstance(second, bytes) and first != second:
        at = _first_that_differs(first, second)
        return f"{len(first)} -> {len(second)} bytes, the first that differs at {at}"
    if repr(first) == repr(second):
        return ""
    return f"{_short(first)} -> {_short(second)}"


def _compare_arrays(first: np.ndarray, second: np.ndarray) -> str:
    if first.dtype.kind in "UOS" and first.dtype.kind == second.dtype.kind:
        kinds = [first.shape, second.shape]  # texts have the width of the longest one
        same = first.tolist() == second.tolist()
    else:
        kinds = [(str(x.dtype), x.shape) for x in (first, second)]
        same = first.tobytes() == second.tobytes()
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} -> {kinds[1]}"
    if same:
        return ""
    differ = first != second
    if first.dtype.kind == "f":
        differ &= ~(np.isnan(first) & np.isnan(second))
    if not differ.any():
        return "NaN or zero has other bits"
    place = tuple(int(i) for i in np.argwhere(differ)[0])
    largest = ""
    try:
        a, b = (x[differ].astype(np.float64) for x in (first, second))
        apart = np.abs(a - b)
        if not np.isnan(apart).all():
            largest = f" by up to {np.nanmax(apart):.3g}"
    except (TypeError, ValueError):  # texts
        pass
    return (
        f"{np.count_nonzero(differ)} of {differ.size} differ{largest}, the first at {place}: "
        f"{_short(first[place])} -> {_short(second[place])}"
    )


def _compare_words(first: list[str], second: list[str]) -> str:
    if first == second:
        return ""
    at = _first_that_differs(first, second)
    return " -> ".join(_short(" ".join(x[max(0, at - 3) : at + 12])) for x in (first, second))


def _first_that_differs(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _short(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 160 else f"{text[:157]}..."
