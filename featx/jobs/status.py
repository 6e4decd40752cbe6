"""job=status: progress of a run, from any machine that sees its store; takes no lock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from featx.base import time_text
from featx.config import Config, StatusConfig
from featx.errors import StoreError, counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.store import HeartbeatRecord, StoreStatus, layout, no_store_at, store_status

INTERVAL_S = 5.0
"""Seconds between two looks with status.watch=true."""

_CLEAR = "\x1b[H\x1b[2J"
"""Text that empties a terminal and moves the cursor to its top."""


def run(config: Config, config_yaml: str) -> int:
    """Print the progress of the run and its workers; returns the exit code 0."""
    root = layout.folder_of_packed(config.store_path())
    if not root.is_dir():
        raise StoreError(
            f"{no_store_at(root)} job=status takes the store's folder. A run that has just "
            "started makes it when its model is ready."
        )
    for i, status in enumerate(statuses(root) if config.status.watch else [store_status(root)]):
        if i and not config.job.json:
            sys.stdout.write(_CLEAR if sys.stdout.isatty() else "\n")
        print_summary(config, status.as_dict(), _facts(status))
    return 0


def statuses(root: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[StoreStatus]:
    """Read the status every INTERVAL_S seconds, the last time when the run has ended."""
    yield (status := store_status(root))
    # Also when every part is committed, a process may be at work, as in packing.
    while not status.complete or any(record.is_alive for record in status.workers):
        sleep(INTERVAL_S)
        yield (status := store_status(root))


def _facts(status: StoreStatus) -> list[tuple[str, str | None]]:
    share = status.rows_done / status.rows if status.rows else 1.0
    speed, left, age = status.rows_per_second, status.seconds_left, status.last_commit_age_s
    speed_text = left_text = None
    if not status.complete:
        speed_text = "not known yet" if speed is None else f"{speed:.1f}"
        left_text = "not known" if left is None else time_text(left)
    queues = [("queue", _queue_text(record)) for record in status.workers if record.queue]
    return [
        ("store", str(status.root)),
        ("rows", f"{status.rows_done} of {status.rows}, {share:.1%}"),
        ("parts", f"{status.parts_done} of {status.parts}" + (", packed" if status.packed else "")),
        ("failures", str(status.failures)),
        ("rows/s", speed_text),
        ("left", left_text),
        ("last part", None if age is None else f"{time_text(age)} ago"),
        *queues,
        ("workers", "\n".join(map(_worker_text, status.workers)) or None),
        ("stuck", "\n".join(status.stuck) or None),
    ]


def _queue_text(driver: HeartbeatRecord) -> str:
    """Describe the tasks of a driver in the queue: '3 RUNNING, 5 PENDING (Resources)'."""
    text = ", ".join(
        f"{each.tasks} {each.state}" + (f" ({each.reason})" if each.reason else "")
        for each in driver.queue
    )
    return text if driver.is_alive else f"{text}, {time_text(driver.age_s)} ago"


def _worker_text(record: HeartbeatRecord) -> str:
    values = record.values
    state = "alive" if record.is_alive else "silent"
    text = f"{values['what']}  pid {values['pid']} on {values['host']}  {state}"
    if not values["parts"]:
        return f"{text}, last heartbeat {record.age_s:.0f} s ago"
    since = max(0.0, values["beat"] + record.age_s - values["last_commit"])
    return f"{text}, {counted(values['parts'], 'part')}, the last {time_text(since)} ago"


JOBS.register(
    Job(
        "status",
        "Show the progress of a run, from any machine that sees its store.",
        StatusConfig,
        run=run,
        input=Input.STORE_OR_OUT,
        reads=("job.json",),
        why="it reads the store that `store` or `out` names",
    )
)
