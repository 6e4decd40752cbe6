"""What is made of the answers of squeue, sinfo, sacct and scancel: stand-ins on PATH give them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from featx.errors import ConfigError, RunError
from featx.pipeline.executors import slurm_queue
from featx.pipeline.executors.slurm_queue import (
    FORGOTTEN,
    SlurmQueue,
    TaskState,
    check_partition,
    is_no_controller,
    last_line,
    seconds_left,
)

NOBODY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

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

    answer("sacct", error="Slurm accounting storage is disabled", code=1)
    return answer


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def queue() -> Any:
    clock, output = Clock(), []
    made: Any = SlurmQueue(output.append, clock)
    made.clock, made.output = clock, output
    return made


def test_states_come_from_squeue_which_is_not_asked_too_often(
    answer: Answer, queue: Any, tmp_path: Path
) -> None:
    answer("squeue", "7_0|RUNNING|None\n7_1|PENDING|Resources\n8|CANCELLED|None\n9|RUNNING|None\n")
    ids = ["7_0", "7_1", "8"]
    assert queue.states(ids) == {
        "7_0": TaskState("RUNNING"),
        "7_1": TaskState("PENDING", "Resources"),
        "8": TaskState("CANCELLED"),
    }
    assert [task for task, state in queue.states(ids).items() if state.has_ended] == ["8"]
    queue.clock.now += slurm_queue.ASK_S
    queue.states(ids)
    asked = (tmp_path / "squeue.args").read_text().splitlines()
    assert len(asked) == 2
    assert asked[0].endswith("--jobs=7,8")
    assert not (tmp_path / "sacct.args").exists()
    assert queue.states([]) == {}


@pytest.mark.parametrize(
    ("sacct", "state"),
    [
        (None, FORGOTTEN),
        ("7_0|COMPLETED\n7_1|CANCELLED by 1000\n", "CANCELLED"),
        ("7_0|COMPLETED\n7_1|RUNNING\n", FORGOTTEN),  # the database lags behind
    ],
)
def test_a_task_that_the_controller_has_forgotten_has_ended(
    answer: Answer, queue: Any, sacct: str | None, state: str
) -> None:
    answer("squeue", "7_0|RUNNING|None\n")
    if sacct is not None:
        answer("sacct", sacct)
    states = queue.states(["7_0", "7_1"])
    assert states["7_0"] == TaskState("RUNNING")
    assert states["7_1"].state == state
    assert states["7_1"].has_ended
    assert queue.output == []


def test_a_job_that_squeue_knows_nothing_of_has_ended(answer: Answer, queue: Any) -> None:
    answer("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert queue.states(["7_0"])["7_0"].has_ended


def test_a_task_that_vanishes_from_the_queue_tells_what_it_was(answer: Answer, queue: Any) -> None:
    answer("squeue", "7_0|PENDING|Resources\n")
    queue.states(["7_0"])
    answer("squeue", "7_1|PENDING|Resources\n")
    for _ in range(2):
        queue.clock.now += slurm_queue.ASK_S
        found = queue.states(["7_0"])["7_0"]
        assert str(found) == "no longer known to Slurm, last seen as PENDING"


def test_a_controller_that_does_not_answer_says_nothing_of_tasks(
    answer: Answer, queue: Any
) -> None:
    answer("squeue", error=NOBODY, code=1)
    for _ in range(10):
        assert queue.states(["7_0"]) == {}
        queue.clock.now += slurm_queue.ASK_S
    assert len(queue.output) == 2, "once a minute"
    assert "does not answer (Unable to contact slurm controller (connect" in queue.output[0]
    answer("squeue", "7_0|RUNNING|None\n")
    assert queue.states(["7_0"]) == {"7_0": TaskState("RUNNING")}


def test_why_tasks_wait_is_said_every_minute(answer: Answer, queue: Any) -> None:
    answer("squeue", "7_0|RUNNING|None\n7_1|PENDING|Resources\n7_2|PENDING|JobHeldUser\n")
    ids = ["7_0", "7_1", "7_2"]
    for _ in range(15):
        queue.states(ids)
        queue.clock.now += slurm_queue.ASK_S
    assert queue.output == [
        f"2 of 3 tasks wait in the queue for {waited} now: Resources (1), JobHeldUser (1); "
        "scontrol release JOB lets it go"
        for waited in ("20 s", "80 s", "2 min")
    ]
    answer("squeue", "7_0|RUNNING|None\n7_1|RUNNING|None\n7_2|RUNNING|None\n")
    for _ in range(8):
        queue.states(ids)
        queue.clock.now += slurm_queue.ASK_S
    assert len(queue.output) == 3


def test_partitions_are_compared_with_the_cluster_s(answer: Answer) -> None:
    answer("sinfo", "gpu\nshort\ngpu\n")
    check_partition(None)
    check_partition("short,gpu")
    with pytest.raises(ConfigError, match=r"no partition gpus. Nearest: gpu. It has: gpu, short"):
        check_partition("short,gpus")


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
        check_partition("gpu")
    assert getattr(output.value, "exit_code", None) == code
    assert last_line(error) in str(output.value)
    assert "\n" not in str(output.value)


def test_tasks_are_cancelled_by_one_command(answer: Answer, queue: Any, tmp_path: Path) -> None:
    answer("scancel", error=NOBODY, code=1)
    queue.cancel(["7_0", "7_1"])
    queue.cancel([])
    assert (tmp_path / "scancel.args").read_text() == "7_0 7_1\n"


@pytest.mark.parametrize(
    ("left", "seconds"),
    [("0:59", 59), ("2:03:04", 7384), ("1-00:00:01", 86401), ("UNLIMITED", 240), ("", 240)],
)
def test_how_long_a_task_may_run(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, left: str, seconds: float
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    answer("squeue", f"{left}\n")
    assert seconds_left(240) == seconds
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4102444800")
    assert seconds_left(240) > 10**8
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert seconds_left(240) == 240


def test_what_commands_say_is_told_apart() -> None:
    refusal = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job failed"
    assert last_line(refusal) == "Batch job failed"
    assert last_line(NOBODY) == "Unable to contact slurm controller (connect failure)"
    assert last_line("") == "no reason given"
    assert not is_no_controller(refusal)
    assert is_no_controller(f"sbatch: error: {NOBODY}")
