"""State of Slurm's queue: partitions, the tasks of a run, and their remaining time.

squeue, which every cluster has, is asked every ASK_S seconds; the accounting database (sacct) only
about tasks that the controller has forgotten.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from featx.base import time_text
from featx.errors import ConfigError, FeatxError, RunError, counted, nearest
from featx.store import QueueState

ASK_S = 10.0
"""Seconds between two requests about the tasks, to spare a controller that many people ask."""

REPORT_S = 60.0
"""Seconds between two reports on waiting tasks, or on a controller that does not answer."""

_ANSWER_S = 60.0
"""Seconds to wait for the answer of a Slurm command."""

_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
"""States in which a task stays; one that is queued again becomes PENDING."""

FORGOTTEN = "no longer known to Slurm"
"""State of a task that neither the controller nor the accounting database knows."""

_NO_CONTROLLER = re.compile(
    "unable to contact slurm controller|socket timed out|connection refused|connection reset|"
    "transport endpoint|zero bytes|temporarily unable|communication connection failure|"
    "unexpected message received",
    re.IGNORECASE,
)
_ADVICE = {
    "PartitionTimeLimit": "lower executor.time_limit_min",
    "PartitionNodeLimit": "choose another executor.partition",
    "PartitionDown": "choose another executor.partition",
    "PartitionInactive": "choose another executor.partition",
    "PartitionConfig": "no node of the partition has what executor.cpus or memory_gib ask for",
    "BadConstraints": "no node has what executor.gres, cpus or memory_gib ask for",
    "InvalidAccount": "choose another executor.account",
    "JobHeldUser": "scontrol release JOB lets it go",
    "JobHeldAdmin": "only an administrator can release it",
    "launch failed requeued held": "its node could not start it; scontrol release JOB tries again",
}
"""Reason of squeue for a waiting task -> what to do about it."""


def is_no_controller(text: str) -> bool:
    """Return whether the output of a Slurm command says that the controller does not answer now."""
    return _NO_CONTROLLER.search(text) is not None


def last_line(text: str) -> str:
    """Last line of the output of a Slurm command without its name: 'Invalid partition name'."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+(:? (error|fatal))?: ", "", lines[-1]) if lines else "no reason given"


def check_partition(partition: str | None) -> None:
    """Compare executor.partition, several separated by commas, with the cluster's partitions."""
    code, out, error = run_command(["sinfo", "--noheader", "--all", "--format=%R"])
    if code is None:
        return  # there is no sinfo: sbatch will report what is wrong
    if code:
        raise no_controller(error)
    names = sorted(set(out.split()))
    for name in (partition or "").split(","):
        if name and name not in names:
            raise ConfigError(
                f"executor.partition={partition}: this cluster has no partition {name}."
                f"{nearest(name, names)} It has: {', '.join(names)}."
            )


def no_controller(output: str) -> FeatxError:
    """Error for a controller that does not answer, from the output of the command."""
    if is_no_controller(output):
        return RunError(
            f"the controller of Slurm does not answer ({last_line(output)}). Nothing was "
            "submitted; run the same command again when `sinfo` shows the cluster."
        )
    return ConfigError(
        f"executor=slurm: Slurm does not work on this machine ({last_line(output)}). Start the "
        "command where `sinfo` shows the cluster; executor.mode=local runs the same path here."
    )


