"""What a store says of time: its summary.json, and when its parts came."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featx.store import layout
from featx.store.manifest import load_manifest
from featx.store.reader import FeatureStore

_STAGES = {
    "read": "reading the files, all threads together",
    "decode": "decoding and resizing, all threads together",
    "wait": "the model waited for pictures",
    "model": "the forward passes",
    "copy": "values from the device",
    "statistics": "summing up",
    "write": "building and committing parts",
    "pack": "the parts into one file",
}


@dataclass(frozen=True)
class RunSpeed:
    """One run as summary.json tells it.

    Attributes:
        finished: when, as text.
        images_per_second: None where nothing was left to do.
        share_of_trial: of the trial's rate, None where it is not told.
        below_trial: why the share is below 0.7, or nothing.
        stages: (name, seconds, what it is).
        bottleneck: a sentence, or nothing.
        memory: MiB at the peak, None where it is not told.
    """

    finished: str
    images_per_second: float | None
    share_of_trial: float | None
    below_trial: str
    stages: list[tuple[str, float, str]]
    bottleneck: str
    memory: float | None


@dataclass(frozen=True)
class Speed:
    """What is known of a store's time.

    Attributes:
        runs: the latest last.
        missing: why there are none, or nothing.
        parts: (minutes since the first part, rows so far), from the parts' modification times.
        parts_missing: why there are none, or nothing.
    """

    runs: list[RunSpeed]
    missing: str
    parts: list[tuple[float, int]]
    parts_missing: str


def speed_of(store: FeatureStore) -> Speed:
    """All that summary.json and the parts tell; nothing is guessed."""
    if store.root.is_file():
        alone = "A single file tells nothing of time; summary.json stands in the store's folder."
        return Speed([], alone, [], "")
    runs, missing = _runs(store)
    parts, parts_missing = _parts(store)
    return Speed(runs, missing, parts, parts_missing)


def _runs(store: FeatureStore) -> tuple[list[RunSpeed], str]:
    try:
        summary = json.loads((store.root / layout.SUMMARY).read_bytes())
        return [_run_speed(entry) for entry in summary["runs"]], ""
    except FileNotFoundError:
        return [], "There is no summary.json yet: a run writes it when it ends."
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [], f"summary.json cannot be read: {error}."


def _run_speed(entry: Mapping[str, Any]) -> RunSpeed:
    rate, memory = entry.get("images_per_second"), entry.get("peak_memory_mib")
    share = entry.get("share_of_trial")
    return RunSpeed(
        finished=str(entry.get("finished", "")),
        images_per_second=None if rate is None else float(rate),
        share_of_trial=None if share is None else float(share),
        below_trial=str(entry.get("below_trial") or ""),
        stages=[
            (str(name), float(seconds), _STAGES.get(name, ""))
            for name, seconds in entry["seconds"].items()
            if seconds is not None
        ],
        bottleneck=str(entry.get("bottleneck") or ""),
        memory=None if memory is None else float(memory),
    )


def _parts(store: FeatureStore) -> tuple[list[tuple[float, int]], str]:
    manifest, _ = load_manifest(store.root)
    parts = [part for run in manifest.runs for part in run.parts()] if manifest else []
    times = []
    for part in parts:
        path = store.root / layout.PARTS / layout.part_name(part.index)
        with contextlib.suppress(FileNotFoundError):
            times.append((path.stat().st_mtime, part.stop - part.start))
    if not times:
        return [], (
            "The parts were packed, and their times went with them: speed is known of each run as "
            "a whole."
        )
    if len(times) < 3:
        return [], "There are too few parts for a curve."
    times.sort()
    found, rows = [], 0
    for modified, count in times:
        rows += count
        found.append((round((modified - times[0][0]) / 60, 4), rows))
    return found, ""
