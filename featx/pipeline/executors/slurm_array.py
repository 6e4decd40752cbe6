"""Tasks of a Slurm job array as the driver sees them."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from featx.base import module_command, module_environment
from featx.errors import ConfigError, FeatxError, RunError, counted
from featx.pipeline.executors.slurm_queue import (
    SlurmQueue,
    TaskState,
    counted_states,
    is_no_controller,
    last_line,
    no_controller,
    run_command,
)
from featx.pipeline.executors.slurm_task import SIGNAL_DELAY_S
from featx.pipeline.executors.worker import TIME_LIMIT
from featx.pipeline.executors.worker_pool import RESUME_HINT, WorkerPool
from featx.pipeline.executors.worker_spec import Session, WorkerSpec
from featx.store import layout
from featx.types import Part

SUBMIT_AGAIN_S = 30.0
"""Seconds until tasks are submitted again if the controller does not answer during a run."""


class JobArray(WorkerPool):
    """Tasks of Slurm; a task ends early at its time limit, by preemption or by scancel.

    `requests` is option of sbatch -> option of the executor and value.
    """

    poll_s = 2.0
    replacement = "its work is submitted again"
    report_s = 15.0

    def __init__(
        self,
        spec: WorkerSpec,
        session: Session,
        folder: Path,
        num_tasks: int,
        device: str,
        requests: Mapping[str, tuple[str, object]],
    ) -> None:
        super().__init__(spec, session, folder, num_tasks, "task", outlives_driver=True)
        self._device = device
        self._requests = requests
        self._queue = SlurmQueue(lambda text: self.progress.log(text))
        self._ids: dict[int, str] = {}  # number of a task -> its id in Slurm
        self._unsent: list[int] = []  # numbers of tasks that Slurm could not take so far
        self._submit_at = 0.0

    def name(self, number: int) -> str:
        """Name of a task: 'job 7_0'."""
        return f"job {self._ids[number]}"

    def start(self, numbers: Sequence[int]) -> None:
        """Submit tasks as one array; during a run they wait if the controller does not answer."""
        numbers = [*self._unsent, *numbers]
        code, out, error = run_command(self._command(numbers), module_environment())
        if code != 0:
            if not self._ids:
                raise self._submission_error(error)
            if not is_no_controller(error):
                raise RunError(
                    f"Slurm does not take the tasks again ({last_line(error)}). {RESUME_HINT}"
                )
            self._unsent = numbers
            self._submit_at = time.monotonic() + SUBMIT_AGAIN_S
            self.progress.log(
                f"the controller of Slurm does not answer ({last_line(error)}); "
                f"{counted(len(numbers), 'task is', 'tasks are')} submitted again in "
                f"{SUBMIT_AGAIN_S:.0f} s"
            )
            return
        self._unsent = []
        job = out.strip().partition(";")[0]  # the name of the cluster may follow
        ids = [f"{job}_{index}" for index in range(len(numbers))]
        self._ids.update(zip(numbers, ids, strict=True))
        shown = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
        self.progress.log(f"submitted {counted(len(ids), 'task')}: {shown}")

    def ended(self) -> Mapping[int, str]:
        """Find the tasks that left a result, and those that have ended without one."""
        if self._unsent and time.monotonic() >= self._submit_at:
            self.start([])
        # Listing the folder shows new files even if a network file system caches lookups of names.
        results = {path.name for path in self.spec.folder.glob("result-*.json")}
        sent = {number: self._ids[number] for number in self.workers if number in self._ids}
        states = self._queue.states(list(sent.values()))
        self.heartbeat.set_queue(counted_states(states.values()))
        ended = {}
        for number, task in sent.items():
            if f"result-{number}.json" in results:
                ended[number] = "has ended"
            elif (state := states.get(task)) is not None and state.has_ended:
                ended[number] = f"was lost ({self._state_text(number, state)})"
        return ended

    def end_workers(self, grace_s: float) -> None:
        """Cancel all tasks; Slurm gives them time to commit complete parts."""
        # Slurm may have put a task that it preempted into the queue again.
        numbers = [*self.workers, *self.lost]
        self._queue.cancel([self._ids[number] for number in numbers if number in self._ids])

    def advice(self, number: int, how: str, parts: Sequence[Part]) -> str:
        """Say where the logs are and, for tasks that reach their time limit, what to change."""
        logs = f" Its logs are in {self.spec.folder}."
        if TIME_LIMIT not in how and "TIMEOUT" not in how:
            return logs
        rows = max(map(len, parts or self.spec.parts))
        advice = (
            f" Within executor.time_limit_min={self._requests['time'][1]} a task has to load the "
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
        """Command that submits tasks with consecutive numbers."""
        minutes = int(str(self._requests["time"][1]))
        task = module_command("featx.pipeline.executors.slurm_task", str(self.spec.folder))
        number = f"$(({numbers[0]} + SLURM_ARRAY_TASK_ID))"
        options = {
            "job-name": "featx",
            "array": f"0-{len(numbers) - 1}",
            "ntasks": 1,
            "output": self.spec.folder / "%A_%a.log",
            "open-mode": "append",
            **{option: value for option, (_, value) in self._requests.items()},
            "wrap": f"exec {shlex.join(task)} {number} {self._device} {60 * minutes}",
        }
        # Slurm announces a limit up to a minute early. That is a second safeguard for long limits
        # only: it would end a task with a short limit right after its start.
        if minutes * 60 > 10 * SIGNAL_DELAY_S:
            options["signal"] = f"B:USR2@{SIGNAL_DELAY_S}"
        given = [f"--{option}={value}" for option, value in options.items()]
        return ["sbatch", "--parsable", "--requeue", *given]

    def _state_text(self, number: int, state: TaskState) -> str:
        """State of a task that left no result, with the last error line of its log, if any."""
        log = self.spec.folder / f"{self._ids[number]}.log"
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in log.read_text(errors="replace").split("\n")]
            # The last lines about a killed task name no reason; lines with "error" do.
            errors = [line for line in lines if "error" in line.lower()]
            if shown := errors or [line for line in lines if line]:
                return f"{state}; its log: {shown[-1][:200]}"
        return str(state)

    def _submission_error(self, output: str) -> FeatxError:
        """Error for tasks that sbatch did not accept, from what it printed."""
        if is_no_controller(output):
            return no_controller(output)
        requested = ", ".join(f"executor.{key}={value}" for key, value in self._requests.values())
        return ConfigError(
            f"Slurm does not take the tasks: {last_line(output)}. They ask for {requested}; "
            "`sinfo` and `scontrol show partition` show what the cluster has."
        )
