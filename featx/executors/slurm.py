"""executor=slurm: a job array over the parts, by submitit; each task has some that are neighbours.

The driver holds the store's lock (in a bucket there is none), waits for the tasks, notes the parts
that they commit, packs, and writes the summary. A task that is preempted or reaches its time limit
is queued again, and does what is missing of its parts.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from featx.config import Config
from featx.errors import ConfigError, MissingExtraError, RunError
from featx.executors.harvest import Done, Harvest, Labour, Outcome
from featx.executors.orders import Order, SentOrder, Session, prepared_as_ordered
from featx.executors.part_work import PartWork, blamed_on, rows_text
from featx.progress import Progress
from featx.run.prepare import Prepared
from featx.run.stopping import Interrupted, stop_signals
from featx.store import layout
from featx.store.commit import Disk
from featx.store.heartbeat import Heartbeat, clear_signs
from featx.store.object_disk import disk_at
from featx.types import Part

POLL_S = 2.0
SIGNAL_DELAY_S = 90
"""Before its time limit a task is told so; it commits what is whole and is queued again."""

MAX_LOSSES = 3
"""How often parts are submitted whose tasks ended without a word, before the run ends."""

_TASKS, _TIME_LIMIT_MIN = 8, 240


def check(config: Config) -> None:
    """Raise where submitit is not installed, or there is no Slurm."""
    _submitit()
    if config.executor.mode != "local" and shutil.which("srun") is None:
        raise ConfigError(
            "executor=slurm: there is no Slurm on this machine (srun is not found). Start the "
            "command on a machine of the cluster; executor.mode=local runs the same path here."
        )


def run(prepared: Prepared, session: Session, order: Order) -> Outcome:
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
    Disk(folder.parent).remove(folder)
    return array.harvest.outcome(array.num_tasks, order)


class Task:
    """What one task of the array does; pickled by submitit, and again when it is queued again."""

    def __init__(self, order: SentOrder, device: str, parts: Sequence[Part]) -> None:
        self._order = order
        self._device = device
        self._parts = parts

    def __call__(self) -> tuple[list[Done], Labour]:
        """Compute and commit what is missing of the parts.

        Returns:
            the parts that were done here and now, and what that took.
        """
        order = self._order.open()
        missing = order.product.missing(order.root, self._parts)
        done: list[Done] = []
        if not missing:
            return done, Labour()
        name = f"task {os.environ.get('SLURM_JOB_ID', os.getpid())} on {self._device}"
        work = None

        def at() -> str:
            return rows_text([work.part] if work is not None and work.part is not None else missing)

        # After a signal the system ends this task; if it was preempted, Slurm queues it again.
        with (
            blamed_on(name, at),
            Heartbeat(disk_at(order.root), name, order.driver, outlives=True) as heart,
            prepared_as_ordered(order, self._device) as prepared,
        ):
            work = PartWork(prepared, order, done.append, heart)
            return done, work.do(iter(missing))

    def checkpoint(self) -> Any:
        """What submitit queues again on preemption: the same, which does what is missing then."""
        return _submitit().helpers.DelayedSubmission(self)


class _Array:
    """The tasks of a run, as their driver follows them.

    Attributes:
        harvest: what was done so far.
        num_tasks: that share the parts.
    """

    def __init__(self, order: Order, prepared: Prepared, session: Session, folder: Path) -> None:
        keys = prepared.config.executor
        self._missing = {part.index: part for part in session.missing()}
        self.harvest = Harvest(sum(map(len, self._missing.values())))
        self.num_tasks = max(1, min(keys.tasks or _TASKS, len(self._missing)))
        self._order = order
        self._session = session
        self._device = str(prepared.engine.device).partition(":")[0]
        self._executor = _executor(prepared.config, folder)
        self._jobs: dict[Any, list[Part]] = {}
        self._losses: Counter[int] = Counter()

    def work(self) -> None:
        """Submit the parts and follow them until each is done."""
        session = self._session
        with (
            stop_signals() as stop,
            Progress(session.rows_asked, session.rows_done) as self._progress,
        ):
            try:
                if self._missing:
                    self._submit(list(self._missing.values()))
                while self._missing or self._jobs:
                    ended = [job for job in self._jobs if job.done()]
                    self._look_at_parts()
                    for job in ended:
                        self._look_at_job(job)
                    if stop:
                        raise Interrupted(stop[0])
                    time.sleep(POLL_S if self._missing or self._jobs else 0)
            finally:
                for job in self._jobs:
                    job.cancel(check=False)

    def _submit(self, parts: Sequence[Part]) -> None:
        chunks = list(_chunks(parts, self.num_tasks))
        order = SentOrder(self._order)
        with self._executor.batch():
            tasks = [Task(order, self._device, chunk) for chunk in chunks]
            jobs = [self._executor.submit(task) for task in tasks]
        self._jobs |= dict(zip(jobs, chunks, strict=True))
        ids = ", ".join(job.job_id for job in jobs[:3]) + (", ..." if len(jobs) > 3 else "")
        self._progress.tell(f"submitted {len(jobs)} tasks: {ids}")

    def _look_at_parts(self) -> None:
        """Note what is committed since the last look: the files say so, whoever wrote them."""
        is_first = not self.harvest.begun
        for part, failures in self._session.arrived(list(self._missing.values())):
            del self._missing[part.index]
            self._session.committed(part, failures)
            if not self.harvest.begun:
                self._progress.begin()
            self.harvest.add(Done(part, failures, {}, 0.0, 0.0), before=is_first)
            self._progress.step(len(part), len(failures), 0.0)
            self.harvest.refuse_failures(self._order, self._session)

    def _look_at_job(self, job: Any) -> None:
        """Take what a task that ended returned; submit again what a lost one left undone."""
        parts = self._jobs.pop(job)
        try:
            done, labour = job.result()
        except Exception as error:  # noqa: BLE001 - whatever the task raised comes through here
            self._lost(job, parts, error)
            return
        for each in done:
            self.harvest.faint.update(each.faint)
        self.harvest.labour.add(labour)

    def _lost(self, job: Any, parts: Sequence[Part], error: Exception) -> None:
        """A task failed (which ends the run), or was taken from us without a word."""
        raised = type(error).__name__ == "FailedJobError"  # submitit's, with the task's traceback
        left = [part for part in parts if part.index in self._missing]
        if raised:
            lines = [line for line in str(error).strip().splitlines() if line.strip()]
            said = next((line for line in reversed(lines) if "RunError: " in line), lines[-1])
            said = said.rpartition("RunError: ")[2].rstrip(".")
            told = RunError(
                f"job {job.job_id}: {said}. Nothing committed is lost; the same command goes on."
            )
            told.add_note(str(error))
            raise told
        if not left:
            return
        self._losses[left[0].index] += 1
        reason = str(error).strip().splitlines()[0][:200]
        if self._losses[left[0].index] >= MAX_LOSSES:
            raise RunError(
                f"job {job.job_id} and others before it ended without a word at {rows_text(left)}: "
                f"{reason}. Its logs are in {self._executor.folder}; the same command goes on."
            )
        self._progress.tell(f"job {job.job_id} was lost ({reason}); its parts are submitted again")
        self._submit(left)


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
    executor = _submitit().AutoExecutor(folder=folder, cluster=mode)
    asked: dict[str, Any] = {
        "timeout_min": keys.time_limit_min or _TIME_LIMIT_MIN,
        "cpus_per_task": keys.num_cpus,
        "name": "featx",
    }
    if mode == "slurm":
        asked["slurm_signal_delay_s"] = SIGNAL_DELAY_S
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
