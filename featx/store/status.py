"""Progress of a store and of the processes that write it, from its files alone; changes nothing."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from featx.errors import counted
from featx.storage import paths_in
from featx.store import layout
from featx.store.heartbeat import HeartbeatRecord, read_heartbeats
from featx.store.manifest import Run, require_manifest
from featx.store.part_files import missing_parts

WINDOW_S = 300.0
"""Seconds before the last commit over which the speed is measured."""

_STUCK_PARTS, _STUCK_S = 5.0, 120.0
"""Usual durations, and seconds, after both of which a part counts as stuck."""


@dataclass
class StoreStatus:
    """Progress of a store.

    Attributes:
        rows: number of rows in the end, summed over the runs of the store, as is `rows_done`.
        packed: whether features.h5 exists.
        rows_per_second: speed of the last minutes with commits; None before the second part.
        seconds_left: estimated remaining seconds; None if no process is at work or the speed is
            unknown.
        last_commit_age_s: seconds since the last commit; None if the folder has no parts.
        failures: number of failed rows, in a bucket as of the last heartbeat of the driver.
        stuck: one sentence for each thing that makes no progress.
    """

    root: Path
    rows: int
    rows_done: int
    parts: int
    parts_done: int
    packed: bool
    rows_per_second: float | None
    seconds_left: float | None
    last_commit_age_s: float | None
    failures: int
    workers: Sequence[HeartbeatRecord]
    stuck: list[str]

    @property
    def complete(self) -> bool:
        """Whether every part is committed."""
        return self.parts_done == self.parts

    def as_dict(self) -> dict[str, object]:
        """Content as JSON types."""
        values = dict(vars(self))
        values |= {"root": str(self.root), "complete": self.complete}
        values["workers"] = [
            {**record.values, "age_s": round(record.age_s, 1), "alive": record.is_alive}
            for record in self.workers
        ]
        return values


def store_status(root: Path) -> StoreStatus:
    """Read the status of a store, from any machine that sees its folder.

    Raises StoreError if there is no store.
    """
    manifest = require_manifest(root)
    missing = [part for _, parts in missing_parts(root, manifest) for part in parts]
    rows = sum(run.grid.num_rows for run in manifest.runs)
    rows_left, parts_left = sum(map(len, missing)), len({part.index for part in missing})
    commits = _commits(root, manifest.runs)
    speed, part_s = _speed(commits)
    workers = read_heartbeats(root)
    is_active = any(record.is_alive for record in workers)
    return StoreStatus(
        root=root,
        rows=rows,
        rows_done=rows - rows_left,
        parts=manifest.num_parts,
        parts_done=manifest.num_parts - parts_left,
        packed=(root / layout.PACKED).exists(),
        rows_per_second=speed,
        seconds_left=rows_left / speed if speed and is_active and rows_left else None,
        last_commit_age_s=time.time() - commits[-1][0] if commits else None,
        failures=_num_failures(root, workers),
        workers=workers,
        stuck=_stuck(workers, parts_left, part_s),
    )


def _commits(root: Path, runs: Sequence[Run]) -> list[tuple[float, int]]:
    """Time of commit and number of rows of the parts in the folder, in order of time."""
    rows = {layout.part_name(part.index): len(part) for run in runs for part in run.parts()}
    found = []
    for path in paths_in(root / layout.PARTS, layout.PART_GLOB):
        with contextlib.suppress(FileNotFoundError):  # packed meanwhile
            found.append((path.stat().st_mtime, rows.get(path.name, 0)))
    return sorted(found)


def _speed(commits: Sequence[tuple[float, int]]) -> tuple[float | None, float | None]:
    """Rows per second, and seconds between two commits; None if unknown."""
    if not commits:
        return None, None
    last = commits[-1][0]
    recent = [commit for commit in commits if commit[0] >= last - WINDOW_S]
    duration_s = last - recent[0][0]
    if duration_s <= 0:
        return None, None
    # The rows of the first commit were computed before the time that is measured.
    return sum(rows for _, rows in recent[1:]) / duration_s, duration_s / (len(recent) - 1)


def _num_failures(root: Path, workers: Sequence[HeartbeatRecord]) -> int:
    """Number of rows in failures.csv, or in the heartbeats if these know of more.

    Objects in a bucket cannot grow, so failures.csv does not change there during a run.
    """
    known = [record.values.get("failures") or 0 for record in workers]
    with contextlib.suppress(FileNotFoundError):
        path = root / layout.FAILURES_CSV
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            known.append(sum(1 for _ in csv.reader(file)) - 1)
    return max(0, *known, 0)


def _stuck(workers: Sequence[HeartbeatRecord], parts_left: int, part_s: float | None) -> list[str]:
    """Sentences about states that need an action of the user to progress."""
    found = []
    alive = [record for record in workers if record.is_alive]
    if parts_left and not alive:
        found.append(
            f"{counted(parts_left, 'part is', 'parts are')} missing and no process writes the "
            "store; the command that started it resumes it"
        )
    computing = sum(record.values.get("part") is not None for record in alive)
    for record in workers:
        name = record.name
        if not record.is_alive:
            undone = ", its part is not done" if record.values.get("part") is not None else ""
            found.append(f"{name}: last heartbeat {record.age_s:.0f} s ago{undone}")
        elif (since := record.values.get("part_since")) is not None:
            start, stop = record.values["part_rows"]
            usual_s = (part_s or 0.0) * max(1, computing)
            # Both times are of the clock of the worker, which may differ from that of this machine.
            elapsed_s = record.values["beat"] + record.age_s - since
            if elapsed_s > max(_STUCK_S, _STUCK_PARTS * usual_s):
                found.append(
                    f"{name} has been at part {record.values['part']} (rows {start} to {stop - 1}) "
                    f"for {elapsed_s:.0f} s; a part takes about {usual_s:.0f} s"
                )
    return found
