"""Speed of the runs of a store, from summary.json and the modification times of its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featx.store import FeatureStore, layout, load_manifest, read_result

STAGES = {
    "read": "reading the files, all decoders together",
    "decode": "decoding and resizing, all decoders together",
    "wait": "the model waited for images",
    "model": "the forward passes",
    "copy": "values from the device",
    "statistics": "summing up",
    "write": "building and committing parts",
    "pack": "the parts into one file",
}
"""Stage of a run -> its description."""

_NUMBERS = ("images_per_second", "share_of_trial", "peak_memory_mib")
"""Entries of a run in summary.json that are numbers or absent."""


@dataclass(frozen=True)
class Speed:
    """Speed of the runs of a store.

    `parts` has (minutes since the first part, rows so far), by modification times; the two other
    texts say why there are no runs or parts.
    """

    runs: list[Mapping[str, Any]]
    missing: str
    parts: list[tuple[float, int]]
    parts_missing: str


def speed_of(store: FeatureStore) -> Speed:
    """Collect the speed of a store's runs."""
    if store.root.is_file():
        alone = "A single file records no times; summary.json is in the folder of the store."
        return Speed([], alone, [], "")
    runs, missing = _runs(store)
    parts, parts_missing = _parts(store)
    return Speed(runs, missing, parts, parts_missing)


def _runs(store: FeatureStore) -> tuple[list[Mapping[str, Any]], str]:
    """Read summary.json; returns the runs, and the reason if there are none."""
    try:
        runs = read_result(store.root / layout.SUMMARY)["runs"]
        for run in runs:
            numbers = [*run["seconds"].values(), *(run.get(name) for name in _NUMBERS)]
            sum(0.0 if number is None else float(number) for number in numbers)
        return runs, ""
    except FileNotFoundError:
        return [], "There is no summary.json yet: a run writes it when it ends."
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [], f"summary.json cannot be read: {error}."


def _parts(store: FeatureStore) -> tuple[list[tuple[float, int]], str]:
    """Read the modification times of parts; returns the curve, and the reason if there is none."""
    manifest, _ = load_manifest(store.root)
    parts = [part for run in manifest.runs for part in run.parts()] if manifest else []
    times = []
    for part in parts:
        path = store.root / layout.PARTS / layout.part_name(part.index)
        with contextlib.suppress(FileNotFoundError):
            times.append((path.stat().st_mtime, part.stop - part.start))
    if not times:
        return [], (
            "The parts were packed, which drops their times: the speed is known for each run as a "
            "whole."
        )
    if len(times) < 3:
        return [], "There are too few parts for a curve."
    times.sort()
    found, rows = [], 0
    for modified, count in times:
        rows += count
        found.append((round((modified - times[0][0]) / 60, 4), rows))
    return found, ""
