"""executor=slurm: a job array over the parts, by submitit; each task has some that are neighbours.

The driver holds the store's lock (in a bucket there is none), waits for the tasks, notes the parts
that they commit, packs, and writes the summary. A task that is told to end, by its time limit, by
preemption or by scancel, commits what is whole and returns; the driver submits the rest again.
Where the driver is gone, the task is queued again by itself.
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
SIGNAL_DELAY_S = 90
"""At most this long before its time limit a task is told to end."""

MAX_LOSSES = 3
"""How often a part is submitted at which tasks ended, before that ends the run."""

RESULT_S = 15.0
"""How long the file of a task that has ended is waited for, which a shared disk may show late."""

SUBMIT_AGAIN_S = 30.0
"""In mid run a controller that does not answer is asked again after this."""

TIME_LIMIT = "its time limit"

_TASKS = 8
_ENDLESS = 10**9
"""How often submitit queues a task again after its time limit; `Task` counts those in vain."""


def check(config: Config) -> None:
    """Raise where submitit is not installed, or Slurm, its controller or the partition not there.

    Raises:
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


def run(prepared: RunContext, session: Session, order: WorkerSpec) -> RunOutcome:
    """Compute what is missing in tasks of a job array.

    Raises:
        RunError: a task failed; the message names it, the part and its rows.
        Interrupted: a signal asked for the end; the tasks were told to commit what is whole.
    """
    folder = _folder_of_tasks(prepared.config, session)
    array = _Array(order, prepared, session, folder)
    with Heartbeat(session.disk, "driver"):
        array.work()
    clear_signs(session.disk, order.driver)  # of tasks that were killed
    AtomicFolder(folder.parent).remove(folder)
    return array.harvest.outcome(array.num_tasks, order)


@dataclass(frozen=True)
class TaskResult:
    """What a task returns to the driver.

    Attributes:
        done: the parts that it committed.
        labour: what all of them took; nothing where it was told to end.
        told_by: what told it to end, TIME_LIMIT or a signal; None where all is done.
        doing: what it did until then.
    """

    done: Sequence[PartResult]
    labour: WorkerStats
    told_by: str | None = None
    doing: str = ""


class Task:
    """What one task of the array does; pickled by submitit, and again when it is queued again.

    Args:
        order: of the driver.
        device: to compute on.
        parts: to do, in order.
        limit_s: the time limit of the task; None where there is none.
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
        """Compute and commit what is missing of the parts, until told to end."""
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
                    missing = order.product.missing(order.root, self._parts)
                    if not missing:
                        return TaskResult([], WorkerStats())
                    heart = Heartbeat(open_folder(order.root), name, order.driver, outlives=True)
                    with heart, worker_context(order, self._device) as prepared:
                        ready_s = time.monotonic() - began
                        work = PartWorker(prepared, order, self._done.append, heart)
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
        """What submitit queues again: the same, which does what is missing then.

        Raises:
            RunError: nothing was committed in MAX_LOSSES runs.
        """
        self._runs_in_vain = 0 if self._done else self._runs_in_vain + 1
        if self._runs_in_vain >= MAX_LOSSES:
            raise RunError(
                f"the task was told to end {MAX_LOSSES} times before it could commit a part of "
                f"{rows_text(self._parts[:1])}"
            )
        self._done = []  # it does not travel
        return _submitit().helpers.DelayedSubmission(self)


@contextlib.contextmanager
def _told_to_end(limit_s: float | None, order: WorkerSpec) -> Iterator[list[str]]:
    """Raise Interrupted within the block when this task is told to end.

    That is SIGTERM (scancel, preemption), SIGUSR2 (Slurm's announcement of either, as submitit
    asks for it), or a clock of our own: Slurm announces a time limit up to a minute too early,
    which is all of a short one. Where the driver is gone, an announcement is left to submitit,
    which queues the task again.

    Args:
        limit_s: the time limit of the task; None where there is none.
        order: of the driver.

    Yields:
        one text, what told it: TIME_LIMIT or the name of a signal.
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
        os.kill(os.getpid(), signal.SIGTERM)  # for whoever handles it now: a run in progress

    def time_is_over() -> None:
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
    """Seconds that a task keeps to commit what is whole before its time limit."""
    return min(SIGNAL_DELAY_S, limit_s / 6)


def _driver_lives(order: WorkerSpec) -> bool:
    """Whether there is somebody who submits what a task leaves undone."""
    try:
        signs = signs_of_life(order.root)
    except OSError:
        return True  # the store cannot be asked now
    return any(sign.alive for sign in signs if sign.path.name == order.driver)


