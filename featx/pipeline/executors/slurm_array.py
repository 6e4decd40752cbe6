"""Tasks of a Slurm job array as the driver sees them: submitted, observed, and submitted again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from featx.config import ExecutorConfig
from featx.errors import ConfigError, RunError, counted
from featx.pipeline.executors.part_worker import rows_text
from featx.pipeline.executors.scheduler import MAX_DEATHS, RESUME_HINT, Scheduler
from featx.pipeline.executors.slurm_queue import (
    SlurmQueue,
    TaskState,
    counted_states,
    is_no_controller,
    last_line,
    no_controller,
)
from featx.pipeline.executors.slurm_task import TIME_LIMIT, Task, TaskResult, submitit_module
from featx.pipeline.executors.worker_spec import PickledWorkerSpec, Session, WorkerSpec
from featx.pipeline.executors.worker_stats import PartResult
from featx.pipeline.run_context import RunContext
from featx.store import layout
from featx.types import Part

POLL_S = 2.0
"""Seconds between two looks at the parts and tasks."""

RESULT_S = 15.0
"""Seconds to wait for the result of an ended task, as network file systems show files late."""

SUBMIT_AGAIN_S = 30.0
"""Seconds until parts are submitted again if the controller does not answer during a run."""

_NUM_TASKS = 8
"""Number of tasks if executor.workers is not given."""


class JobArray(Scheduler[Any]):
    """Tasks of a Slurm job array; a worker is a job of submitit.

    Tasks are submitted with all their parts and report at their end only, so the driver looks for
    parts that are committed, whoever committed them.

    Args:
        spec: worker spec for every task.
        context: run context of the driver.
        session: write session of the store or statistics.
        folder: folder for the pickled tasks, their results and logs.
        executor: executor of submitit for this folder.
        options: options of the executor.
        is_local: whether `executor` starts processes of this machine, which have no queue.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        context: RunContext,
        session: Session,
        folder: Path,
        executor: Any,
        options: ExecutorConfig,
        *,
        is_local: bool,
    ) -> None:
        parts = session.missing()
        num_tasks = max(1, min(options.workers or _NUM_TASKS, len(parts)))
        super().__init__(spec, session, parts, num_tasks)
        self._limit_s = options.task_seconds
        self._device = str(context.engine.device).partition(":")[0]
        self._folder = folder
        self._executor = executor
        self._ended_at: dict[Any, float] = {}  # jobs that have ended without a result so far
        self._submit_at = 0.0
        self._pause_s = 0.0  # the first look follows the submission at once
        self._slurm = None if is_local else SlurmQueue(self._report)

    def start(self) -> None:
        """Submit all parts, if there are any."""
        self._submit(is_first=True)

    def is_active(self) -> bool:
        """Return whether a part is missing or a task has not ended."""
        return self.is_work_left() or bool(self.workers)

    def handle_events(self) -> None:
        """Look for committed parts and ended tasks; submit what is left to do."""
        time.sleep(self._pause_s)
        self._pause_s = POLL_S
        ended = self._ended()  # before the look at the parts, which a task commits before its end
        self._find_committed()
        for job, state in ended:
            self._handle_end(job, state)
        if time.monotonic() >= self._submit_at:
            self._submit()

    def end_workers(self) -> None:
        """Cancel all tasks."""
        if self._slurm is not None:
            self._slurm.cancel(job.job_id for job in self.workers)
            return
        for job in self.workers:
            job.cancel(check=False)

    def _report(self, text: str) -> None:
        """Print a line for the user."""
        self.progress.log(text)

    def _submit(self, is_first: bool = False) -> None:
        """Submit all queued parts as tasks; during a run they wait if Slurm cannot take them now.

        Args:
            is_first: whether nothing has been submitted yet.

        Raises:
            ConfigError: Slurm refuses what the config requests.
            RunError: the controller does not answer the first submission, or refuses a later one.
        """
        parts = self.take_queued()
        if not parts:
            return
        chunks = list(_chunks(parts, self.num_workers))
        spec = PickledWorkerSpec(self.spec)
        try:
            with self._executor.batch():
                tasks = [Task(spec, self._device, chunk, self._limit_s) for chunk in chunks]
                jobs = [self._executor.submit(task) for task in tasks]
        except submitit_module().core.utils.FailedJobError as error:  # with what sbatch printed
            output = str(error)
            if is_first:
                raise _submission_error(self._executor, output) from error
            if not is_no_controller(output):
                raise RunError(
                    f"Slurm does not take the tasks again ({last_line(output)}). {RESUME_HINT}"
                ) from error
            self.put_back(parts)
            self._submit_at = time.monotonic() + SUBMIT_AGAIN_S
            self._report(
                f"the controller of Slurm does not answer ({last_line(output)}); "
                f"{counted(len(parts), 'part is', 'parts are')} submitted again in "
                f"{SUBMIT_AGAIN_S:.0f} s"
            )
            return
        for job, chunk in zip(jobs, chunks, strict=True):
            self.add_worker(job, chunk)
        ids = ", ".join(job.job_id for job in jobs[:3]) + (", ..." if len(jobs) > 3 else "")
        self._report(f"submitted {counted(len(jobs), 'task')}: {ids}")

    def _ended(self) -> list[tuple[Any, TaskState | None]]:
        """Find the tasks that have ended.

        Returns:
            each task with None, or with its state if it left no result.
        """
        if self._slurm is None:
            return [(job, None) for job in self.workers if job.done()]
        now = time.monotonic()
        # Listing the folder shows new files even if a network file system caches lookups of names.
        results = {path.name for path in self._folder.glob("*_result.pkl")}
        states = self._slurm.states([job.job_id for job in self.workers])
        self.heartbeat.set_queue(counted_states(states.values()))
        ended: list[tuple[Any, TaskState | None]] = []
        for job in self.workers:
            if job.paths.result_pickle.name in results:
                ended.append((job, None))
            elif (state := states.get(job.job_id)) is not None and state.has_ended:
                if now - self._ended_at.setdefault(job, now) >= RESULT_S:
                    ended.append((job, state))
            else:
                self._ended_at.pop(job, None)
        return ended

    def _find_committed(self) -> None:
        """Record the parts that were committed since the last look, whoever committed them."""
        is_first = not self.collector.has_started
        for part, failures in self.session.committed_by_others(self.missing()):
            self.part_committed(PartResult(part, failures, {}, 0.0, 0.0), is_earlier=is_first)

    def _handle_end(self, job: Any, state: TaskState | None) -> None:
        """Take the result of an ended task; submit again what it did not complete.

        Args:
            job: job of submitit that has ended.
            state: state of a task without a result, otherwise None.
        """
        parts = self.remove_worker(job)
        self._ended_at.pop(job, None)
        if state is not None:
            text = f"was lost ({_state_text(job, state)})"
            self._handle_loss(job, parts, text, is_late=state.state == "TIMEOUT")
            return
        try:
            result: TaskResult = job.result()
        except Exception as error:  # submitit re-raises here whatever the task raised
            if type(error).__name__ == "FailedJobError":  # with the task's traceback
                raise self._task_error(job, error) from error
            reason = str(error).strip().splitlines()[0][:200]
            self._handle_loss(job, parts, f"was lost ({reason})")
            return
        for part_result in result.results:
            self.collector.underflow_rows.update(part_result.underflow_rows)
        self.collector.worker_stats.add(result.worker_stats)
        if result.ended_by == TIME_LIMIT:
            text = f"reached its time limit ({result.activity})"
            self._handle_loss(job, parts, text, is_late=True)
        elif result.ended_by is not None:
            text = f"was ended by {result.ended_by} ({result.activity})"
            self._handle_loss(job, parts, text)

    def _task_error(self, job: Any, error: Exception) -> RunError:
        """Error for a task that raised one."""
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        cause = next((line for line in reversed(lines) if "RunError: " in line), lines[-1])
        cause = cause.rpartition("RunError: ")[2].rstrip(".")
        run_error = RunError(f"job {job.job_id}: {cause}. {RESUME_HINT}")
        run_error.add_note(str(error))
        return run_error

    def _handle_loss(
        self, job: Any, parts: Sequence[Part], how: str, is_late: bool = False
    ) -> None:
        """Submit the parts of a task again that ended early.

        Args:
            job: job of submitit that has ended.
            parts: parts that it did not commit.
            how: how it ended, the rest of a sentence.
            is_late: whether its time limit ended it.

        Raises:
            RunError: MAX_DEATHS tasks have ended at the same part.
        """
        self.collector.is_complete = False  # a task that ends early returns no measurements
        if not parts:
            return
        # A task computes its parts in order, so it ended in the first one that is missing.
        if self.count_death(parts[:1]) >= MAX_DEATHS:
            advice = self._advice(parts[0]) if is_late else ""
            raise RunError(
                f"job {job.job_id} {how}, as did {MAX_DEATHS - 1} tasks before it that started "
                f"with {rows_text(parts[:1])}.{advice} Its logs are in {self._folder}. "
                f"{RESUME_HINT}"
            )
        self._report(f"job {job.job_id} {how}; {_parts_text(parts)} submitted again")
        self.put_back(parts)
        self._submit()

    def _advice(self, part: Part) -> str:
        """Advice for tasks that reach their time limit before they can commit a part."""
        minutes = (self._limit_s or 0) / 60
        advice = (
            f" Within executor.time_limit_min={minutes:.0f} a task has to load the model and to "
            f"compute the {len(part)} rows of a part. Raise executor.time_limit_min"
        )
        if len(part) < 4:
            return f"{advice}."
        return (
            f"{advice}, or start a new store with smaller parts: overwrite=true "
            f"part_rows={layout.power_of_two_at_most(len(part) / 4)}, with a batch_size of no more "
            "than that."
        )


