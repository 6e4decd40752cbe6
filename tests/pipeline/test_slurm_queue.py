"""What is made of the answers of squeue, sinfo and scancel: stand-ins on PATH give them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_worker import StubTask, stub_spec

from featx.config import Config
from featx.errors import ConfigError, RunError
from featx.pipeline.executors import slurm
from featx.pipeline.executors.job_folder import WorkerReport, result_path
from featx.pipeline.executors.slurm import JobArray, SlurmOptions
from featx.storage import AtomicFolder
from featx.types import Part

NOBODY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
PARTS = [Part(index, 4 * index, 4 * index + 4) for index in range(3)]

Answer = Callable[..., None]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Have a command print something and end with an exit code; its arguments go to NAME.args."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answer(name: str, out: str = "", error: str = "", code: int = 0) -> None:
        (tmp_path / f"{name}.out").write_text(out)
        (tmp_path / f"{name}.err").write_text(error)
        script = tmp_path / name
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.args\ncat {tmp_path}/{name}.out\n'
            f"cat {tmp_path}/{name}.err >&2\nexit {code}\n"
        )
        script.chmod(0o755)

    answer("sbatch", "7\n")
    return answer


class Queue:
    """Three tasks of job 7: 7_0, 7_1 and 7_2.

    Attributes:
        output: lines printed for the user.
        queue: states of tasks that job=status shows.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self._now)
        self.output: list[str] = []
        self.queue: list[Any] = []
        session: Any = SimpleNamespace(root=root, disk=AtomicFolder(root))
        spec = stub_spec(root, PARTS, Config(), StubTask(SimpleNamespace(), root, root))  # type: ignore[arg-type]
        self.pool = JobArray(spec, session, root / "jobs", "cpu", SlurmOptions(workers=3))
        self.pool.progress = SimpleNamespace(log=self.output.append)  # type: ignore[assignment]
        self.pool.heartbeat = SimpleNamespace(set_queue=self._set_queue)  # type: ignore[assignment]
        self.pool.spec.folder.mkdir(parents=True)

    def _set_queue(self, queue: list[Any]) -> None:
        self.queue = queue

    def submit(self) -> None:
        self.pool.workers = [0, 1, 2]
        self.pool.start([0, 1, 2])

    def ended(self) -> Mapping[int, str]:
        """The tasks that have ended, when squeue is asked again."""
        self._now += slurm.ASK_S
        return self.pool.ended()


