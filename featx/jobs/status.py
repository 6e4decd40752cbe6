"""job=status: progress of a run, from any machine that sees its store; takes no lock."""

from __future__ import annotations

from featx.base import facts, time_text
from featx.config import Config
from featx.errors import StoreError, counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.store import HeartbeatRecord, StoreStatus, store_status


def run(config: Config, config_yaml: str) -> int:
    """Print the progress of the run and its workers; returns the exit code 0."""
    root = config.place_of_store()
    if not root.is_dir():
        raise StoreError(f"there is no store at {root}; job=status takes the store's folder.")
    status = store_status(root)
    print_summary(config, status.as_dict(), _text(status))
    return 0


def _text(status: StoreStatus) -> str:
    """Format the status for people."""
    share = status.rows_done / status.rows if status.rows else 1.0
    rows = [
        ("store", str(status.root)),
        ("rows", f"{status.rows_done} of {status.rows}, {share:.1%}"),
        ("parts", f"{status.parts_done} of {status.parts}" + (", packed" if status.packed else "")),
        ("failures", str(status.failures)),
    ]
    if not status.complete:
        speed = status.rows_per_second
        rows.append(("rows/s", "not known yet" if speed is None else f"{speed:.1f}"))
        left = status.seconds_left
        rows.append(("left", "not known" if left is None else time_text(left)))
    if (age := status.last_commit_age_s) is not None:
        rows.append(("last part", f"{time_text(age)} ago"))
    if status.workers:
        rows.append(("workers", "\n".join(map(_worker_text, status.workers))))
    if status.stuck:
        rows.append(("stuck", "\n".join(status.stuck)))
    return facts(rows)


def _worker_text(record: HeartbeatRecord) -> str:
    """Describe one process that writes the store."""
    values = record.values
    state = "alive" if record.alive else "silent"
    text = f"{values['what']}  pid {values['pid']} on {values['host']}  {state}"
    if not values["parts"]:
        return f"{text}, last heartbeat {record.age_s:.0f} s ago"
    since = max(0.0, values["beat"] + record.age_s - values["last_commit"])
    return f"{text}, {counted(values['parts'], 'part')}, the last {time_text(since)} ago"


JOBS.register(
    Job(
        "status",
        "Show the progress of a run, from any machine that sees its store.",
        run=run,
        input=Input.STORE_OR_OUT,
        reads=("job.json",),
        why="it reads the store that `store` or `out` names",
    )
)