def _parts_text(left: Sequence[Part]) -> str:
    """Parts that a task left undone, as the subject of a sentence."""
    return "its missing part is" if len(left) == 1 else f"its {len(left)} missing parts are"


def _state_text(job: Any, state: TaskState) -> str:
    """State of a task that left no result, with the last error line of its log, if any."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in job.paths.stderr.read_text(errors="replace").split("\n")]
        # The last lines of srun about a killed task name no reason; lines with "error" do.
        errors = [line for line in lines if "error" in line.lower()]
        if shown := errors or [line for line in lines if line]:
            return f"{state}; its log: {shown[-1][:200]}"
    return str(state)


def _submission_error(executor: Any, output: str) -> Exception:
    """Error for tasks that sbatch did not accept, from what it printed."""
    if is_no_controller(output):
        return no_controller(output)
    parameters = {
        "cpus_per_task": "executor.cpus",
        "mem": "executor.memory_gib",
        "time": "executor.time_limit_min",
        "partition": "executor.partition",
        "gres": "executor.gres",
        "account": "executor.account",
    }
    requested = getattr(executor, "parameters", {})
    options = [f"{key}={requested[name]}" for name, key in parameters.items() if name in requested]
    return ConfigError(
        f"Slurm does not take the tasks: {last_line(output)}. They ask for {', '.join(options)}; "
        "`sinfo` and `scontrol show partition` show what the cluster has."
    )


def _chunks(parts: Sequence[Part], count: int) -> Iterator[list[Part]]:
    """Split parts into at most `count` lists of neighbouring parts of about the same length."""
    count = min(count, len(parts))
    for number in range(count):
        start, stop = number * len(parts) // count, (number + 1) * len(parts) // count
        yield list(parts[start:stop])