@pytest.fixture
def queue(answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(tmp_path / "store", monkeypatch)
    made.submit()
    assert made.output == ["submitted 3 tasks: 7_0, 7_1, 7_2"]
    made.output.clear()
    return made


def test_states_come_from_squeue_which_is_not_asked_too_often(
    answer: Answer, queue: Queue, tmp_path: Path
) -> None:
    answer(
        "squeue", "7_0|RUNNING|None\n7_1|PENDING|Resources\n7_2|CANCELLED|None\n9|RUNNING|None\n"
    )
    assert queue.ended() == {2: "was lost (CANCELLED)"}
    assert [(each.tasks, each.state, each.reason) for each in queue.queue] == [
        (1, "CANCELLED", ""), (1, "PENDING", "Resources"), (1, "RUNNING", ""),
    ]  # fmt: skip
    queue.pool.ended()
    queue.ended()
    asked = (tmp_path / "squeue.args").read_text().splitlines()
    assert len(asked) == 2
    assert asked[0].endswith("--jobs=7")


def test_a_task_that_left_a_result_was_not_lost(answer: Answer, queue: Queue) -> None:
    answer("squeue", "7_0|COMPLETED|None\n7_1|RUNNING|None\n7_2|FAILED|None\n")
    for number in (0, 1):
        result_path(queue.pool.spec, number).write_text(WorkerReport().to_json())
    (queue.pool.spec.folder / "2.log").write_text("Traceback ...\nOSError: no memory\n\n")
    ended = queue.ended()
    assert list(ended) == [0, 1, 2]
    assert ended[2] == "was lost (FAILED; its log: OSError: no memory)"


def test_a_task_that_the_controller_has_forgotten_has_ended(answer: Answer, queue: Queue) -> None:
    answer("squeue", "7_0|RUNNING|None\n7_2|RUNNING|None\n")
    assert queue.ended() == {1: "was lost (no longer known to Slurm)"}
    assert queue.output == []


def test_a_job_that_squeue_knows_nothing_of_has_ended(answer: Answer, queue: Queue) -> None:
    answer("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert list(queue.ended()) == [0, 1, 2]


def test_a_task_that_is_forgotten_tells_what_it_was_and_one_that_is_queued_again_is_not_lost(
    answer: Answer, queue: Queue
) -> None:
    answer("squeue", "7_0|NODE_FAIL|None\n7_1|OUT_OF_MEMORY|None\n7_2|RUNNING|None\n")
    assert queue.ended() == {0: "was lost (NODE_FAIL)", 1: "was lost (OUT_OF_MEMORY)"}
    answer("squeue", "7_0|PENDING|BeginTime\n7_2|RUNNING|None\n")
    for _ in range(2):
        assert queue.ended() == {1: "was lost (OUT_OF_MEMORY)"}


def test_tasks_that_could_not_be_submitted_again_ask_for_nothing(
    answer: Answer, queue: Queue, tmp_path: Path
) -> None:
    answer("sbatch", error=NOBODY, code=1)
    answer("squeue")
    queue.pool.workers = [3, 4]
    queue.pool.start([3, 4])
    assert queue.output == [
        f"the controller of Slurm does not answer ({NOBODY}); 2 tasks are submitted again when it "
        "does"
    ]
    assert queue.ended() == {}
    assert not (tmp_path / "squeue.args").exists()
    answer("sbatch", "8\n")
    queue.ended()
    assert queue.output[1:] == ["submitted 2 tasks: 8_0, 8_1"]
    assert (tmp_path / "squeue.args").read_text().endswith("--jobs=8\n")
    answer("sbatch", error="sbatch: error: Invalid account", code=1)
    with pytest.raises(RunError, match=r"Invalid account\. They were .* committed is lost"):
        queue.pool.start([5])


def test_a_controller_that_does_not_answer_says_nothing_of_tasks(
    answer: Answer, queue: Queue
) -> None:
    answer("squeue", error=NOBODY, code=1)
    for _ in range(10):
        assert queue.ended() == {}
    assert len(queue.output) == 2, "once a minute"
    assert f"does not answer ({NOBODY}); running tasks continue" in queue.output[0]


def test_why_tasks_wait_is_said_every_minute(answer: Answer, queue: Queue) -> None:
    answer("squeue", "7_0|RUNNING|None\n7_1|PENDING|Resources\n7_2|PENDING|JobHeldUser\n")
    for _ in range(15):
        queue.ended()
    assert queue.output == ["2 of 3 tasks wait in the queue: Resources (1), JobHeldUser (1)"] * 3, (
        "after 10 s, 70 s and 130 s"
    )
    answer("squeue", "7_0|RUNNING|None\n7_1|RUNNING|None\n7_2|RUNNING|None\n")
    for _ in range(8):
        queue.ended()
    assert len(queue.output) == 3


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (NOBODY, RunError, 1),
        ("slurm_load_partitions: Socket timed out on send/recv operation", RunError, 1),
        ("sinfo: fatal: Could not establish a configuration source", ConfigError, 2),
    ],
)
def test_without_a_controller_nothing_begins(
    answer: Answer, error: str, kind: type[Exception], code: int
) -> None:
    answer("sinfo", error=error, code=1)
    with pytest.raises(kind) as output:
        slurm.check(SlurmOptions(), Config())
    assert getattr(output.value, "exit_code", None) == code
    assert f"Slurm does not answer ({error}). Nothing was submitted." in str(output.value)


def test_the_cluster_that_sbatch_has_chosen_is_asked(
    answer: Answer, queue: Queue, tmp_path: Path
) -> None:
    """With several in SLURM_CLUSTERS, each numbers its jobs."""
    for name, output in (("sbatch", "8;gpu\n"), ("squeue", ""), ("scancel", "")):
        answer(name, output)
    for number in (3, 4):
        queue.pool.start([number])
    queue.ended()
    queue.pool.end_workers(5.0)
    for name in ("sbatch", "squeue", "scancel"):
        assert "--clusters=gpu" in (tmp_path / f"{name}.args").read_text().splitlines()[-1]


def test_tasks_are_cancelled_by_one_command(answer: Answer, queue: Queue, tmp_path: Path) -> None:
    answer("scancel", error=NOBODY, code=1)
    queue.pool.workers, queue.pool.lost = [0, 1], [2]
    queue.pool.end_workers(5.0)
    assert (tmp_path / "scancel.args").read_text() == "7_0 7_1 7_2\n"
