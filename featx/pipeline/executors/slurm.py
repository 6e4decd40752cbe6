"""executor=slurm: tasks of a job array; each computes parts until its time is up.

squeue, which every cluster has, is asked every ASK_S seconds; no accounting database is needed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from featx.base import for_options, module_command, module_environment
from featx.config import Config, Count, ExecutorConfig, options
from featx.errors import ConfigError, FeatxError, RunError, counted, nearest
from featx.pipeline.executors.job_folder import WorkerSpec, shared_folder
from featx.pipeline.executors.process_pool import ProcessPool
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.slurm_task import SIGNAL_DELAY_S, run_command
from featx.pipeline.executors.worker import TIME_LIMIT
from featx.pipeline.executors.worker_pool import RESUME_HINT, WorkerPool
from featx.pipeline.output import Session
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunOutcome
from featx.store import QueueState, layout
from featx.types import Part

_NUM_TASKS = 8
"""Number of tasks if executor.workers is not given."""

DEFAULT_TIME_LIMIT_MIN = 240
"""Default of the option `time_limit_min` in minutes."""

ASK_S = 10.0
"""Seconds between two requests about the tasks, to spare a controller that many people ask."""

REPORT_S = 60.0
"""Seconds between two reports on waiting tasks, or on a controller that does not answer."""

_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
"""States in which a task stays; one that is queued again becomes PENDING."""

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED"})
"""States of a task that is queued and not running."""

FORGOTTEN = "no longer known to Slurm"
"""State of a task that the controller does not know.