def seconds_left(limit_s: float) -> float:
    """Seconds that this task may still run; its whole limit if Slurm does not tell its end."""
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():  # since Slurm 23.02
        return int(end) - time.time()
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        code, out, _ = run_command(["squeue", "--noheader", "--format=%L", f"--jobs={job}"])
        if code == 0 and (match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", out.strip())):
            days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    return limit_s


@dataclass(frozen=True)
class TaskState:
    """State of a task as squeue names it, such as PENDING, and the reason for which it waits.

    The reason of a task that Slurm has forgotten is its last known state.
    """

    state: str
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the task does not run again by itself."""
        return self.state in _ENDED or self.state == FORGOTTEN

    def __str__(self) -> str:
        return f"{self.state}, {self.reason}" if self.state == FORGOTTEN else self.state


def counted_states(states: Iterable[TaskState]) -> list[QueueState]:
    """Count the tasks in each state, and with each reason for which they wait."""
    counts = Counter((task.state, task.reason if _waits(task) else "") for task in states)
    return [QueueState(count, state, reason) for (state, reason), count in sorted(counts.items())]


class SlurmQueue:
    """Tasks of one run in Slurm's queue; `report` prints a line for the user."""

    def __init__(
        self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._states: dict[str, TaskState] = {}
        self._asked_at: float | None = None
        self._waiting_since: float | None = None
        self._reported_at: dict[str, float] = {}

    def states(self, ids: Iterable[str]) -> Mapping[str, TaskState]:
        """States of some tasks by id, at most ASK_S seconds old; without tasks not seen yet."""
        ids = list(ids)
        now = self._clock()
        if ids and (self._asked_at is None or now - self._asked_at >= ASK_S):
            self._update_states(ids)
            self._asked_at = now
        self._report_waiting(ids, now)
        return {task: self._states[task] for task in ids if task in self._states}

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel tasks, as far as the controller answers."""
        if ids := list(ids):
            run_command(["scancel", *ids])

    def _update_states(self, ids: list[str]) -> None:
        """Update the states of tasks from the controller, or from the database if it forgot
        them.
        """
        jobs = ",".join(dict.fromkeys(task.partition("_")[0] for task in ids))
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
        code, out, error = run_command([*command, f"--jobs={jobs}"])
        # squeue fails if it knows none of the jobs, and leaves out those that it does not know.
        if code == 0 or "invalid job id" in error.lower():
            queued = {}
            for line in out.splitlines():
                task, state, reason = line.split("|", 2)
                queued[task] = TaskState(state, "" if reason == "None" else reason)
            lacking = [task for task in ids if task not in queued]
            self._states.update({**queued, **self._accounting_states(lacking)})
            return
        if self._is_due("silent", self._clock()):
            self._report(
                f"the controller of Slurm does not answer ({last_line(error)}); running tasks "
                "continue, and it is asked again"
            )

    def _accounting_states(self, ids: list[str]) -> dict[str, TaskState]:
        """States of tasks that the controller has forgotten, from the accounting database.

        It forgets a task minutes after its end, and at once one that is cancelled while it waits.
        """
        if not ids:
            return {}
        recorded = {}
        jobs = ",".join(dict.fromkeys(task.partition("_")[0] for task in ids))
        command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State"]
        code, out, _ = run_command([*command, f"--jobs={jobs}"])
        for line in out.splitlines() if code == 0 else ():
            task, _, state = line.partition("|")
            recorded[task] = TaskState(state.split(" ")[0])  # 'CANCELLED by 1000'
        # The database may lag behind, but a task that the controller has forgotten has ended.
        return {
            task: recorded[task]
            if task in recorded and recorded[task].has_ended
            else TaskState(FORGOTTEN, self._last_seen(task))
            for task in ids
        }

    def _last_seen(self, task: str) -> str:
        """Last known state of a task as text."""
        before = self._states.get(task)
        if before is None:
            return "never seen in the queue"
        return before.reason if before.state == FORGOTTEN else f"last seen as {before.state}"

    def _report_waiting(self, ids: list[str], now: float) -> None:
        """Report why tasks wait: first after 2 * ASK_S seconds, then every REPORT_S seconds."""
        waiting = [self._states[t] for t in ids if t in self._states and _waits(self._states[t])]
        if not waiting:
            self._waiting_since = None
            return
        if self._waiting_since is None:
            self._waiting_since = now
            # The first report comes early.
            self._reported_at["waiting"] = now - REPORT_S + 2 * ASK_S
        if not self._is_due("waiting", now):
            return
        reasons = Counter(state.reason or "no reason yet" for state in waiting)
        text = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        advice = {_ADVICE[reason] for reason in reasons if reason in _ADVICE}
        more = f"; {'; '.join(sorted(advice))}" if advice else ""
        waited = time_text(now - self._waiting_since)
        self._report(
            f"{len(waiting)} of {counted(len(ids), 'task')} wait in the queue for {waited} now: "
            f"{text}{more}"
        )

    def _is_due(self, what: str, now: float) -> bool:
        """Return whether a report is due, as the last one of this kind is REPORT_S seconds old."""
        last = self._reported_at.get(what)
        if last is not None and now - last < REPORT_S:
            return False
        self._reported_at[what] = now
        return True


def _waits(state: TaskState) -> bool:
    """Return whether a task is queued and not running."""
    return state.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


def run_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a Slurm command without the terminal; messages are in English by default.

    Returns:
        exit code, stdout and stderr; the code is None if there is no such command.
    """
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            env=environment or {**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"Socket timed out: no answer within {_ANSWER_S:.0f} s"
    except OSError as error:
        return None, "", f"{command[0]}: {error.strerror}"
    return completed.returncode, completed.stdout, completed.stderr
