"""executor=slurm: tasks of a job array; each computes parts until its time is up.

squeue, which every cluster has, is asked every ASK_S seconds; no accounting database is needed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from featx.base import for_options, module_command
from featx.config import Config, Count, ExecutorConfig, options
from featx.errors import ConfigError, RunError, counted
from featx.pipeline.executors.job_folder import WorkerSpec, shared_folder
from featx.pipeline.executors.process_pool import ProcessPool
from featx.pipeline.executors.registry import EXECUTORS, Executor
from featx.pipeline.executors.slurm_task import run_command
from featx.pipeline.executors.worker import TIME_LIMIT
from featx.pipeline.executors.worker_pool import WorkerPool
from featx.pipeline.output import Session
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_metrics import RunOutcome
from featx.store import QueueState, layout
from featx.types import Part

ASK_S = 10.0
"""Seconds between two requests about the tasks, to spare a controller that many people ask."""

REPORT_S = 60.0
"""Seconds between two reports on waiting tasks, or on a controller that does not answer."""

_OWN = (
    "array", "clusters", "cpus-per-task", "error", "export", "job-name", "no-requeue", "ntasks",
    "open-mode", "output", "parsable", "requeue", "signal", "time", "wait", "wrap",
)  # fmt: skip
"""Options of sbatch that featx gives, that would have no effect, or that would break a run."""

_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
"""States in which a task stays; one that is queued again becomes PENDING."""

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a task that is queued and not running."""

_FORGOTTEN = "no longer known to Slurm"
"""State of a task that the controller does not know.

It forgets a task minutes after its end, and at once one that is cancelled while it waits.
"""

_NO_ANSWER = re.compile(
    "unable to contact|timed out|connection|not connected|zero bytes|temporarily unavailable|"
    "unexpected message",
    re.IGNORECASE,
)
"""Output of a Slurm command whose controller does not answer now."""


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
            if any(own.startswith(name) for own in _OWN):  # sbatch takes the beginning of a name
                raise ConfigError(
                    f"executor.sbatch.{name} cannot be given: featx gives this option itself, or "
                    "it would have no effect or break the run. executor.workers, executor.cpus "
                    "and executor.time_limit_min are the number of tasks, their CPUs and minutes."
                )

    @property
    def num_cpus(self) -> int:
        return self.cpus or 4

    @property
    def num_tasks(self) -> int:
        return self.workers or 8

    @property
    def minutes(self) -> int:
        return self.time_limit_min or 240

    @property
    def shared_folder(self) -> str | None:
        return self.folder

    @property
    def task_seconds(self) -> float | None:
        return None if self.mode == "local" else 60.0 * self.minutes


def check(options: SlurmOptions, config: Config) -> None:
    """Check that Slurm is installed and that its controller answers."""
    if options.mode == "local":
        return
    code, _, error = run_command(["sinfo", "--noheader"])
    if code != 0:
        raise (RunError if _NO_ANSWER.search(error) else ConfigError)(
            f"executor=slurm: Slurm does not answer ({error}). Nothing was submitted. Start the "
            "command where `sinfo` shows the cluster; executor.mode=local runs the same path here."
        )