It forgets a task minutes after its end, and at once one that is cancelled while it waits.
"""

_NO_CONTROLLER = re.compile(
    "unable to contact slurm controller|socket timed out|connection refused|connection reset|"
    "transport endpoint|zero bytes|temporarily unable|communication connection failure|"
    "unexpected message received",
    re.IGNORECASE,
)
"""Output of a Slurm command whose controller does not answer now."""


_FOR_TIME = "give executor.time_limit_min, after which the remaining parts are submitted again"
_FOR_LOGS = "featx reads the log of a task in executor.folder to say why the task ended"
_FOR_PARTS = "a task is one process, which takes parts until none is left"
_OWN = {
    "array": "give executor.workers, the number of tasks",
    "cpus-per-task": "give executor.cpus",
    "error": _FOR_LOGS,
    "export": "tasks get the environment of the command",
    "job-name": "the tasks of all runs are called featx; executor.sbatch={comment: TEXT} is free",
    "no-requeue": "a task that is preempted has to come back",
    "ntasks": _FOR_PARTS,
    "ntasks-per-node": _FOR_PARTS,
    "open-mode": _FOR_LOGS,
    "output": _FOR_LOGS,
    "parsable": "featx reads the number of the job",
    "requeue": "tasks that are preempted come back anyway",
    "signal": "featx asks for a signal before the time limit, to commit what is computed",
    "time": _FOR_TIME,
    "time-min": _FOR_TIME,
    "wait": "featx waits for the tasks itself",
    "wrap": "featx says what a task does",
}
"""Option of sbatch that featx gives, or that would break a run -> what to do instead."""

_NAME = re.compile("[a-z][a-z-]*")
"""Name of an option of sbatch, without the dashes in front."""


@options("executor")
class SlurmOptions(ExecutorConfig):
    """Options of executor=slurm."""

    name: str = "slurm"
    cpus: Count | None = None
    """Number of CPUs of each task, 4 when not given; on a CPU also the number of threads that
    compute."""
    sbatch: Annotated[
        dict[str, bool | int | float | str | None],
        "a mapping of options of sbatch, such as {partition: gpu, gres: gpu:1, mem: 32G}",
    ] = field(default_factory=dict)
    """Further options of sbatch for each task, by their long names, such as {partition: gpu,
    gres: gpu:1, mem: 32G, qos: high}; true stands for an option without a value, such as
    {exclusive: true}. What is not given is the default of the cluster."""
    time_limit_min: Count | None = None
    """Minutes that a task may run before its remaining parts are submitted again, 240 when not
    given. Several parts have to fit into this time, so part_rows=auto takes it into account."""
    folder: str | None = None
    """Folder that all machines see, for the descriptions and logs of tasks; null takes OUT/jobs.
    It has to be given if out is in an object store."""
    mode: Literal["slurm", "local"] | None = None
    """slurm (when not given), or local, which runs the tasks as processes of this machine to try
    the set-up."""

    def __post_init__(self) -> None:
        for option in ("sbatch", "time_limit_min"):
            if self.mode == "local" and (value := getattr(self, option)):
                raise ConfigError(
                    f"executor.{option}={value} has no effect with executor.mode=local, whose "
                    "tasks are processes of this machine; leave one of them out."
                )
        for name in self.sbatch:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"executor.sbatch: {name!r} is no option of sbatch; expected a long name "
                    "without dashes in front, such as gres or mail-type."
                )
            # sbatch also takes the beginning of a name.
            for own, instead in _OWN.items():
                if own.startswith(name):
                    raise ConfigError(f"executor.sbatch.{name} cannot be given: {instead}.")

    @property
    def num_cpus(self) -> int:
        return self.cpus or 4

    @property
    def requests(self) -> Mapping[str, str | None]:
        """Values of `sbatch` as sbatch reads them, None for an option without a value."""
        return {
            name: None if value is True else str(value)
            for name, value in self.sbatch.items()
            if value is not None and value is not False
        }

    @property
    def shared_folder(self) -> str | None:
        return self.folder

    @property
    def task_seconds(self) -> float | None:
        """Time limit of a task in seconds; None with mode=local."""
        if self.mode == "local":
            return None
        return 60.0 * (self.time_limit_min or DEFAULT_TIME_LIMIT_MIN)


def check(options: SlurmOptions, config: Config) -> None:
    """Check that Slurm, its controller and the partition are available.

    Raises ConfigError if this machine has no Slurm, the cluster no such partition, or the folder of
    the logs a name that Slurm changes, and RunError if the controller does not answer.
    """
    if options.mode == "local":
        return
    if "\\" in str(folder := Path(options.folder or config.out).expanduser().absolute()):
        raise ConfigError(
            f"executor=slurm: {folder} has a backslash, so Slurm would put no number of a task "
            "into the names of logs. executor.folder=DIR names a folder without one for the tasks."
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "executor=slurm: there is no Slurm on this machine (sbatch is not found). Start the "
            "command on a machine of the cluster; executor.mode=local runs the same path here."
        )
    code, out, error = run_command(["sinfo", "--noheader", "--all", "--format=%R"])
    if code is None:
        return  # there is no sinfo: sbatch will report what is wrong
    if code:
        raise _no_controller(error)
    partition, names = options.requests.get("partition"), sorted(set(out.split()))
    for name in (partition or "").split(","):
        if name and name not in names:
            raise ConfigError(
                f"executor.sbatch.partition={partition}: this cluster has no partition {name}."
                f"{nearest(name, names)} It has: {', '.join(names)}."
            )


def run(
    options: SlurmOptions, context: RunContext, session: Session, spec: WorkerSpec
) -> RunOutcome:
    folder = shared_folder(options, session)
    device = context.engine.device.type
    if options.mode == "local":
        devices = [device] * (options.workers or _NUM_TASKS)
        return LocalTasks(spec, session, folder, devices).run()
    return JobArray(spec, session, folder, device, options).run()


EXECUTORS.register(
    Executor(
        name="slurm",
        help="Tasks of a Slurm job array, each over neighbouring parts.",
        options=SlurmOptions,
        check=for_options("executor=slurm", SlurmOptions, check),
        run=for_options("executor=slurm", SlurmOptions, run),
    )
)


class TaskState(NamedTuple):
    """State of a task as squeue names it, such as PENDING, and the reason for which it waits."""

    name: str
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the task stays in this state."""
        return self.name in _ENDED or self.name.startswith(FORGOTTEN)


class LocalTasks(ProcessPool):
    """Tasks that are processes of this machine."""

    kind = "task"
    outlives_driver = True


