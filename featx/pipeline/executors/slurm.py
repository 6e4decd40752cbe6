"""executor=slurm: a job array over the parts, by submitit; each task computes neighbouring parts.

The driver holds the lock of the store (none exists in a bucket), waits for the tasks, records the
parts that they commit, packs, and writes the summary. A task that is told to end, by its time
limit, by preemption or by scancel, commits complete parts and returns; the driver submits the rest
again. Without a driver, the task puts itself into the queue again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featx.base.progress import Progress
from featx.config.executor import DEFAULT_TIME_LIMIT_MIN
from featx.config.run_config import Config
from featx.errors import ConfigError, MissingExtraError, RunError, counted
from featx.pipeline.executors.part_worker import PartWorker, add_worker_context, rows_text
from featx.pipeline.executors.slurm_queue import (
    SlurmQueue,
    TaskState,
    check_partition,
    is_no_controller,
    last_line,
    no_controller,
    seconds_left,
)
from featx.pipeline.executors.worker_spec import (
    PickledWorkerSpec,
    Session,
    WorkerSpec,
    worker_context,
)
from featx.pipeline.executors.worker_stats import (
    PartResult,
    ResultCollector,
    RunOutcome,
    WorkerStats,
)
from featx.pipeline.run_context import RunContext
from featx.pipeline.stop_signals import Interrupted, stop_signals
from featx.storage.local_folder import AtomicFolder
from featx.storage.s3_folder import open_folder
from featx.store import layout
from featx.store.heartbeat import Heartbeat, clear_signs, signs_of_life
from featx.types import Part

POLL_S = 2.0
"""Seconds between two looks at the parts and tasks."""

SIGNAL_DELAY_S = 90
"""Seconds before its time limit at which a task is told to end, at the most."""

MAX_LOSSES = 3
"""Number of tasks that may end at the same part before the run ends."""

RESULT_S = 15.0
"""Seconds to wait for the result of an ended task, as network file systems show files late."""

SUBMIT_AGAIN_S = 30.0
"""Seconds until parts are submitted again if the controller does not answer during a run."""

TIME_LIMIT = "its time limit"
"""Value of `TaskResult.told_by` for a task that its time limit ended."""

_TASKS = 8
"""Number of tasks if executor.workers is not given."""

_ENDLESS = 10**9
"""How often submitit may queue a task again after its time limit; `Task` has its own limit."""


def check(config: Config) -> None:
    """Check that submitit, Slurm, its controller and the partition are available.

    Raises:
        MissingExtraError: submitit is not installed.
        ConfigError: this machine has no Slurm, or the cluster no such partition.
        RunError: the controller does not answer.
    """
    _submitit()
    if config.executor.mode == "local":
        return
    if shutil.which("srun") is None:
        raise ConfigError(
            "executor=slurm: there is no Slurm on this machine (srun is not found). Start the "
            "command on a machine of the cluster; executor.mode=local runs the same path here."
        )
    check_partition(config.executor.partition)


def run(context: RunContext, session: Session, order: WorkerSpec) -> RunOutcome:
    """Compute the missing parts in tasks of a job array.

    Args:
        context: run context of the driver.
        session: write session of the store or statistics.
        order: worker spec for every task.

    Returns:
        outcome of the run, over all tasks.

    Raises:
        RunError: a task failed; the message names it, the part and its rows.
        Interrupted: SIGINT or SIGTERM arrived; the tasks were told to commit complete parts.
    """
    folder = _folder_of_tasks(context.config, session)
    array = _Array(order, context, session, folder)
    with Heartbeat(session.disk, "driver"):
        array.work()
    clear_signs(session.disk, order.driver)  # killed tasks leave their heartbeat files behind
    AtomicFolder(folder.parent).remove(folder)
    return array.collector.outcome(array.num_tasks, order)


@dataclass(frozen=True)
class TaskResult:
    """Return value of a task.

    Attributes:
        done: results of the parts that it committed.
        worker_stats: measurements of these parts; empty if the task was told to end.
        read_by: what told it to end, TIME_LIMIT or a signal; None if all parts are done.
        doing: what it did until then, as text.
    """

    done: Sequence[PartResult]
    worker_stats: WorkerStats
    read_by: str | None = None
    doing: str = ""


class Task:
    """Task of the array; submitit pickles it on submission, and again when it is requeued.

    Args:
        order: worker spec.
        device: device to compute on.
        parts: parts to compute, in order.
        limit_s: time limit of the task in seconds, or None if there is none.
    """

    def __init__(
        self,
        order: PickledWorkerSpec,
        device: str,
        parts: Sequence[Part],
        limit_s: float | None = None,
    ) -> None:
        self._order = order
        self._device = device
        self._parts = parts
        self._limit_s = limit_s
        self._runs_in_vain = 0
        self._done: list[PartResult] = []

    def __call__(self) -> TaskResult:
        """Compute and commit those parts that are missing, until told to end."""
        began = time.monotonic()
        order = self._order.open()
        self._done = []
        ready_s: float | None = None
        work = None
        missing = list(self._parts)

        def at() -> str:
            return rows_text([work.part] if work is not None and work.part is not None else missing)

        name = f"task {os.environ.get('SLURM_JOB_ID', os.getpid())} on {self._device}"
        with add_worker_context(name, at):
            try:
                with _told_to_end(self._limit_s, order) as told:
                    missing = order.part_task.missing(order.root, self._parts)
                    if not missing:
                        return TaskResult([], WorkerStats())
                    heartbeat = Heartbeat(
                        open_folder(order.root), name, order.driver, outlives=True
                    )
                    with heartbeat, worker_context(order, self._device) as context:
                        ready_s = time.monotonic() - began
                        work = PartWorker(context, order, self._done.append, heartbeat)
                        return TaskResult(self._done, work.do(iter(missing)))
            except Interrupted:
                ran_s = time.monotonic() - began
        doing = (
            f"not ready after {ran_s:.0f} s"
            if ready_s is None
            else f"ready after {ready_s:.0f} s, computed for {ran_s - ready_s:.0f} s"
        )
        return TaskResult(self._done, WorkerStats(), told[0], doing)

    def checkpoint(self) -> Any:
        """Submission by which submitit queues this task again; it computes what is missing then.

        Raises:
            RunError: MAX_LOSSES runs in succession committed nothing.
        """
        self._runs_in_vain = 0 if self._done else self._runs_in_vain + 1
        if self._runs_in_vain >= MAX_LOSSES:
            raise RunError(
                f"the task was told to end {MAX_LOSSES} times before it could commit a part of "
                f"{rows_text(self._parts[:1])}"
            )
        self._done = []  # results need not be pickled: the next run finds the parts committed
        return _submitit().helpers.DelayedSubmission(self)


@contextlib.contextmanager
def _told_to_end(limit_s: float | None, order: WorkerSpec) -> Iterator[list[str]]:
    """Raise Interrupted within the block when this task is told to end.

    It is told so by SIGTERM (scancel, preemption), by SIGUSR2 (Slurm's announcement of either,
    which submitit requests), or by a timer of its own: Slurm announces a time limit up to a minute
    early, which may be all of a short limit. If the driver is gone, an announcement is left to
    submitit, which queues the task again.

    Args:
        limit_s: time limit of the task in seconds, or None if there is none.
        order: worker spec, which names the driver.

    Yields:
        list of one text: what told the task to end, TIME_LIMIT or the name of a signal.
    """
    told = ["SIGTERM"]
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    by_submitit = signal.getsignal(signal.SIGUSR2)

    def end(signum: int, frame: object) -> None:
        raise Interrupted(signal.SIGTERM)

    def announced(signum: int, frame: Any) -> None:
        if callable(by_submitit) and not _driver_lives(order):
            by_submitit(signum, frame)
            return
        if told[0] != TIME_LIMIT:
            told[0] = "SIGUSR2"
        os.kill(os.getpid(), signal.SIGTERM)  # `end`, or the handler of a run in progress

    def time_is_over() -> None:  # in the thread of the timer; signals arrive in the main thread
        told[0] = TIME_LIMIT
        os.kill(os.getpid(), signal.SIGUSR2)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, announced),
    }
    timer = None
    if limit_s is not None:
        timer = threading.Timer(seconds_left(limit_s) - _end_margin_s(limit_s), time_is_over)
        timer.daemon = True
        timer.start()
    try:
        yield told
    finally:
        if timer is not None:
            timer.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_margin_s(limit_s: float) -> float:
    """Seconds before its time limit at which a task stops, in order to commit complete parts."""
    return min(SIGNAL_DELAY_S, limit_s / 6)


def _driver_lives(order: WorkerSpec) -> bool:
    """Whether a driver is alive that submits again what a task leaves undone."""
    try:
        signs = signs_of_life(order.root)
    except OSError:
        return True  # the store cannot be read now
    return any(sign.alive for sign in signs if sign.path.name == order.driver)


class _Array:
    """Tasks of a run as seen by the driver.

    Args:
        order: worker spec for every task.
        context: run context of the driver.
        session: write session of the store or statistics.
        folder: folder for the pickled tasks, their results and logs.

    Attributes:
        collector: results and measurements of the tasks so far.
        num_tasks: number of tasks that share the parts.
    """

    def __init__(
        self, order: WorkerSpec, context: RunContext, session: Session, folder: Path
    ) -> None:
        keys = context.config.executor
        self._missing = {part.index: part for part in session.missing()}
        self.collector = ResultCollector(sum(map(len, self._missing.values())))
        self.num_tasks = max(1, min(keys.workers or _TASKS, len(self._missing)))
        self._order = order
        self._session = session
        self._limit_s = keys.task_seconds
        self._device = str(context.engine.device).partition(":")[0]
        self._folder = folder
        self._executor = _executor(context.config, folder)
        self._jobs: dict[Any, list[Part]] = {}  # job of submitit -> its parts
        self._ended_at: dict[Any, float] = {}  # jobs that have ended without a result so far
        self._losses: Counter[int] = Counter()  # index of a part -> tasks that ended at it
        self._unsubmitted: list[Part] = []
        self._submit_at = 0.0
        self._queue = None if keys.mode == "local" else SlurmQueue(self._report)

    def work(self) -> None:
        """Submit the parts and follow the tasks until every part is committed."""
        session = self._session
        with (
            stop_signals() as stop,
            Progress(session.rows_asked, session.rows_done) as self._progress,
        ):
            try:
                if self._missing:
                    self._submit(list(self._missing.values()), is_first=True)
                while self._missing or self._jobs:
                    ended = self._ended()
                    self._look_at_parts()
                    for job, state in ended:
                        self._look_at_job(job, state)
                    if self._unsubmitted and time.monotonic() >= self._submit_at:
                        self._submit(self._unsubmitted)
                    if stop:
                        raise Interrupted(stop[0])
                    time.sleep(POLL_S if self._missing or self._jobs else 0)
            finally:
                self._cancel()

    def _report(self, text: str) -> None:
        """Print a line for the user."""
        self._progress.tell(text)

    def _submit(self, parts: Sequence[Part], is_first: bool = False) -> None:
        """Submit parts as tasks; during a run they wait if Slurm cannot take them now.

        Args:
            parts: parts to submit; committed ones are left out.
            is_first: whether nothing has been submitted yet.

        Raises:
            ConfigError: Slurm refuses what the config requests.
            RunError: the controller does not answer the first submission, or refuses a later one.
        """
        parts = [part for part in parts if part.index in self._missing]
        self._unsubmitted = []
        if not parts:
            return
        chunks = list(_chunks(parts, self.num_tasks))
        order = PickledWorkerSpec(self._order)
        limit_s = self._limit_s
        try:
            with self._executor.batch():
                tasks = [Task(order, self._device, chunk, limit_s) for chunk in chunks]
                jobs = [self._executor.submit(task) for task in tasks]
        except _submitit().core.utils.FailedJobError as error:  # with what sbatch printed
            said = str(error)
            if is_first:
                raise _refused(self._executor, said) from error
            if not is_no_controller(said):
                raise RunError(
                    f"Slurm does not take the tasks again ({last_line(said)}). Nothing committed "
                    "is lost; the same command goes on."
                ) from error
            self._unsubmitted, self._submit_at = parts, time.monotonic() + SUBMIT_AGAIN_S
            self._report(
                f"the controller of Slurm does not answer ({last_line(said)}); "
                f"{counted(len(parts), 'part is', 'parts are')} submitted again in "
                f"{SUBMIT_AGAIN_S:.0f} s"
            )
            return
        self._jobs |= dict(zip(jobs, chunks, strict=True))
        ids = ", ".join(job.job_id for job in jobs[:3]) + (", ..." if len(jobs) > 3 else "")
        self._report(f"submitted {counted(len(jobs), 'task')}: {ids}")

    def _ended(self) -> list[tuple[Any, TaskState | None]]:
        """Find the tasks that have ended.

        Returns:
            each task with None, or with its state if it left no result.
        """
        if self._queue is None:
            return [(job, None) for job in self._jobs if job.done()]
        now = time.monotonic()
        # Listing the folder shows new files even if a network file system caches lookups of names.
        results = {path.name for path in self._folder.glob("*_result.pkl")}
        states = self._queue.states([job.job_id for job in self._jobs])
        ended: list[tuple[Any, TaskState | None]] = []
        for job in self._jobs:
            if job.paths.result_pickle.name in results:
                ended.append((job, None))
            elif (state := states.get(job.job_id)) is not None and state.has_ended:
                if now - self._ended_at.setdefault(job, now) >= RESULT_S:
                    ended.append((job, state))
            else:
                self._ended_at.pop(job, None)
        return ended

    def _look_at_parts(self) -> None:
        """Record the parts that were committed since the last look, whoever committed them."""
        is_first = not self.collector.begun
        for part, failures in self._session.arrived(list(self._missing.values())):
            del self._missing[part.index]
            self._session.committed(part, failures)
            if not self.collector.begun:
                self._progress.begin()
            self.collector.add(PartResult(part, failures, {}, 0.0, 0.0), before=is_first)
            self._progress.step(len(part), len(failures), 0.0)
            self.collector.refuse_failures(self._order, self._session)

    def _look_at_job(self, job: Any, state: TaskState | None) -> None:
        """Take the result of an ended task; submit again what it left undone.

        Args:
            job: job of submitit that has ended.
            state: state of a task without a result, otherwise None.
        """
        parts = self._jobs.pop(job)
        self._ended_at.pop(job, None)
        if state is not None:
            text = f"was lost ({_with_last_words(job, state)})"
            self._lost(job, parts, text, is_late=state.state == "TIMEOUT")
            return
        try:
            result: TaskResult = job.result()
        except Exception as error:  # submitit re-raises here whatever the task raised
            if type(error).__name__ == "FailedJobError":  # with the task's traceback
                raise self._failed(job, error) from error
            self._lost(job, parts, f"was lost ({str(error).strip().splitlines()[0][:200]})")
            return
        for each in result.done:
            self.collector.underflow_rows.update(each.underflow_rows)
        self.collector.worker_stats.add(result.worker_stats)
        if result.read_by == TIME_LIMIT:
            self._lost(job, parts, f"reached its time limit ({result.doing})", is_late=True)
        elif result.read_by is not None:
            self._lost(job, parts, f"was told to end by {result.read_by} ({result.doing})")

    def _failed(self, job: Any, error: Exception) -> RunError:
        """Error for a task that raised one."""
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "RunError: " in line), lines[-1])
        said = said.rpartition("RunError: ")[2].rstrip(".")
        failed = RunError(
            f"job {job.job_id}: {said}. Nothing committed is lost; the same command goes on."
        )
        failed.add_note(str(error))
        return failed

    def _lost(self, job: Any, parts: Sequence[Part], how: str, is_late: bool = False) -> None:
        """Submit again what a task left undone that ended early.

        Args:
            job: job of submitit that has ended.
            parts: parts of the task.
            how: how it ended, the rest of a sentence.
            is_late: whether its time limit ended it.

        Raises:
            RunError: MAX_LOSSES tasks have ended at the same part.
        """
        self.collector.is_complete = False
        left = [part for part in parts if part.index in self._missing]
        if not left:
            return
        self._losses[left[0].index] += 1
        if self._losses[left[0].index] >= MAX_LOSSES:
            advice = self._advice(left[0]) if is_late else ""
            raise RunError(
                f"job {job.job_id} {how}, as {MAX_LOSSES - 1} tasks before it that had to begin "
                f"with {rows_text(left[:1])}.{advice} Its logs are in {self._folder}. Nothing "
                "committed is lost; the same command goes on."
            )
        self._report(f"job {job.job_id} {how}; {_parts_text(left)} submitted again")
        self._submit([*self._unsubmitted, *left])

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
            f"{advice}, or begin the store anew with smaller parts: overwrite=true "
            f"part_rows={layout.power_of_two_at_most(len(part) / 4)}, with a batch_size of no more "
            "than that."
        )

    def _cancel(self) -> None:
        """Cancel all tasks, whatever ends the run."""
        if self._queue is not None:
            self._queue.cancel(job.job_id for job in self._jobs)
            return
        for job in self._jobs:
            job.cancel(check=False)


def _parts_text(left: Sequence[Part]) -> str:
    """Parts that a task left undone, as the subject of a sentence."""
    return "its missing part is" if len(left) == 1 else f"its {len(left)} missing parts are"


def _with_last_words(job: Any, state: TaskState) -> str:
    """State of a task that left no result, with the last error line of its log, if any."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in job.paths.stderr.read_text(errors="replace").split("\n")]
        # The last lines of srun about a killed task name no reason; lines with "error" do.
        errors = [line for line in lines if "error" in line.lower()]
        if said := errors or [line for line in lines if line]:
            return f"{state}; its log: {said[-1][:200]}"
    return str(state)