def run(
    options: SlurmOptions, context: RunContext, session: Session, spec: WorkerSpec
) -> RunOutcome:
    folder = shared_folder(options, session)
    device = context.engine.device.type
    if options.mode == "local":
        return LocalTasks(spec, session, folder, [device] * options.num_tasks).run()
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
        self, spec: WorkerSpec, session: Session, folder: Path, device: str, options: SlurmOptions
    ) -> None:
        super().__init__(spec, session, folder, options.num_tasks)
        self._device, self._options = device, options
        self._ids: dict[int, str] = {}  # number of a task -> its id in Slurm
        # The cluster that sbatch has chosen of SLURM_CLUSTERS, as an option: in the others, an id
        # is that of another job.
        self._cluster: list[str] = []
        self._unsent: list[int] = []  # numbers of tasks that Slurm could not take so far
        self._lost: dict[int, str] = {}  # number of a task that has ended -> its last state
        self._asked_at = time.monotonic()
        self._reported_at = -REPORT_S

    def name(self, number: int) -> str:
        return f"job {self._ids[number]}"

    def start(self, numbers: Sequence[int]) -> None:
        """Submit tasks as one array; during a run they wait if the controller does not answer."""
        numbers = [*self._unsent, *numbers]
        command = self._command(numbers)
        code, out, error = run_command(command)
        job, _, cluster = out.strip().partition(";")
        if code == 0 and job.isdigit():  # options such as test-only submit nothing
            self._unsent = []
            self._cluster = [f"--clusters={cluster}"] if cluster else []
            ids = [f"{job}_{index}" for index in range(len(numbers))]
            self._ids.update(zip(numbers, ids, strict=True))
            shown = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
            self.progress.log(f"submitted {counted(len(ids), 'task')}: {shown}")
            return
        is_silent = _NO_ANSWER.search(error) is not None
        if not (is_silent and self._ids):
            raise (RunError if is_silent or self._ids else ConfigError)(
                f"Slurm does not take the tasks: {error or out}. They were submitted by "
                f"{shlex.join(command[:-1])}; executor.workers, executor.cpus and "
                "executor.time_limit_min give --array, --cpus-per-task and --time. `sinfo` and "
                "`scontrol show partition` show what the cluster has. Nothing committed is lost."
            )
        self._unsent = numbers
        self._report(
            f"the controller of Slurm does not answer ({error}); "
            f"{counted(len(numbers), 'task is', 'tasks are')} submitted again when it does"
        )

    def ended(self) -> Mapping[int, str]:
        """Find the tasks that left a result, and those that have ended without one."""
        # Listing the folder shows new files even if a network file system caches lookups of names.
        results = {path.name for path in self.spec.folder.glob("result-*.json")}
        if time.monotonic() - self._asked_at >= ASK_S:
            self._asked_at = time.monotonic()
            if self._unsent:
                self.start([])
            self._find_lost()
        return {
            number: f"was lost ({self._lost.get(number, 'no report')}{self._last_words(number)})"
            for number in self.workers
            if number in self._lost or f"result-{number}.json" in results
        }

    def end_workers(self, grace_s: float) -> None:
        """Cancel all tasks; Slurm gives them time to commit complete parts."""
        # Slurm may have put a task that it preempted into the queue again.
        numbers = [*self.workers, *self.lost]
        if ids := [self._ids[number] for number in numbers if number in self._ids]:
            run_command(["scancel", *self._cluster, *ids])

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Say where the logs are and, for tasks that reach their time limit, what to change."""
        logs = f" Its logs are in {self.spec.folder}."
        if TIME_LIMIT not in how and "TIMEOUT" not in how:
            return logs
        rows = max(map(len, parts or self.spec.parts))
        return (
            f" Within executor.time_limit_min={self._options.minutes} a task has to load the model "
            f"and to compute the {rows} rows of a part. Raise executor.time_limit_min, or start a "
            f"new store with smaller parts: overwrite=true "
            f"part_rows={layout.power_of_two_at_most(max(1, rows / 4))}, with a batch_size of no "
            f"more than that.{logs}"
        )

    def _command(self, numbers: Sequence[int]) -> list[str]:
        """Command that submits tasks; its last word is what they run."""
        task = module_command("featx.pipeline.executors.slurm_task", str(self.spec.folder))
        minutes = self._options.minutes
        options: dict[str, object] = {
            **self._options.sbatch,
            "parsable": True,
            "requeue": True,
            "job-name": "featx",
            "array": f"0-{len(numbers) - 1}",
            "ntasks": 1,
            # The task writes its log itself, as Slurm replaces % and removes \\ in this path.
            "output": "/dev/null",
            "export": "ALL",  # also where SBATCH_EXPORT=NONE is the default of a cluster
            "cpus-per-task": self._options.num_cpus,
            "time": minutes,
            "wrap": f"set -- {' '.join(map(str, numbers))}; shift $SLURM_ARRAY_TASK_ID; "
            f"exec {shlex.join(task)} $1 {self._device} {60 * minutes} $(date +%s) "
            f">>{shlex.quote(str(self.spec.folder))}/$1.log 2>&1",
        }
        return ["sbatch", *self._cluster] + [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in options.items()
            if value is not None and value is not False
        ]

    def _find_lost(self) -> None:
        """Ask for the states of all tasks, and report those that wait."""
        sent = {number: self._ids[number] for number in self.workers if number in self._ids}
        if not sent:
            return
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
        jobs = ",".join({task.partition("_")[0] for task in sent.values()})
        code, out, error = run_command([*command, *self._cluster, f"--jobs={jobs}"])
        # squeue fails if it knows none of the jobs, and leaves out those that it does not know.
        if code != 0 and "invalid job id" not in error.lower():
            self._report(
                f"the controller of Slurm does not answer ({error}); running tasks continue, and "
                "it is asked again"
            )
            return
        known = {}
        for line in out.splitlines():
            task, state, reason = line.split("|", 2)
            known[task] = state, reason if state in _WAITING and reason != "None" else ""
        counts: Counter[tuple[str, str]] = Counter()
        for number, task in sent.items():
            state, reason = known.get(task, (_FORGOTTEN, ""))
            counts[state, reason] += 1
            if state in _ENDED or state == _FORGOTTEN:
                self._lost.setdefault(number, state)
            else:
                self._lost.pop(number, None)  # Slurm has put it into the queue again
        self.heartbeat.set_queue([QueueState(n, *state) for state, n in sorted(counts.items())])
        waiting = {reason: n for (state, reason), n in counts.items() if state in _WAITING}
        if waiting:
            reasons = [f"{reason or 'no reason yet'} ({n})" for reason, n in waiting.items()]
            tasks = f"{sum(waiting.values())} of {counted(len(sent), 'task')}"
            self._report(f"{tasks} wait in the queue: {', '.join(reasons)}")

    def _report(self, text: str) -> None:
        """Print a line, unless one was printed less than REPORT_S seconds ago."""
        if time.monotonic() - self._reported_at >= REPORT_S:
            self._reported_at = time.monotonic()
            self.progress.log(text)

    def _last_words(self, number: int) -> str:
        """Last line of the log of a task, for messages."""
        with contextlib.suppress(OSError):
            log = (self.spec.folder / f"{number}.log").read_text(errors="replace")
            if lines := log.strip().splitlines():
                return f"; its log: {lines[-1][:200]}"
        return ""