class _Array:
    """The tasks of a run, as their driver follows them.

    Attributes:
        harvest: what was done so far.
        num_tasks: that share the parts.
    """

    def __init__(
        self, order: WorkerSpec, prepared: RunContext, session: Session, folder: Path
    ) -> None:
        keys = prepared.config.executor
        self._missing = {part.index: part for part in session.missing()}
        self.harvest = ResultCollector(sum(map(len, self._missing.values())))
        self.num_tasks = max(1, min(keys.tasks or _TASKS, len(self._missing)))
        self._order = order
        self._session = session
        self._limit_s = keys.task_seconds
        self._device = str(prepared.engine.device).partition(":")[0]
        self._folder = folder
        self._executor = _executor(prepared.config, folder)
        self._jobs: dict[Any, list[Part]] = {}
        self._ended_at: dict[Any, float] = {}
        self._losses: Counter[int] = Counter()
        self._unsubmitted: list[Part] = []
        self._submit_at = 0.0
        self._queue = None if keys.mode == "local" else SlurmQueue(self._report)

    def work(self) -> None:
        """Submit the parts and follow them until each is done."""
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
        self._progress.tell(text)

    def _submit(self, parts: Sequence[Part], is_first: bool = False) -> None:
        """Submit parts as tasks; in mid run those wait that Slurm cannot take now.

        Raises:
            ConfigError: Slurm refuses what the config asks for.
            RunError: its controller does not answer at first, or refuses something in mid run.
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
        """The tasks that have ended.

        Returns:
            each with its state where it left no result.
        """
        if self._queue is None:
            return [(job, None) for job in self._jobs if job.done()]
        now = time.monotonic()
        # One listing shows what is new also where a network disk would answer from its memory.
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
        """Note what is committed since the last look: the files say so, whoever wrote them."""
        is_first = not self.harvest.begun
        for part, failures in self._session.arrived(list(self._missing.values())):
            del self._missing[part.index]
            self._session.committed(part, failures)
            if not self.harvest.begun:
                self._progress.begin()
            self.harvest.add(PartResult(part, failures, {}, 0.0, 0.0), before=is_first)
            self._progress.step(len(part), len(failures), 0.0)
            self.harvest.refuse_failures(self._order, self._session)

    def _look_at_job(self, job: Any, state: TaskState | None) -> None:
        """Take what a task that ended returned; submit again what it left undone.

        Args:
            job: that ended.
            state: of a task without a result.
        """
        parts = self._jobs.pop(job)
        self._ended_at.pop(job, None)
        if state is not None:
            text = f"was lost ({_with_last_words(job, state)})"
            self._lost(job, parts, text, is_late=state.state == "TIMEOUT")
            return
        try:
            result: TaskResult = job.result()
        except Exception as error:  # whatever the task raised comes through here
            if type(error).__name__ == "FailedJobError":  # with the task's traceback
                raise self._failed(job, error) from error
            self._lost(job, parts, f"was lost ({str(error).strip().splitlines()[0][:200]})")
            return
        for each in result.done:
            self.harvest.faint.update(each.faint)
        self.harvest.labour.add(result.labour)
        if result.told_by == TIME_LIMIT:
            self._lost(job, parts, f"reached its time limit ({result.doing})", is_late=True)
        elif result.told_by is not None:
            self._lost(job, parts, f"was told to end by {result.told_by} ({result.doing})")

    def _failed(self, job: Any, error: Exception) -> RunError:
        """The error for a task that raised one."""
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "RunError: " in line), lines[-1])
        said = said.rpartition("RunError: ")[2].rstrip(".")
        failed = RunError(
            f"job {job.job_id}: {said}. Nothing committed is lost; the same command goes on."
        )
        failed.add_note(str(error))
        return failed

    def _lost(self, job: Any, parts: Sequence[Part], how: str, is_late: bool = False) -> None:
        """Submit again what a task left undone that ended before its time.

        Args:
            job: that ended.
            parts: of the task.
            how: it ended, the rest of a sentence.
            is_late: its time limit ended it.

        Raises:
            RunError: MAX_LOSSES tasks have ended at the same part.
        """
        self.harvest.is_labour_complete = False
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
        """What to change where the time limit ends tasks before they can commit a part."""
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
        """No task goes on, whatever ends the run."""
        if self._queue is not None:
            self._queue.cancel(job.job_id for job in self._jobs)
            return
        for job in self._jobs:
            job.cancel(check=False)


def _parts_text(left: Sequence[Part]) -> str:
    """The parts that a task left undone, as a subject."""
    return "its missing part is" if len(left) == 1 else f"its {len(left)} missing parts are"


def _with_last_words(job: Any, state: TaskState) -> str:
    """The state of a task that left no result, and what its log says of it, if anything."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in job.paths.stderr.read_text(errors="replace").split("\n")]
        # srun ends its report on a task that was killed with lines that say nothing more.
        errors = [line for line in lines if "error" in line.lower()]
        if said := errors or [line for line in lines if line]:
            return f"{state}; its log: {said[-1][:200]}"
    return str(state)


def _refused(executor: Any, said: str) -> Exception:
    """The error for tasks that sbatch did not take, by what it printed."""
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
    """Neighbouring parts in at most `count` lists of about the same length."""
    count = min(count, len(parts))
    for number in range(count):
        begin, end = number * len(parts) // count, (number + 1) * len(parts) // count
        yield list(parts[begin:end])


def _folder_of_tasks(config: Config, session: Session) -> Path:
    """Where tasks find what they are to do, and leave what they say.

    Raises:
        ConfigError: there can be no such folder where the config wants it.
    """
    given = config.executor.folder
    if given is None:
        return session.root / layout.JOBS
    folder = Path(given).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One for each driver: nothing but conditions keeps two from one store in a bucket.
        return Path(tempfile.mkdtemp(prefix="featx-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"executor.folder={given}: {error.strerror}. It takes what the tasks are to do and "
            "their logs; choose a folder that all machines can write to."
        ) from error


def _executor(config: Config, folder: Path) -> Any:
    """submitit's, with what the config asks of the cluster."""
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
        # Slurm's own announcement comes up to a minute early. It is a second clock for long limits
        # only: for a short one it would end a task that has just begun (0: none).
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
    try:
        import submitit
    except ImportError as error:
        raise MissingExtraError(
            'executor=slurm needs submitit: pip install "featx[slurm]".'
        ) from error
    logging.getLogger("submitit").setLevel(logging.ERROR)
    return submitit