def _refused(executor: Any, said: str) -> Exception:
    """Error for tasks that sbatch did not accept, from what it printed."""
    if is_no_controller(said):
        return no_controller(said)
    parameters = {
        "cpus_per_task": "executor.cpus",
        "mem": "executor.memory_gib",
        "time": "executor.time_limit_min",
        "partition": "executor.partition",
        "gres": "executor.gres",
        "account": "executor.account",
    }
    asked = getattr(executor, "parameters", {})
    given = [f"{key}={asked[name]}" for name, key in parameters.items() if name in asked]
    return ConfigError(
        f"Slurm does not take the tasks: {last_line(said)}. They ask for {', '.join(given)}; "
        "`sinfo` and `scontrol show partition` tell what the cluster has."
    )


def _chunks(parts: Sequence[Part], count: int) -> Iterator[list[Part]]:
    """Split parts into at most `count` lists of neighbouring parts of about the same length."""
    count = min(count, len(parts))
    for number in range(count):
        begin, end = number * len(parts) // count, (number + 1) * len(parts) // count
        yield list(parts[begin:end])


def _folder_of_tasks(config: Config, session: Session) -> Path:
    """Folder for the pickled tasks, their results and logs.

    Raises:
        ConfigError: the folder of executor.folder cannot be created.
    """
    given = config.executor.folder
    if given is None:
        return session.root / layout.JOBS
    folder = Path(given).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One folder per driver: a store in a bucket has no lock that keeps a second driver out.
        return Path(tempfile.mkdtemp(prefix="featx-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"executor.folder={given}: {error.strerror}. It takes what the tasks are to do and "
            "their logs; choose a folder that all machines can write to."
        ) from error


def _executor(config: Config, folder: Path) -> Any:
    """Executor of submitit with the resources that the config requests."""
    keys = config.executor
    mode = keys.mode or "slurm"
    more = {"slurm_max_num_timeout": _ENDLESS} if mode == "slurm" else {}
    executor = _submitit().AutoExecutor(folder=folder, cluster=mode, **more)
    limit_min = keys.time_limit_min or DEFAULT_TIME_LIMIT_MIN
    asked: dict[str, Any] = {
        "timeout_min": limit_min,
        "cpus_per_task": keys.num_cpus,
        "name": "featx",
    }
    if mode == "slurm":
        # Slurm announces a limit up to a minute early. That is a second safeguard for long limits
        # only: it would end a task with a short limit right after its start (0 means none).
        is_long = limit_min * 60 > 10 * SIGNAL_DELAY_S
        asked["slurm_signal_delay_s"] = SIGNAL_DELAY_S if is_long else 0
        asked["slurm_additional_parameters"] = {"requeue": True}
        if keys.memory_gib is not None:
            asked["mem_gb"] = keys.memory_gib
        for key in ("partition", "gres", "account"):
            if (value := getattr(keys, key)) is not None:
                asked[f"slurm_{key}"] = value
    try:
        executor.update_parameters(**asked)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"submitit does not take these settings: {error}") from error
    return executor


def _submitit() -> Any:
    """Import submitit, with its log messages below ERROR silenced.

    Raises:
        MissingExtraError: submitit is not installed.
    """
    try:
        import submitit
    except ImportError as error:
        raise MissingExtraError(
            'executor=slurm needs submitit: pip install "featx[slurm]".'
        ) from error
    logging.getLogger("submitit").setLevel(logging.ERROR)
    return submitit