class JobArray(WorkerPool):
    """Tasks of Slurm; a task ends early at its time limit, by preemption or by scancel."""

    kind = "task"
    outlives_driver = True
    poll_s = 2.0
    replacement = "its work is submitted again"
    report_s = 15.0

    def __init__(
        self,
        spec: WorkerSpec,
        session: Session,
        folder: Path,
        device: str,
        options: SlurmOptions,
    ) -> None:
        super().__init__(spec, session, folder, options.workers or _NUM_TASKS)
        self._device = device
        self._minutes = options.time_limit_min or DEFAULT_TIME_LIMIT_MIN
        self._cpus, self._requests = options.num_cpus, options.requests
        self._ids: dict[int, str] = {}  # number of a task -> its id in Slurm
        self._unsent: list[int] = []  # numbers of tasks that Slurm could not take so far
        self._states: dict[str, TaskState] = {}
        self._asked_at = -ASK_S
        # The first report on waiting tasks comes early.
        self._reported_at = {"waiting": time.monotonic() - REPORT_S + 2 * ASK_S}

    def name(self, number: int) -> str:
        return f"job {self._ids[number]}"

    def start(self, numbers: Sequence[int]) -> None:
        """Submit tasks as one array; during a run they wait if the controller does not answer."""
        numbers = [*self._unsent, *numbers]
        code, out, error = run_command(self._command(numbers), module_environment())
        job = out.strip().partition(";")[0]  # the name of the cluster may follow
        if code == 0 and job.isdigit():  # options such as test-only submit nothing
            self._unsent = []
            ids = [f"{job}_{index}" for index in range(len(numbers))]
            self._ids.update(zip(numbers, ids, strict=True))
            shown = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
            self.progress.log(f"submitted {counted(len(ids), 'task')}: {shown}")
            return
        is_silent = _NO_CONTROLLER.search(error) is not None
        if not self._ids and is_silent:
            raise _no_controller(error)
        if not self._ids:
            given: dict[str, object] = {
                "workers": len(numbers),
                "cpus": self._cpus,
                "time_limit_min": self._minutes,
                **{f"sbatch.{name}": value or "true" for name, value in self._requests.items()},
            }
            requested = ", ".join(f"executor.{name}={value}" for name, value in given.items())
            raise ConfigError(
                f"Slurm does not take the tasks: {last_line(error)}. They ask for {requested}; "
                "`sinfo` and `scontrol show partition` show what the cluster has."
            )
        if not is_silent:
            raise RunError(
                f"Slurm does not take the tasks again ({last_line(error)}). {RESUME_HINT}"
            )
        self._unsent = numbers
        self._report(
            "submission",
            f"the controller of Slurm does not answer ({last_line(error)}); "
            f"{counted(len(numbers), 'task is', 'tasks are')} submitted again when it does",
        )

    def ended(self) -> Mapping[int, str]:
        """Find the tasks that left a result, and those that have ended without one."""
        # Listing the folder shows new files even if a network file system caches lookups of names.
        results = {path.name for path in self.spec.folder.glob("result-*.json")}
        is_due = time.monotonic() - self._asked_at >= ASK_S
        if is_due and self._unsent:
            self.start([])
        sent = {number: self._ids[number] for number in self.workers if number in self._ids}
        if is_due:
            self._asked_at = time.monotonic()
            self._update_states(list(sent.values()))
        ended = {}
        for number, task in sent.items():
            state = self._states.get(task, TaskState(""))
            if f"result-{number}.json" in results:
                ended[number] = "has ended"
            elif state.has_ended:
                ended[number] = f"was lost ({self._state_text(task, state.name)})"
        return ended

    def end_workers(self, grace_s: float) -> None:
        """Cancel all tasks; Slurm gives them time to commit complete parts."""
        # Slurm may have put a task that it preempted into the queue again.
        numbers = [*self.workers, *self.lost]
        if ids := [self._ids[number] for number in numbers if number in self._ids]:
            run_command(["scancel", *ids])

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Say where the logs are and, for tasks that reach their time limit, what to change."""
        logs = f" Its logs are in {self.spec.folder}."
        if TIME_LIMIT not in how and "TIMEOUT" not in how:
            return logs
        rows = max(map(len, parts or self.spec.parts))
        advice = (
            f" Within executor.time_limit_min={self._minutes} a task has to load the "
            f"model and to compute the {rows} rows of a part. Raise executor.time_limit_min"
        )
        if rows >= 4:
            advice += (
                ", or start a new store with smaller parts: overwrite=true "
                f"part_rows={layout.power_of_two_at_most(rows / 4)}, with a batch_size of no more "
                "than that"
            )
        return f"{advice}.{logs}"

    def _command(self, numbers: Sequence[int]) -> list[str]:
        task = module_command("featx.pipeline.executors.slurm_task", str(self.spec.folder))
        logs = str(self.spec.folder).replace("%", "%%")  # sbatch replaces %A, %x, ... in the path
        options: dict[str, object] = {
            **self._requests,
            "job-name": "featx",
            "array": f"0-{len(numbers) - 1}",
            "ntasks": 1,
            "output": f"{logs}/%A_%a.log",
            "open-mode": "append",
            "export": "ALL",  # also where SBATCH_EXPORT=NONE is the default of a cluster
            "cpus-per-task": self._cpus,
            "time": self._minutes,
            "wrap": f"set -- {' '.join(map(str, numbers))}; shift $SLURM_ARRAY_TASK_ID; "
            f"exec {shlex.join(task)} $1 {self._device} {60 * self._minutes} $(date +%s)",
        }
        # Slurm announces a limit up to a minute early. That is a second safeguard for long limits
        # only: it would end a task with a short limit right after its start.
        if self._minutes * 60 > 10 * SIGNAL_DELAY_S:
            options["signal"] = f"B:USR2@{SIGNAL_DELAY_S}"
        given = [
            f"--{option}" if value is None else f"--{option}={value}"
            for option, value in options.items()
        ]
        return ["sbatch", "--parsable", "--requeue", *given]

    def _update_states(self, ids: Sequence[str]) -> None:
        """Update the states of tasks, and report those that wait."""
        if not ids:
            return
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
        jobs = ",".join(dict.fromkeys(task.partition("_")[0] for task in ids))
        code, out, error = run_command([*command, f"--jobs={jobs}"])
        # squeue fails if it knows none of the jobs, and leaves out those that it does not know.
        if code != 0 and "invalid job id" not in error.lower():
            self._report(
                "silent",
                f"the controller of Slurm does not answer ({last_line(error)}); running tasks "
                "continue, and it is asked again",
            )
            return
        found = {}
        for line in out.splitlines():
            task, state, reason = line.split("|", 2)
            is_waiting = state in _WAITING and reason != "None"
            found[task] = TaskState(state, reason if is_waiting else "")
        for task in ids:
            if task not in found:
                before = self._states.get(task, TaskState(""))
                seen = f", last seen as {before.name}" if before.name else ""
                found[task] = before if before.has_ended else TaskState(FORGOTTEN + seen)
        self._states = {task: found[task] for task in ids}
        counts = Counter(self._states.values())
        self.heartbeat.set_queue([QueueState(n, *state) for state, n in sorted(counts.items())])
        waiting = Counter(state.reason for state in self._states.values() if state.name in _WAITING)
        if waiting:
            reasons = [f"{reason or 'no reason yet'} ({n})" for reason, n in waiting.most_common(3)]
            tasks = f"{waiting.total()} of {counted(len(ids), 'task')}"
            self._report("waiting", f"{tasks} wait in the queue: {', '.join(reasons)}")

    def _report(self, what: str, text: str) -> None:
        """Print a line, unless one of this kind was printed less than REPORT_S seconds ago."""
        now = time.monotonic()
        if now - self._reported_at.get(what, -REPORT_S) >= REPORT_S:
            self._reported_at[what] = now
            self.progress.log(text)

    def _state_text(self, task: str, state: str) -> str:
        """State of a task that left no result, with the last error line of its log, if any."""
        with contextlib.suppress(OSError):
            text = (self.spec.folder / f"{task}.log").read_text(errors="replace")
            lines = [line.strip() for line in text.split("\n") if line.strip()]
            # The last lines about a killed task name no reason; lines with "error" do.
            errors = [line for line in lines if "error" in line.lower()]
            if shown := errors or lines:
                return f"{state}; its log: {shown[-1][:200]}"
        return state


def last_line(text: str) -> str:
    """Last line of the output of a Slurm command without its name: 'Invalid partition name'."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Try ")]  # its help
    return re.sub(r"^\w+(:? (error|fatal))?: ", "", lines[-1]) if lines else "no reason given"


def _no_controller(output: str) -> FeatxError:
    """Error for a controller that does not answer, from the output of the command."""
    if _NO_CONTROLLER.search(output):
        return RunError(
            f"the controller of Slurm does not answer ({last_line(output)}). Nothing was "
            "submitted; run the same command again when `sinfo` shows the cluster."
        )
    return ConfigError(
        f"executor=slurm: Slurm does not work on this machine ({last_line(output)}). Start the "
        "command where `sinfo` shows the cluster; executor.mode=local runs the same path here."
    )
